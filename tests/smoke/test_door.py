"""The command line as a user meets it: where the verb may stand, what each verb is given, what refusals look like."""

import errno
import importlib
import json
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import pytest

import lw_jax
import run
from lw_jax.commands import parser, train
from lw_jax.core import processes
from lw_jax.core.errors import UserError
from lw_jax.training import run_folder
from sharding.errors import PlacementError
from tests.commands import PROJECT

SMOKE = ["--config", "configs/smoke.py"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Records what the verbs would do, in an empty folder."""
    recorded: list[dict[str, Any]] = []
    monkeypatch.setattr(
        train, "main", lambda cfg, workdir, _: recorded.append({"verb": "train", "cfg": cfg, "workdir": workdir})
    )
    for verb in ("eval", "report"):
        module = importlib.import_module(parser.COMMANDS[verb].module)
        monkeypatch.setattr(module, "run", lambda args, loaded: recorded.append(vars(args) | {"cfg": loaded.cfg}))
    monkeypatch.chdir(tmp_path)
    return recorded


@pytest.mark.parametrize(
    "argv",
    [
        [*SMOKE, "--config.seed=7", "--workdir", "w"],
        ["train", *SMOKE, "--config.seed=7", "--workdir", "w"],
        [*SMOKE, "train", "--config.seed", "7", "--workdir", "w"],
        ["--workdir=w", "--config=configs/smoke.py", "--config.seed", "7", "train"],
    ],
)
def test_verb_may_stand_anywhere_and_is_train_when_left_out(calls: list[dict[str, Any]], argv: list[str]) -> None:
    assert run.main(argv) == 0
    (call,) = calls
    assert (call["verb"], call["cfg"].seed, call["workdir"]) == ("train", 7, Path("w"))
    assert run_folder.read_config(Path("w")) == call["cfg"]


def test_one_process_of_several_writes_the_folder(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    client = types.SimpleNamespace(blocking_key_value_get=lambda *_: json.dumps({"value": None}))
    monkeypatch.setattr(processes, "_client", lambda: client)
    monkeypatch.setattr(processes.distributed.global_state, "process_id", 1)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert run.main([*SMOKE, "--workdir", "w"]) == 0
    assert calls and not Path("w").exists()


def test_eval_of_a_folder_takes_the_saved_configuration(calls: list[dict[str, Any]]) -> None:
    assert run.main([*SMOKE, "--config.seed=7", "--workdir", "w"]) == 0
    before = Path("w/config.json").read_bytes()
    assert run.main(["eval", "--workdir", "w", "--config.eval.examples=5", "--config.mesh.placement=single"]) == 0
    cfg = calls[1]["cfg"]
    assert (calls[1]["verb"], cfg.seed, cfg.eval.examples, cfg.mesh.placement) == ("eval", 7, 5, "single")
    assert Path("w/config.json").read_bytes() == before
    for argv in (["--config.seed=8"], [*SMOKE]):
        assert run.main(["eval", "--workdir", "w", *argv]) == 2
    assert len(calls) == 2, "another run is not evaluated"


@pytest.mark.parametrize("error", [UserError("mend this"), PlacementError("mend this")])
def test_error_of_a_verb_that_the_user_can_mend_is_one_line(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: ValueError
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(train, "main", fail)
    assert run.main(SMOKE) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: mend this"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--config"),
        (["eval"], "--workdir"),
        (["evl", "--workdir", "w"], "'eval'"),
        ([*SMOKE, "xyz"], "xyz"),
        (["eval", "--workdir", *SMOKE], "--workdir"),
        ([*SMOKE, "--wrokdir", "w"], "--wrokdir; did you mean '--workdir'?"),
        (["--config", "configs/smoke.py:latentwrie"], "'latentwire'"),
        ([*SMOKE, "--config.train.step=3"], "'train.steps'"),
        ([*SMOKE, "--config.recipe=ttt"], "--config FILE.py:ttt"),
        ([*SMOKE, "--config.prompt.anchor=\\nAnswer:"], "no line break"),
        ([*SMOKE, "--config.encoder.slots=0"], "encoder.slots = 0"),
        ([*SMOKE, "--slots", "0"], "--slots belongs to 'answer'"),
        (["answer", *SMOKE, "--question", "a?"], "--context"),
        (["answer", *SMOKE, "--context", "a", "--message", "b"], "--message"),
        (["answer", *SMOKE, "--context", "a"], "--question"),
        (["answer", *SMOKE, "--message", "a", "--question", "b?", "--bits", "0"], "--bits"),
        (["answer", *SMOKE, "--message", "a", "--question", "b?", "--write", "c"], "--write"),
        (["answer", *SMOKE, "--context", "a", "--question", "b?", "--write", "-"], "--question"),
        (["answer", *SMOKE, "--context", "a", "--write", "-", "--bits", "four"], "--bits: 'four'"),
        (["generate", *SMOKE, "--prompt", "a", "--temperature", "nan"], "--temperature: 'nan'"),
        (["generate", "--workdir", "w", "--prompt", "a\udcff"], "--prompt: 'a\\udcff'"),
        (["train", *SMOKE, "--workdir", ""], "--workdir: empty"),
        (["train", *SMOKE, "--workdir", "a\udcff"], "--workdir: 'a\\udcff'"),
        (["eval", *SMOKE, "--out="], "--out: empty"),
        (["export", "--workdir", "w", "--wire", "x", "--push", ""], "--push: empty"),
        (["answer", *SMOKE, "--message", "a", "--question", "b?", "--reader", ""], "--reader: empty"),
        ([*SMOKE, *SMOKE], "--config: given twice"),
        (["generate", "--prompt", "a", "--tokens", "100", "--tokens", "5"], "--tokens: given twice"),
        (["slurm", *SMOKE, "--jobs", "array", "--jobs=array"], "--jobs: given twice"),
        (["slurm", *SMOKE, "--hours", "inf"], "--hours: 'inf'"),
        (["slurm", "--workdir", "runs/mine", "--target", "h100x4"], "--config"),
        (["slurm", *SMOKE, "--jobs", "array"], "--jobs "),
        (["train", "--config", "configs/dpo/all.list"], "--config configs/dpo/all.list: "),
        (["bench", *SMOKE, "--parts", "steps"], "--parts steps: "),
        (["bench", *SMOKE, "--repeats", "0"], "--repeats 0: "),
        (["bench", *SMOKE, "--repeats", "2", "--target", "h100x1"], "--repeats 2: "),
        (["report", "--workdir", "w", "--config.eval.examples=3"], "--config.eval.examples"),
        (["show", "--keys", *SMOKE], "--keys"),
        (["show", "--keys", "--config.train.steps=3"], "--keys"),
        (["show", "--config", f"{'a' * 300}.py"], "File name too long"),
        (["show", "--workdir", "a" * 300], "File name too long"),
        (["answer", *SMOKE, "--message", "none.lwjx", "--question", "a?"], "--message none.lwjx"),
        (["eval", "--workdir", "nowhere"], "nowhere/config.json"),
    ],
)
def test_bad_command_is_refused_in_one_line_with_code_2(
    calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert run.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
    assert not calls and not list(Path().iterdir())


def test_every_example_of_the_help_is_accepted() -> None:
    for name, command in parser.COMMANDS.items():
        assert command.examples
        for example in command.examples:
            assert parser.parse([name, *shlex.split(example)]).verb == name


def test_a_home_is_filled_in_for_every_flag_of_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/mara")
    for name, command in parser.COMMANDS.items():
        metavars = {flag: options.get("metavar") for flag, options in (parser.COMMON | command.flags).items()}
        for flag in (flag for flag, metavar in metavars.items() if metavar in ("DIR", "FILE", "FILE[:recipe]")):
            words = [f"{flag}=~/w", f"{flag}=-"]
            taken = [vars(parser._build().parse_args([name, word]))[flag[2:]] for word in words]
            assert taken == ["/home/mara/w", "-"], (name, flag)


def test_version_and_help_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, words in ((["--version"], lw_jax.__version__), (["answer", "--help"], "--question")):
        with pytest.raises(SystemExit) as left:
            run.main(argv)
        assert left.value.code == 0 and words in capsys.readouterr().out


def test_show_marks_where_each_value_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run.main(["show", *SMOKE, "--config.seed=7"]) == 0
    done = capsys.readouterr()
    rows = {line.split()[0]: line for line in done.out.splitlines() if line and not line.startswith(" ")}
    assert done.err == ""
    assert "command line" in rows["seed"] and rows["seed"].endswith(" 7")
    assert " config " in rows["encoder.width"] and " base " in rows["encoder.pooling"]
    assert "  seed: 0 -> 7" in done.out.splitlines()
    assert "\033" not in done.out and not list(tmp_path.iterdir())


# --- real processes: a pipe, exit codes, what is imported ---


# Stands in for training: prints more than a pipe holds, in lines of both streams, then leaves a file.
PRINTING = """
import runpy, sys
from pathlib import Path
from lw_jax.commands import train

def main(cfg, workdir, record):
    for step in range(5000):
        print("step", step, "x" * 20, file=(sys.stdout, sys.stderr)[step % 2], flush=True)
    (workdir / "trained").touch()
    return 75

train.main = main
sys.argv = ["run.py", "--config", "configs/smoke.py", "--workdir", sys.argv[1]]
runpy.run_path("run.py", run_name="__main__")
"""


def test_training_goes_on_where_the_reader_of_its_lines_has_left(tmp_path: Path) -> None:
    command = f"set -o pipefail; {shlex.join([sys.executable, '-c', PRINTING, str(tmp_path / 'w')])} 2>&1 | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=PROJECT, check=False)
    assert (tmp_path / "w" / "trained").exists()
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (75, 1, "")


@pytest.mark.usefixtures("calls")
def test_place_that_cannot_be_written_is_one_line_wherever_it_is_found(monkeypatch, capsys) -> None:
    def fail(code: int) -> int:
        raise OSError(code, os.strerror(code), "some/file")

    monkeypatch.setattr(train, "main", lambda *_: fail(errno.ENOSPC))
    assert run.main([*SMOKE, "--workdir", "w"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: some/file: ")
    monkeypatch.setattr(train, "main", lambda *_: fail(errno.EIO))
    with pytest.raises(OSError, match="some/file"):
        run.main([*SMOKE, "--workdir", "w"])
