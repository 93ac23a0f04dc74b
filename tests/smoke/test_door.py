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
from lw_jax.commands import parser
from lw_jax.core import processes
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.inference import message_io
from sharding.errors import PlacementError

PROJECT = Path(__file__).resolve().parent.parent.parent
SMOKE = ["--config", "configs/smoke.py"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Records what the verbs' `main` would be given, in an empty folder."""
    recorded: list[dict[str, Any]] = []
    for verb in parser.COMMANDS:
        if verb != "show":
            _replace(
                monkeypatch, verb, lambda cfg, verb=verb, **given: recorded.append({"verb": verb, "cfg": cfg} | given)
            )
    monkeypatch.chdir(tmp_path)
    return recorded


def _replace(monkeypatch: pytest.MonkeyPatch, verb: str, main: Any) -> None:
    monkeypatch.setattr(importlib.import_module(parser.COMMANDS[verb].module), "main", main)


def _start(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROJECT / "run.py"), *argv]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


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
    assert isinstance(call["cfg"], Config) and call["resolved"]["seed"] == 7
    assert json.loads(Path("w/config.json").read_text(encoding="utf-8")) == call["resolved"]


def test_folder_of_a_run_is_named_by_file_and_recipe(calls: list[dict[str, Any]]) -> None:
    assert run.main(["--config", "configs/smoke.py:latentwire"]) == 0
    assert calls[0]["workdir"] == Path("runs/smoke-latentwire")


def test_one_process_of_several_writes_the_folder(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    client = types.SimpleNamespace(blocking_key_value_get=lambda *_: json.dumps({"value": None}))
    monkeypatch.setattr(processes, "_client", lambda: client)
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


@pytest.mark.parametrize(
    "argv", [["--config.seed=8"], [*SMOKE], [*SMOKE, "--config.seed=7", "--config.encoder.slots=9"]]
)
def test_eval_that_means_another_run_is_refused(
    calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert run.main([*SMOKE, "--config.seed=7", "--workdir", "w"]) == 0
    assert run.main(["eval", "--workdir", "w", *argv]) == 2
    assert "the run there differs in" in capsys.readouterr().err
    assert len(calls) == 1


def test_answer_gets_the_text_and_every_question(calls: list[dict[str, Any]]) -> None:
    Path("text.txt").write_text("Ä text.\n", encoding="utf-8")
    assert run.main([*SMOKE, "--workdir", "w"]) == 0
    assert run.main(["answer", "--workdir", "w", "--context", "text.txt", "--question", "a?", "--question", "b?"]) == 0
    assert calls[1]["request"] == message_io.Request(context="Ä text.\n", questions=("a?", "b?"))


def test_answer_gets_the_message_or_how_to_write_one(calls: list[dict[str, Any]]) -> None:
    Path("text.txt").write_text("A text.", encoding="utf-8")
    Path("message").write_bytes(b"LWJX\xff\r\n")
    assert run.main([*SMOKE, "--workdir", "w"]) == 0
    assert run.main(["answer", "--workdir", "w", "--message", "message", "--question", "a?"]) == 0
    assert calls[1]["request"] == message_io.Request(message=b"LWJX\xff\r\n", questions=("a?",))
    sizes = ["--bits", "4", "--slots=3", "--width", "5"]
    assert run.main(["answer", "--workdir", "w", "--context", "text.txt", "--write", "-", *sizes]) == 0
    assert calls[2]["request"] == message_io.Request(context="A text.", write="-", bits=4, slots=3, width=5)


@pytest.mark.parametrize("error", [UserError("mend this"), PlacementError("mend this")])
def test_error_of_a_verb_that_the_user_can_mend_is_one_line(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: ValueError
) -> None:
    def fail(cfg: Config, **given: Any) -> None:
        raise error

    _replace(monkeypatch, "train", fail)
    assert run.main(SMOKE) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: mend this"


@pytest.mark.parametrize(("code", "expected"), [(None, 0), (0, 0), (75, 75)])
def test_exit_code_of_a_verb_is_passed_on(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, code: int | None, expected: int
) -> None:
    _replace(monkeypatch, "train", lambda cfg, **given: code)
    assert run.main(SMOKE) == expected


def test_interrupt_ends_with_130(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(cfg: Config, **given: Any) -> None:
        raise KeyboardInterrupt

    _replace(monkeypatch, "train", interrupt)
    assert run.main(SMOKE) == 130


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--config FILE is needed"),
        (["eval"], "--config FILE or --workdir DIR of a trained run is needed"),
        (["shwo", *SMOKE], "'shwo'; did you mean 'show'?"),
        (["evl", "--workdir", "w"], "unknown command 'evl'; did you mean 'eval'?"),
        ([*SMOKE, "xyz"], "unknown command 'xyz'; the commands are train, "),
        (["", *SMOKE], "unknown command ''"),
        (["train", "eval", *SMOKE], "unrecognized arguments: eval"),
        (["eval", "--workdir"], "argument --workdir: expected one argument"),
        (["eval", "--workdir", *SMOKE], "argument --workdir: expected one argument"),
        ([*SMOKE, "--config.seed"], "--config.seed: a value"),
        ([*SMOKE, "--wrokdir", "w"], "--wrokdir; did you mean '--workdir'?"),
        ([*SMOKE, "--work=w"], "--work; did you mean '--workdir'?"),
        ([*SMOKE, "-x"], "unknown flag -x; see"),
        (["--config", "configs/smok.py"], "Did you mean 'configs/smoke.py'?"),
        (["--config", "configs/smoke.py:latentwrie"], "Did you mean 'latentwire'?"),
        ([*SMOKE, "--config.train.step=3"], "Did you mean 'train.steps'?"),
        ([*SMOKE, "--config.train.steps=x"], "--config.train.steps=x: "),
        ([*SMOKE, "--config.encoder.slots=0"], "encoder.slots = 0"),
        ([*SMOKE, "--question", "a?"], "--question belongs to 'answer', not to 'train'"),
        ([*SMOKE, "--slots", "0"], "--slots belongs to 'answer', not to 'train'"),
        (["answer", *SMOKE, "--question", "a?"], "--context FILE (a text) or --message FILE"),
        (["answer", *SMOKE, "--context", "a", "--message", "b"], "--context FILE (a text) or --message FILE"),
        (["answer", *SMOKE, "--context", "a"], "answer needs --question TEXT or --write FILE"),
        (["answer", *SMOKE, "--message", "a"], "answer needs --question TEXT"),
        (["answer", *SMOKE, "--message", "a", "--question", "b?", "--bits", "0"], "--bits sets"),
        (
            ["answer", *SMOKE, "--message", "a", "--question", "b?", "--write", "c"],
            "--write sets",
        ),
        (["answer", *SMOKE, "--context", "a", "--question", "b?", "--write", "-"], "leave out --question, or write to"),
        (
            ["answer", *SMOKE, "--context", "a", "--write", "-", "--bits", "four"],
            "argument --bits: 'four': a whole number",
        ),
        (["generate", *SMOKE, "--prompt", "a", "--temperature", "nan"], "argument --temperature: 'nan': a number"),
        (["generate", *SMOKE, "--prompt", "a", "--tokens", "1" * 5000], "argument --tokens: '1"),
        (["generate", "--workdir", "w", "--prompt", "a\udcff"], "argument --prompt: 'a\\udcff': character 2"),
        (["slurm", *SMOKE, "--hours", "inf"], "argument --hours: 'inf': a number"),
        (["slurm", "--workdir", "runs/mine", "--target", "h100x4"], "slurm needs --config FILE"),
        (["answer", *SMOKE, "--message", "none.lwjx", "--question", "a?"], "--message none.lwjx: No such file"),
        (["answer", *SMOKE, "--message", ".", "--question", "a?"], "--message .: Is a directory"),
        (["answer", *SMOKE, "--question", "a?", "--context", "none.txt"], "--context none.txt"),
        (["eval", "--workdir", "nowhere"], "nowhere/config.json: missing"),
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


@pytest.mark.parametrize("argv", [["--version"], ["eval", "--version"]])
def test_version_is_printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run.main(argv)
    assert (left.value.code, capsys.readouterr().out) == (0, f"LatentWire JAX {lw_jax.__version__}\n")


def test_help_lists_every_command_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run.main(["--help"])
    out = capsys.readouterr().out
    assert left.value.code == 0
    assert all(f"\n  {verb:<10}{command.summary}\n" in out for verb, command in parser.COMMANDS.items())
    assert all(f"\n  {parser.PROGRAM} {verb} " in out for verb in parser.COMMANDS if verb != parser.DEFAULT)


@pytest.mark.parametrize("argv", [["answer", "--help"], ["--help", "answer"], ["--workdir", "w", "answer", "-h"]])
def test_help_of_a_command_lists_its_own_flags_only(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run.main(argv)
    out = capsys.readouterr().out
    own = parser.COMMANDS["answer"].flags
    others = {flag for command in parser.COMMANDS.values() for flag in command.flags} - own.keys()
    assert left.value.code == 0 and out.startswith("usage: python run.py answer ")
    assert all(f"\n  {flag} " in out for flag in (*own, *parser.COMMON))
    assert not [flag for flag in others if f"\n  {flag}" in out]


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


def test_show_as_json_is_read_by_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["show", *SMOKE, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["encoder.width"] == {"value": 64, "origin": "config"}


# --- real processes: a pipe, exit codes, what is imported ---


def test_show_into_a_pipe_that_closes_early_is_quiet(tmp_path: Path) -> None:
    command = f"{sys.executable} -u {PROJECT / 'run.py'} show {' '.join(SMOKE)} | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stderr == ""


# Stands in for training: prints more than a pipe holds, in lines of both streams, then leaves a file.
PRINTING = """
import runpy, sys
from pathlib import Path
from lw_jax.commands import train

def main(cfg, *, workdir, **_):
    for step in range(5000):
        print("step", step, "x" * 20, file=(sys.stdout, sys.stderr)[step % 2], flush=True)
    (workdir / "trained").touch()
    return 75

train.main = main
sys.argv = ["run.py", "--config", "configs/smoke.py", "--workdir", sys.argv[1]]
runpy.run_path("run.py", run_name="__main__")
"""


@pytest.mark.parametrize("both", ["", "2>&1"])
def test_training_goes_on_where_the_reader_of_its_lines_has_left(tmp_path: Path, both: str) -> None:
    command = f"set -o pipefail; {shlex.join([sys.executable, '-c', PRINTING, str(tmp_path / 'w')])} {both} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=PROJECT, check=False)
    assert (tmp_path / "w" / "trained").exists()
    assert (done.returncode, done.stdout.count("\n")) == (75, 1)
    assert "Traceback" not in done.stderr and done.stderr.count("step") == (0 if both else 2500)


def test_process_ends_with_the_exit_code_of_main(tmp_path: Path) -> None:
    done = _start("evl", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


LIGHT = """
import contextlib, io, sys, time
start = time.process_time()
import run
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    run.main(["--help"])
assert time.process_time() - start < 0.2, "seconds of the CPU for the help"
assert not {"ml_collections", "absl", "msgspec", "jax", "numpy"} & set(sys.modules)
with contextlib.redirect_stdout(io.StringIO()):
    assert run.main(["show", "--config", "configs/smoke.py"]) == 0
assert not {"jax", "flax", "numpy", "transformers", "orbax", "grain"} & set(sys.modules)
"""


def test_help_imports_next_to_nothing_and_show_no_heavy_library() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, cwd=PROJECT, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("code", "exit_code"), [(errno.ENOSPC, 2), (errno.EROFS, 2), (errno.EACCES, 2), (errno.EIO, 0)]
)
def test_place_that_cannot_be_written_is_one_line_wherever_it_is_found(
    calls: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
    exit_code: int,
) -> None:
    def main(*_: Any, **__: Any) -> int:
        raise OSError(code, os.strerror(code), "some/file")

    del calls
    _replace(monkeypatch, "train", main)
    argv = [*SMOKE, "--workdir", "w"]
    if exit_code:
        assert run.main(argv) == exit_code
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert line.startswith(f"error: some/file: {os.strerror(code)}; ") and "LW_JAX_CACHE" in line
    else:
        with pytest.raises(OSError, match="some/file"):
            run.main(argv)
