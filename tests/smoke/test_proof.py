"""E0, the proof that latents carry information: key-value cards, two readers trained here, every control, every bit.

Nothing is downloaded. The numbers that this run gave stand in docs/experiments.md. What the other commands say of a
trained run is asked of this one.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import run
from configs import pairs
from lw_jax.core import config, tree
from lw_jax.data import question_cards
from lw_jax.recipes import selfmade
from tests import tiny
from tests.commands import PROJECT, QUESTION, TEXT, environment, start, start_several

VALUES = 30  # of each key: the best guess without the card
CHANCE = 1 / VALUES
COLLAPSED, NO_GAP = 0.60, 0.30  # below these the wire does not work at all
READ, LATENTS, ABOVE_CHANCE = 0.99, 0.95, 0.05
INT4_LOSS = 0.02
PARAMETERS = 1_000_000

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """configs/pairs.py, trained and evaluated as a user would."""
    workdir = tmp_path_factory.mktemp("proof") / "run"
    flags = ["--config.eval.examples=192", "--config.eval.curve=f1", "--config.eval.curve_examples=96"]
    for words in (["--config", "configs/pairs.py"], ["eval", *flags]):
        done = start(*words, "--workdir", str(workdir), cwd=workdir.parent, environ=environment(1))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return workdir


@pytest.fixture(scope="module")
def proof(trained: Path) -> dict:
    return json.loads((trained / "eval.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("reader", ["llama", "qwen"])
def test_latents_carry_the_text_and_another_text_does_not(proof, reader):
    rows = {row: values["em"] for row, values in proof["rows"][reader].items()}
    assert rows["latents"] >= COLLAPSED and rows["latents"] - rows["shuffled"] >= NO_GAP, f"COLLAPSED: {rows}"
    assert rows["text"] >= READ, rows
    assert rows["latents"] >= LATENTS, rows
    assert max(rows["shuffled"], rows["zero"], rows["none"]) <= CHANCE + ABOVE_CHANCE, rows


@pytest.mark.parametrize("reader", ["llama", "qwen"])
def test_latents_survive_quantisation(proof, reader):
    points = [point for point in proof["curve"]["points"] if point["reader"] == reader]
    em = {point["bits"]: point["em"] for point in points}
    assert em.keys() == {16, 8, 6, 4, 2}
    assert em[8] >= em[16], em
    assert em[4] >= em[16] - INT4_LOSS, em
    sizes = [point["framed_bytes"] for point in sorted(points, key=lambda point: -point["bits"])]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0] / 6


def test_encoder_is_small():
    cfg = config.build(pairs.get_config())
    assert tree.count(tiny.outline(cfg).recipe.abstract.trainable["encoder"]) <= PARAMETERS


def test_a_run_leaves_what_the_readme_promises(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert {"config.json", "config.diff", "command.txt", "versions.json", "metrics.jsonl"} <= names
    assert {"checkpoints", "eval.json", "predictions.jsonl", "slots.json", "bytes.csv", "bytes.png"} <= names
    losses = tiny.logged_losses(trained)
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


def test_report_of_it_says_that_the_message_carries_the_text(trained: Path) -> None:
    assert run.main(["report", "--workdir", str(trained)]) == 0
    text = (trained / "report.html").read_text(encoding="utf-8")
    assert text.count("the message carries the text") == 2 and 'class="missing"' not in text


def test_message_crosses_a_pipe_and_is_answered_as_from_its_text(trained: Path, tmp_path: Path) -> None:
    """The text comes from standard input, the message goes to standard output and into the other process."""
    (tmp_path / "notes.txt").write_text(TEXT, encoding="utf-8")
    words = ("--workdir", str(trained), *QUESTION, "--context", "notes.txt", "--bits", "6")
    alone = start("answer", *words, cwd=tmp_path, environ=environment(1))
    assert alone.returncode == 0, alone.stderr
    answer = f"{shlex.quote(sys.executable)} {shlex.quote(str(PROJECT / 'run.py'))} answer --workdir {trained}"
    piped = f"{answer} --context - --bits 6 --write - | {answer} --message - {shlex.join(QUESTION)}"
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment(1), "check": True}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", piped], input=TEXT, **options)
    found = done.stdout.splitlines()
    expected = [line for line in alone.stdout.splitlines() if "from text" not in line]
    assert found[0] == "message: 790 bytes (16 x 64 values of 6 bits)" and expected[0].startswith(found[0])
    assert found[1:] == expected[1:] and len(found) == 4


@pytest.mark.usefixtures("trained")  # whose reader is taken
def test_thirty_two_examples_overfit_by_generation(tmp_path: Path) -> None:
    """From scratch, byte encoder and random adapter: only a right signal, EOS included, ends in whole answers."""
    made = question_cards.make(32, facts=8, seed=3, split="train", style="pairs")
    rows = [{"context": e.context, "question": e.question, "answers": list(e.answers)} for e in made]
    for name in ("train.jsonl", "same.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    reader = selfmade.finished_folder(config.build(pairs.get_config()), "selfmade:llama")
    words = ["--config", "configs/pairs_one.py", f"--config.llms.llama.source={reader}"]
    words += (
        "--config.data.train=train.jsonl --config.data.validation=same.jsonl "
        "--config.adapter.start=random --config.encoder.kind=bytes --config.encoder.source= --config.encoder.layers=2 "
        "--config.encoder.rate=0.3 --config.encoder.window=256 --config.optim.learning_rate=3e-3 "
        "--config.train.steps=150 --config.train.eval_every=0 --config.eval.rows=latents,shuffled --workdir w"
    ).split()
    environ = environment(1) | {"PYTHONPATH": str(PROJECT)}
    done = start_several({verb: [verb, *words] for verb in ("train", "eval")}, cwd=tmp_path, environ=environ)
    assert all(code == 0 for code, _, _ in done.values()), done
    (found,) = json.loads((tmp_path / "w" / "eval.json").read_text(encoding="utf-8"))["rows"].values()
    assert found["latents"]["em"] > 0.9
    assert found["shuffled"]["em"] < 0.5
