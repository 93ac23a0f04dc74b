"""The README's commands as a user runs them: real processes, XLA's usual optimizations, readers made on the way."""

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

from lw_jax.commands import parser
from lw_jax.core import config, config_file, runtime, validation
from lw_jax.data import question_cards
from lw_jax.training import metrics

PROJECT = Path(__file__).resolve().parent.parent.parent
README = (PROJECT / "README.md").read_text(encoding="utf-8")
GAP = 0.3  # nats per answer token between another text's latents and the right ones; a collapsed wire has 0


def start(*argv: str, cwd: Path, devices: int = 1, **kwargs) -> subprocess.CompletedProcess[str]:
    """Runs run.py as a user would, on so many virtual CPU devices."""
    command = [sys.executable, str(PROJECT / "run.py"), *argv]
    environ = environment(devices)
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environ, check=False, **kwargs)


def environment(devices: int) -> dict[str, str]:
    quiet = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_NUM_CPU_DEVICES")
    kept = {key: value for key, value in os.environ.items() if key not in quiet}
    return kept | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}


def logged_losses(workdir: Path) -> list[float]:
    return [row["train/loss"] for row in metrics.read(workdir / "metrics.jsonl") if "train/loss" in row]


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


@pytest.mark.slow
def test_report_is_one_page_of_the_run(trained: Path) -> None:
    done = start("report", "--workdir", str(trained), cwd=trained.parent)
    assert (done.returncode, done.stderr) == (0, "")
    text = (trained / "report.html").read_text(encoding="utf-8")
    assert str(trained / "report.html") in done.stdout
    assert text.count("the latents carry the text") == 2
    assert 'class="missing"' not in text and "https:" not in text


@pytest.mark.slow
def test_answer_reads_a_file_and_standard_input(trained: Path, tmp_path: Path) -> None:
    context = tmp_path / "notes.txt"
    context.write_text("Mara Ellis lives in Lisbon.", encoding="utf-8")
    asked = ["answer", "--workdir", str(trained), "--question", "Where does Mara Ellis live?"]
    done = start(*asked, "--context", str(context), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("llama", "qwen"):
        assert re.search(rf"{name} from latents: \S+", done.stdout)
        assert re.search(rf"{name} from text: +\S+", done.stdout)
    piped = start(*asked, "--context", "-", cwd=tmp_path, input=context.read_text(encoding="utf-8"))
    assert piped.stdout == done.stdout


@pytest.mark.slow
def test_message_crosses_a_pipe_and_is_answered_as_from_its_text(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Mara Ellis lives in Lisbon.", encoding="utf-8")
    answer = f"{shlex.quote(sys.executable)} {shlex.quote(str(PROJECT / 'run.py'))} answer --workdir {trained}"
    question = "--question 'Where does Mara Ellis live?'"
    piped = f"{answer} --context notes.txt --bits 6 --write - | {answer} --message - {question}"
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment(1), "check": True}
    found = subprocess.run(["bash", "-o", "pipefail", "-c", piped], **options).stdout.splitlines()
    direct = start("answer", "--workdir", str(trained), "--context", "notes.txt", "--bits", "6",
                   "--question", "Where does Mara Ellis live?", cwd=tmp_path)  # fmt: skip
    expected = [line for line in direct.stdout.splitlines() if "from text" not in line]
    assert found[0] == "message: 406 bytes (8 x 64 values of 6 bits)" and expected[0].startswith(found[0])
    assert found[1:] == expected[1:] and len(found) == 4


@pytest.mark.slow
def test_file_that_is_no_message_is_one_error_with_code_2(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Mara Ellis lives in Lisbon.", encoding="utf-8")
    asked = ["answer", "--workdir", str(trained), "--message", "notes.txt", "--question", "Where?"]
    done = start(*asked, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("error: ") == 1 and "error: not a latent message: 27 bytes" in done.stderr


@pytest.mark.slow
def test_readme_python_runs_on_a_trained_run(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    reader = next((Path(os.environ["LW_JAX_CACHE"]) / "selfmade").glob("llama-*"))
    code = code.replace("runs/smoke-latentwire", str(trained)).replace("path/to/a/model/folder", str(reader))
    exec(compile(code, "README.md", "exec"), {})
    size, _ = capsys.readouterr().out.splitlines()[0].split(maxsplit=1)
    assert int(size) > 0


@pytest.mark.slow
def test_a_trained_folder_goes_on_instead_of_starting_anew(trained: Path) -> None:
    done = start("--config", "configs/smoke.py", "--workdir", str(trained), cwd=trained.parent)
    assert done.returncode == 0, done.stderr
    assert "resuming from step" in done.stdout


def readme_commands() -> list[str]:
    lines = [line.split("#")[0].strip() for line in README.splitlines() if "python run.py" in line]
    spans = [span for line in lines for span in re.findall(r"`([^`]*python run\.py[^`]*)`", line)]
    return sorted({*spans, *(line for line in lines if line.startswith("python run.py"))})


@pytest.mark.parametrize("command", readme_commands())
def test_every_readme_command_is_accepted(command: str) -> None:
    words = shlex.split(command)
    args = parser.parse(words[words.index("run.py") + 1 :])
    if args.config:
        values = config_file.load(args.config, root=PROJECT)
        config_file.override(values, args.assignments)
        validation.validate(config.build(values))


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


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_goes_on(trained: Path, tmp_path: Path) -> None:
    argv = ["--config", "configs/smoke.py", "--config.train.log_every=1", "--workdir", str(tmp_path / "w")]
    command = [sys.executable, "-u", str(PROJECT / "run.py"), *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(1)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 3/"):
                process.send_signal(signal.SIGTERM)
        assert process.wait() == runtime.REQUEUE
    saved = max(int(path.name) for path in (tmp_path / "w" / "checkpoints").iterdir())
    done = start(*argv, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"resuming from step {saved}" in done.stdout
    np.testing.assert_allclose(logged_losses(tmp_path / "w")[-1], logged_losses(trained)[-1], rtol=1e-4)


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
SINGLE = ("--config.mesh.placement=single", "--config.compute.remat=none")


@pytest.mark.slow
def test_h100x4_trains_on_four_virtual_devices_under_its_own_placement(tmp_path: Path) -> None:
    done = start("--config", "configs/h100x4.py", *TINY, "--workdir", "w", cwd=tmp_path, devices=4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "placement replicate: data=4 x model=1 on 4 cpu" in done.stdout
    assert "step 4/4" in done.stdout
    single = start(*("--config", "configs/large.py", *TINY, *SINGLE, "--workdir", "w1"), cwd=tmp_path)
    assert single.returncode == 0, single.stdout + single.stderr
    np.testing.assert_allclose(logged_losses(tmp_path / "w"), logged_losses(tmp_path / "w1"), rtol=1e-5)


REFUSED = {
    "missing data file": (["--config.data.train=nowhere.jsonl"], "nowhere.jsonl"),
    "hub id without network": (["--config.llms.llama.source=nobody/nothing"], "nobody/nothing"),
    "missing model folder": (["--config.llms.llama.source=./no-model"], "no-model"),
    "broken JSON line": (["--config.data.train=broken.jsonl"], "broken.jsonl:2"),
    "empty context": (["--config.data.train=empty.jsonl"], "empty.jsonl:1"),
    "context longer than the window": (["--config.encoder.window=16"], "encoder.window=16"),
    "unknown placement": (["--config.mesh.placement=everywhere"], "everywhere"),
    "three devices, model axis of two": (["--config.mesh.placement=tensor", "--config.mesh.model=2"], "3 devices"),
    "batch that three devices do not divide": (["--config.mesh.placement=replicate"], "global_batch"),
    "unknown key": (["--config.train.step=3"], "train.steps"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_error_with_code_2(name: str, tmp_path: Path) -> None:
    overrides, word = REFUSED[name]
    good = '{"context": "Mara lives in Rome.", "question": "Where does Mara live?", "answer": "Rome"}\n'
    (tmp_path / "broken.jsonl").write_text(good + "{oops\n", encoding="utf-8")
    (tmp_path / "empty.jsonl").write_text(good.replace("Mara lives in Rome.", " "), encoding="utf-8")
    devices = 3 if "three" in name else 1
    done = start("--config", "configs/smoke.py", *TINY, "--workdir", "w", *overrides, cwd=tmp_path, devices=devices)
    assert done.returncode == 2, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and word in errors[0]
    assert "Traceback" not in done.stderr
