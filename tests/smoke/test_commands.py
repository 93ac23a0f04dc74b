"""Commands as a user runs them: real processes, XLA's usual optimizations, readers made on the way."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lw_jax.core import runtime
from lw_jax.data import question_cards
from lw_jax.training import metrics

PROJECT = Path(__file__).resolve().parent.parent.parent
GAP = 0.3  # nats per answer token between another text's latents and the right ones; a collapsed wire has 0


def start(*argv: str, cwd: Path, **kwargs) -> subprocess.CompletedProcess[str]:
    """Runs run.py as a user would."""
    command = [sys.executable, str(PROJECT / "run.py"), *argv]
    environ = environment(1)
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environ, check=False, **kwargs)


# Runs each of several command lines in turn and prints, as JSON, [exit code, standard output, standard error] of each.
SEVERAL = """
import contextlib, io, json, os, sys
import run
from lw_jax.core import environment
environment.leave_out_torch()
wanted = json.loads(sys.argv.pop())
sys.argv[0] = "run.py"
found = []
for argv in wanted:
    sys.argv[1:] = argv
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run.main(argv)
        except SystemExit as end:  # argparse
            code = end.code
    found.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""
Done = tuple[int, str, str]


def start_several(commands: dict[str, list[str]], *, cwd: Path, environ: dict[str, str]) -> dict[str, Done]:
    """Runs command lines one after the other in one process, which imports JAX once; {name: (code, stdout, stderr)}.

    What C++ libraries write comes around Python's stderr and must be nothing.
    """
    command = [sys.executable, "-c", SEVERAL, json.dumps(list(commands.values()))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environ, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return dict(zip(commands, map(tuple, json.loads(done.stdout.splitlines()[-1])), strict=True))


def environment(devices: int) -> dict[str, str]:
    """XLA's usual optimizations, which the settings of conftest.py leave out."""
    quiet = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_NUM_CPU_DEVICES")
    kept = {key: value for key, value in os.environ.items() if key not in quiet}
    return kept | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}


def quick_environment(devices: int) -> dict[str, str]:
    """The settings of conftest.py, for tiny models whose compilation takes the time."""
    return os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(PROJECT)}


def logged_losses(workdir: Path) -> list[float]:
    return [row["train/loss"] for row in metrics.read_metrics(workdir / "metrics.jsonl") if "train/loss" in row]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smoke configuration, trained and evaluated."""
    workdir = tmp_path_factory.mktemp("smoke") / "run"
    for verb in ("train", "eval"):
        done = start(verb, "--config", "configs/smoke.py", "--workdir", str(workdir), cwd=workdir.parent)
        assert done.returncode == 0, done.stdout + done.stderr
    return workdir


@pytest.mark.slow
def test_smoke_run_reads_the_latents_of_the_right_text(trained: Path) -> None:
    rows = json.loads((trained / "eval.json").read_text(encoding="utf-8"))["rows"]
    assert rows.keys() == {"llama", "qwen"}
    for found in rows.values():
        assert found.keys() == {"text", "latents", "shuffled", "zero", "none", "truncated"}
        assert found["text"]["em"] > 0.9, "the self-made reader must read before the wire can be judged"
        assert found["shuffled"]["nll"] - found["latents"]["nll"] > GAP
        assert found["latents"]["em"] > found["shuffled"]["em"] + 0.3
        assert found["none"]["em"] < 0.2


@pytest.mark.slow
def test_a_run_leaves_what_the_readme_promises(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert {"config.json", "config.diff", "command.txt", "versions.json", "metrics.jsonl"} <= names
    assert {"checkpoints", "eval.json", "predictions.jsonl", "slots.json", "bytes.csv", "bytes.png"} <= names
    losses = logged_losses(trained)
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


QUESTION = ["--question", "Where does Mara Ellis live?"]
TEXT = "Mara Ellis lives in Lisbon."


@pytest.fixture(scope="session")
def verbs(trained: Path) -> dict[str, Done]:
    """What the verbs that need a trained run say of it."""
    notes = trained.parent / "notes.txt"
    notes.write_text(TEXT, encoding="utf-8")
    at = ["--workdir", str(trained)]
    commands = {
        "report": ["report", *at],
        "answer": ["answer", *at, *QUESTION, "--context", str(notes), "--bits", "6"],
        "train again": ["--config", str(PROJECT / "configs" / "smoke.py"), *at],
    }
    return start_several(commands, cwd=trained.parent, environ=environment(1) | {"PYTHONPATH": str(PROJECT)})


@pytest.mark.slow
def test_verbs_take_up_what_the_run_has_left(trained: Path, verbs: dict[str, Done]) -> None:
    assert {name: code for name, (code, _, _) in verbs.items() if code} == {}
    text = (trained / "report.html").read_text(encoding="utf-8")
    assert text.count("the message carries the text") == 2 and 'class="missing"' not in text
    assert all(f"{name} from latents: " in verbs["answer"][1] for name in ("llama", "qwen"))
    assert re.search(r"from step \d+", verbs["train again"][1])


@pytest.mark.slow
def test_message_crosses_a_pipe_and_is_answered_as_from_its_text(trained: Path, verbs, tmp_path: Path) -> None:
    """The text comes from standard input, the message goes to standard output and into the other process."""
    answer = f"{shlex.quote(sys.executable)} {shlex.quote(str(PROJECT / 'run.py'))} answer --workdir {trained}"
    piped = f"{answer} --context - --bits 6 --write - | {answer} --message - {shlex.join(QUESTION)}"
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment(1), "check": True}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", piped], input=TEXT, **options)
    found = done.stdout.splitlines()
    expected = [line for line in verbs["answer"][1].splitlines() if "from text" not in line]
    assert found[0] == "message: 406 bytes (8 x 64 values of 6 bits)" and expected[0].startswith(found[0])
    assert found[1:] == expected[1:] and len(found) == 4


@pytest.mark.slow
def test_thirty_two_examples_overfit_by_generation(trained: Path, tmp_path: Path) -> None:
    """From scratch, byte encoder and random adapters: only a right signal, EOS included, ends in whole answers."""
    made = question_cards.make(32, facts=1, seed=3, split="train")
    rows = [{"context": e.context, "question": e.question, "answers": list(e.answers)} for e in made]
    for name in ("train.jsonl", "same.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    changes = (
        "--config.data.train=train.jsonl --config.data.validation=same.jsonl --config.adapter.start=random "
        "--config.encoder.kind=bytes --config.encoder.source= --config.encoder.layers=2 --config.train.steps=250 "
        "--config.optim.learning_rate=3e-3 --config.eval.rows=latents,shuffled --config.train.eval_every=0"
    ).split()
    for verb in ("train", "eval"):
        done = start(verb, "--config", "configs/smoke.py", *changes, "--workdir", "w", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    for found in json.loads((tmp_path / "w" / "eval.json").read_text(encoding="utf-8"))["rows"].values():
        assert found["latents"]["em"] > 0.9
        assert found["shuffled"]["em"] < 0.5


TINY = (
    "--config.llms.llama.source=selfmade:llama --config.llms.qwen.source=selfmade:qwen "
    "--config.llms.llama.weights=fp32 --config.llms.qwen.weights=fp32 "
    "--config.llms.llama.template=plain --config.llms.qwen.template=plain "
    "--config.encoder.kind=bytes --config.encoder.source= --config.encoder.width=32 --config.encoder.slots=8 "
    "--config.encoder.layers=1 --config.encoder.window=256 --config.adapter.hidden=64 --config.adapter.start=random "
    "--config.data.train=cards --config.data.validation=cards --config.data.cards=128 --config.data.facts=1 "
    "--config.selfmade.steps=2 --config.optim.warmup_steps=1 --config.train.steps=4 --config.train.global_batch=32 "
    "--config.train.micro_batch=8 --config.train.log_every=1 --config.compute.dtype=fp32 --config.eval.examples=16"
).split()


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_resumes(tmp_path: Path) -> None:
    argv = ["--config", str(PROJECT / "configs" / "smoke.py"), *TINY, "--config.train.steps=60", "--workdir"]
    command = [sys.executable, "-u", str(PROJECT / "run.py"), *argv, "w"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=quick_environment(1)
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 3/60"):
                process.send_signal(signal.SIGTERM)
        assert process.wait() == runtime.REQUEUE
    saved = max(int(path.name) for path in (tmp_path / "w" / "checkpoints").iterdir())
    both = {"resumed": [*argv, "w"], "unbroken": [*argv, "u"]}
    done = start_several(both, cwd=tmp_path, environ=quick_environment(1))
    assert [code for code, _, _ in done.values()] == [0, 0]
    assert f"from step {saved}" in done["resumed"][1] and "from step" not in done["unbroken"][1]
    np.testing.assert_allclose(logged_losses(tmp_path / "w"), logged_losses(tmp_path / "u"), rtol=1e-5)
