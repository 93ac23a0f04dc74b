"""Driver of examples/ablate.py and methods.py: named changes of one configuration, each trained and evaluated.

Each row has a folder of its own, goes on where it was stopped, and is not run again once it has an eval.json. What it
was asked for stands beside the folder: rows of one table have one configuration and one budget.
"""

import argparse
import copy
import csv
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from lw_jax.core.command_line import take_assignments
from lw_jax.core.config import build, flags, flatten, unread
from lw_jax.core.config_file import load, override
from lw_jax.core.files import content_hash
from lw_jax.data import row_sources
from lw_jax.hub.sources import file_hash

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Bench:
    """A table of runs: what each changes, and which figures are read from it."""

    description: str
    rows: Mapping[str, Sequence[str]]  # name -> KEY=VALUE words, which the flags of a call do not change
    figures: tuple[str, ...]
    read: Callable[[Path, str, dict[str, Any]], Iterable[dict[str, Any]]]  # (folder, row, eval.json) -> lines
    first: str = "row"  # name of the first column
    flags: tuple[str, ...] = ()  # of every row, before its own: KEY=VALUE words


def main(bench: Bench, argv: Sequence[str]) -> int:
    """Runs what is missing, writes table.csv and prints the table; returns 1 where a row could not be run."""
    parser = argparse.ArgumentParser(
        description=bench.description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", default=",".join(bench.rows), help=f"some of: {', '.join(bench.rows)}")
    parser.add_argument("--seeds", default="0")
    assignments, words = take_assignments(argv)
    asked, other = parser.parse_known_args(words)
    rows = asked.rows.split(",")
    if unknown := [word for word in [*rows, *other] if word not in bench.rows]:
        print(f"error: {unknown[0]!r} is no row and no --config. flag; rows: {', '.join(bench.rows)}", file=sys.stderr)
        return 2
    base, wanted = load(asked.config, root=ROOT), {}
    for seed in asked.seeds.split(","):
        for row in rows:
            changes = assigned("train.alarm=warn", *bench.flags) | assignments
            changes |= assigned(*bench.rows[row], f"seed={seed}")
            values = copy.deepcopy(base)
            own = flags(complete(values, changes))
            wanted[seed, row] = asked.out / f"{row.replace(' ', '-')}-{seed}", own, _hashes(values)
    # Of its values: the file, or what it imports, may be edited.
    config = content_hash(base.to_dict())
    for folder, own, data in wanted.values():
        if note := _differs(folder, [asked.config, config, *data, *own]):
            why = f"not of this --config with these values, flags and data, as {note} has them"
            print(f"error: {folder}: {why}; name another --out, or remove the folder", file=sys.stderr)
            return 2
    found, failed, questions = [], [], dict[tuple[str, str], set[tuple[str, str]]]()
    for (seed, row), (folder, own, _) in wanted.items():
        if not (folder / "eval.json").exists() and not _run(asked.config, folder, own):
            failed.append(f"{row}, seed {seed}")
            continue
        result = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
        questions[seed, row] = _questions(folder)
        found += [line | {"seed": int(seed), "step": result["step"]} for line in bench.read(folder, row, result)]
    _write(asked.out / "table.csv", bench, found)
    print("\n".join(_markdown(bench, found)))
    for line in _other_questions(questions):
        print(line, file=sys.stderr)
    for row in failed:
        print(f"not run: {row}; its last words stand above", file=sys.stderr)
    return 1 if failed else 0


def assigned(*words: str) -> dict[str, str]:
    """Returns KEY=VALUE words by key."""
    return dict(word.split("=", 1) for word in words)


def complete(values: ConfigDict, changes: Mapping[str, str]) -> dict[str, Any]:
    """Makes the changes in place; returns them with the defaults of what is not read any more."""
    override(values, changes)
    now = flatten(values)
    return {**changes, **{path: value for path, value in unread(build(values)).items() if now[path] != value}}


def _hashes(values: ConfigDict) -> list[str]:
    """Returns a hash of each file of data on this machine."""
    named = filter(None, (values.data.train, values.data.validation, values.data.passages))
    here = [row_sources.locate(name)[0] for each in named for name in row_sources.split_sources(each)]
    return [file_hash(path) for one in here for path in sorted([one, *one.rglob("*")]) if path.is_file()]


def _differs(folder: Path, words: list[str]) -> Path | None:
    """Notes what a row is asked for; returns the note where an earlier call, whose row is there, asked for another."""
    note = folder.with_name(f"{folder.name}.json")
    earlier = json.loads(note.read_text(encoding="utf-8")) if note.exists() else None
    if folder.exists() and earlier != words:
        return note
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(words, indent=1) + "\n", encoding="utf-8")
    return None


def _run(config: str, folder: Path, flags: list[str]) -> bool:
    for verb in (["train", "--config", config], ["eval"]):
        command = [sys.executable, str(ROOT / "run.py"), *verb, "--workdir", str(folder)]
        command += flags if verb[0] == "train" else [flag for flag in flags if flag.startswith("--config.eval.")]
        if subprocess.run(command, check=False).returncode:
            return False
    return True


def _questions(folder: Path) -> set[tuple[str, str]]:
    with (folder / "predictions.jsonl").open(encoding="utf-8") as file:
        return {(record["id"], record["question"]) for record in map(json.loads, file)}


def _other_questions(questions: Mapping[tuple[str, str], set[tuple[str, str]]]) -> Iterator[str]:
    """Yields a line of each row that was measured on other questions than the first one of its seed."""
    first: dict[str, str] = {}
    for (seed, row), own in questions.items():
        base = first.setdefault(seed, row)
        if own != questions[seed, base]:
            same = len(own & questions[seed, base])
            yield (
                f"{row}, seed {seed}: measured on {len(own)} questions, of which {same} are those of {base}: what is "
                "too long for a row is dropped; --config.data.overlong=cut keeps all"
            )


def _write(path: Path, bench: Bench, found: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [bench.first, "seed", "reader", "step", *bench.figures])
        writer.writeheader()
        writer.writerows(found)


def _markdown(bench: Bench, found: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"| {bench.first} | seed | reader | {' | '.join(bench.figures)} |",
        "|---" * (3 + len(bench.figures)) + "|",
    ]
    for line in found:
        figures = ["-" if line[key] is None else f"{line[key]:.3f}" for key in bench.figures]
        lines.append(f"| {line[bench.first]} | {line['seed']} | {line['reader']} | {' | '.join(figures)} |")
    return lines
