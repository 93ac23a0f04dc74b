"""README.md and docs: every command is accepted, a cheap one runs as it stands, every link, file and key exists.

A command that needs a GPU, a download, a cluster or more than seconds says so on its line (`# GPU, hub`, `# 20 min`).
"""

import fnmatch
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import run
from configs import base
from lw_jax.commands import parser
from lw_jax.core import config, config_file, validation
from lw_jax.core.command_line import take_assignments
from lw_jax.core.errors import UserError
from tests import tiny
from tests.commands import PROJECT
from tests.test_layers import FLOORS

DOCUMENTS = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md")])
HISTORY = ("CHANGELOG.md",)  # names what is gone
GENERATED = ("planning.md",)  # its commands are explained in its text, not marked
MARK = re.compile(r"\b(GPU|hub|PyPI|cluster|hours|\d+ (s|min|h))\b")
STARTS = ("python ", "make ", "pytest ", "pip ", "XLA_FLAGS=")
PLACEHOLDER = re.compile(r"\b[A-Z]{4,}\b")  # a file that the reader names
FOLDERS = ("lw_jax/", "sharding/", "configs/", "tests/", "docs/", "examples/", "benchmarks/")


EARLIER = re.compile(r"\b[Cc]ommit\s+[0-9a-f]{7}\b")  # in a section: what it names is that commit's


class Command(NamedTuple):
    """One command of a document and what stands beside it."""

    document: str
    text: str
    beside: str


def read(file: Path) -> str:
    """Returns a document without the sections whose code an earlier commit has."""
    sections = re.split(r"^(?=#+ )", file.read_text("utf-8"), flags=re.MULTILINE)
    return "".join(one for one in sections if not EARLIER.search(one))


def read_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yields language, "" where none is named, and content of fenced blocks; ("indented", lines) of indented ones."""
    for found in re.finditer(r"^```([^\n]*)\n(.*?)^```|(?:^    [^\n]*\n)+", text, re.MULTILINE | re.DOTALL):
        yield ("indented", found[0]) if found[1] is None else (found[1].strip(), found[2])


def find_commands(name: str, text: str) -> list[Command]:
    """Returns the commands of blocks, with their comments, and those of inline code, with their line or paragraph."""
    commands: list[Command] = []
    for language, content in read_blocks(text):
        for line in re.sub(r" *\\\n *", " ", content).splitlines() if language in ("sh", "indented") else ():
            command, _, comment = line.strip().partition(" #")
            if command.startswith(STARTS):
                commands.append(Command(name, command.strip(), comment))
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for part in re.split(r"\n\n|\n(?=\||- )", prose):  # a paragraph, an item or a row of a table
        for span in re.finditer(r"`([^`]+)`", part):
            command = " ".join(span[1].split())
            if command.startswith(STARTS):
                commands.append(Command(name, command, part[: span.start()] + part[span.end() :]))
    return commands


COMMANDS = [found for file in DOCUMENTS for found in find_commands(file.name, read(file))]


def resolve(spec: str, assignments: dict[str, str]) -> None:
    values = config_file.load(spec, root=PROJECT)
    config_file.override(values, assignments)
    validation.validate(config.build(values))


def check_run(words: list[str]) -> None:
    if "--help" in words:
        return
    args = parser.parse(words)
    if not args.config or PLACEHOLDER.search(args.config):
        return
    specs = config_file.read_list(args.config, root=PROJECT) if args.config.endswith(".list") else [args.config]
    for spec in specs:
        resolve(spec, {key: value for key, value in args.assignments.items() if not PLACEHOLDER.fullmatch(value)})


def check_script(file: Path, words: list[str]) -> None:
    source = file.read_text("utf-8")
    for driver in re.findall(rf"^from {file.parent.name} import (\w+)", source, re.MULTILINE):  # it has flags
        source += (file.parent / f"{driver}.py").read_text("utf-8")
    assignments, rest = take_assignments(words)
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    assert not (unknown := [flag for flag in flags if f'"{flag}"' not in source]), f"{file.name} has no {unknown}"
    if "--config" in rest and not PLACEHOLDER.search(spec := rest[rest.index("--config") + 1]):
        resolve(spec, assignments)


def check_pytest(words: list[str]) -> None:
    paths = [word for word in words if word.startswith("tests")] or ["tests"]
    files = [
        file for path in paths for file in (PROJECT.glob(path if path.endswith(".py") else f"{path}/**/test_*.py"))
    ]
    source = "\n".join(file.read_text("utf-8") for file in files)
    chosen = re.findall(r"\w+", words[words.index("-k") + 1]) if "-k" in words else []
    for word in set(chosen) - {"or", "and", "not"}:
        assert word in source, f"-k {word} chooses no test"


def check(command: str) -> None:
    """Raises where a command would be refused before it did anything."""
    words = shlex.split(command)
    words = words[[not re.match(r"[A-Z_]+=", word) for word in words].index(True) :]  # after VARIABLE=value
    words = words[: words.index(">")] if ">" in words else words
    if words[0] == "make":
        rules = (PROJECT / "Makefile").read_text("utf-8")
        assert re.search(rf"^{words[1]}:", rules, re.MULTILINE), f"make has no target {words[1]}"
        for name, value in (word.split("=") for word in words[2:]):
            assert f"$({name})" in rules or f"$(or $({name})" in rules, f"make reads no {name}"
            assert name != "CONFIG" or (PROJECT / value).is_file(), value
    elif words[0] == "pip":
        assert "-r" not in words or (PROJECT / words[words.index("-r") + 1]).is_file(), command
    elif words[0] == "pytest":
        check_pytest(words[1:])
    elif words[1] == "run.py":
        check_run(words[2:])
    elif words[1] != "-c":
        check_script(PROJECT / words[1], words[2:])


def test_every_command_is_accepted() -> None:
    assert len(COMMANDS) > 80, "the documents' commands are not found"
    faults = []
    for text, where in {found.text: found for found in COMMANDS}.items():
        try:
            check(text)
        except (UserError, AssertionError, OSError, ValueError) as error:
            faults.append(f"{where.document}: {text}: {error}")
    assert not faults, "\n".join(faults)


def _is_cheap(found: Command) -> bool:
    skipped = (*GENERATED, *HISTORY)
    return (
        found.text.startswith(("python ", "make ")) and found.document not in skipped and not MARK.search(found.beside)
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of configs/smoke.py, tiny, and a text."""
    folder = tmp_path_factory.mktemp("documents")
    readers = tiny.readers(folder / "readers")
    words = ["--config", "configs/smoke.py", "--workdir", str(folder / "runs" / "smoke-latentwire")]
    words += [f"--config.llms.{name}.source={path}" for name, path in readers.items()]
    words += ["--config.encoder.kind=bytes", "--config.encoder.source=", "--config.encoder.layers=1"]
    words += ["--config.adapter.hidden=16", "--config.adapter.start=random"]
    words += ["--config.train.steps=2", "--config.train.global_batch=8", "--config.data.cards=32"]
    words += ["--config.optim.warmup_steps=1", "--config.train.eval_every=0", "--config.eval.max_new_tokens=2"]
    words += ["--config.optim.kind=adamw", "--config.mesh.placement=single"]
    assert run.main(words) == 0
    (folder / "notes.txt").write_text("Mara Ellis lives in Lisbon.", "utf-8")
    return folder


CHEAP = {found.text: found for found in COMMANDS if _is_cheap(found)}


def test_only_commands_of_run_py_are_unmarked() -> None:
    others = [f"{found.document}: {text}" for text, found in CHEAP.items() if text.split()[1] != "run.py"]
    assert not others, f"mark them with their time, or with what they need: {others}"


@pytest.mark.slow
def test_unmarked_commands_run_as_they_stand(home: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.chdir(home)
    assert any(" answer " in text for text in CHEAP) and any(" report " in text for text in CHEAP)
    for text in CHEAP:
        words = shlex.split(text)
        if "--help" in words:
            with pytest.raises(SystemExit, match="0"):
                run.main(words[2:])
        else:
            assert run.main(words[2:]) == 0, f"{text}: {capfd.readouterr().err}"


@pytest.mark.slow
def test_python_of_the_documents_runs(home: Path, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path) -> None:
    monkeypatch.chdir(home)
    blocks = [(file.name, block) for file in DOCUMENTS for block in read_blocks(file.read_text("utf-8"))]
    blocks = [(name, text) for name, (language, text) in blocks if language == "python"]
    assert {"README.md", "wire.md", "configuration.md"} <= {name for name, _ in blocks}
    for name, text in blocks:
        if "def get_config" in text:
            (tmp_path / "own.py").write_text(text, "utf-8")
            resolve(str(tmp_path / "own.py"), {})
        else:
            capsys.readouterr()
            exec(compile(text, name, "exec"), {})
            assert int(capsys.readouterr().out.split()[0]) > 0  # bytes of the message


def to_anchor(heading: str) -> str:
    """Returns the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_links_files_and_keys_exist(file: Path) -> None:
    text = file.read_text("utf-8")
    faults = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = file.parent / path if path else file
        if not linked.exists():
            faults.append(f"link to {target}")
        elif anchor and anchor not in map(to_anchor, re.findall(r"^#+ (.*)$", linked.read_text("utf-8"), re.M)):
            faults.append(f"no heading {target}")
    if file.name not in HISTORY:
        faults += [f"no file {path}" for path in _find_paths(read(file)) if not any(PROJECT.glob(path))]
        faults += [f"no {name} in {path}" for path, name in _find_names(text) if not _defines(PROJECT / path, name)]
        faults += [f"no key {key}" for key in _find_keys(read(file))]
    assert not faults, f"{file.name}: " + "; ".join(faults)


def _find_paths(text: str) -> set[str]:
    spans = {span.partition(":")[0].rstrip("/") for span in re.findall(r"`([^`\s{}]+)`", text)}
    return {span for span in spans if span.startswith(FOLDERS) and not PLACEHOLDER.search(span)}


def _find_names(text: str) -> list[tuple[str, str]]:
    """Returns the (file, name) pairs of inline code such as `lw_jax/core/config.py:build`."""
    return re.findall(r"`((?:lw_jax|sharding|run)[\w/]*\.py):(\w+)`", text)


def _defines(file: Path, name: str) -> bool:
    return file.is_file() and bool(re.search(rf"^(class|def) {name}\b", file.read_text("utf-8"), re.MULTILINE))


def _find_keys(text: str) -> list[str]:
    """Returns the words of inline code that look like a configuration key and are none."""
    values = base.get_config()
    values.llms.NAME = base.llm("folder")
    keys = set(config.flatten(values))
    spans = {span.partition("=")[0] for span in re.findall(r"`([a-z]+\.[\w.*]+)(?:=[^`]*)?`", text)}
    sections = {key.partition(".")[0] for key in keys if "." in key} | {"llms"}
    named = {re.sub(r"^llms\.\w+\.", "llms.NAME.", span) for span in spans if span.partition(".")[0] in sections}
    files = (".md", ".py", ".json", ".jsonl", ".html", ".sbatch")
    return sorted(key for key in named if not key.endswith(files) and not fnmatch.filter(keys, f"{key}*"))


def test_drawing_of_the_packages_is_the_tested_order() -> None:
    text = (PROJECT / "docs" / "architecture.md").read_text("utf-8")
    (drawing,) = [block for language, block in read_blocks(text.partition("## A batch")[0]) if language == "indented"]
    drawn = [re.split(r" {2,}", line.strip())[0].split(" | ") for line in drawing.splitlines()]
    drawn = [[word.strip() for word in row] for row in drawn if row != ["|"]]
    tested = [[name.removeprefix("lw_jax.") for name in names if name != "lw_jax"] for names in FLOORS]
    assert drawn == [names for names in tested[::-1] if names]
