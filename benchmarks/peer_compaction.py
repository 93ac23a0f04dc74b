"""Our messages of kind "cache" beside kvpress' presses: same model, questions and prompts; rows as they come.

    python -m venv runs/kvpress && runs/kvpress/bin/pip install kvpress
    python benchmarks/peer_compaction.py --workdir runs/cache --reader qwen --python runs/kvpress/bin/python \
        --ratios 2,4,8 --questions 64 --out runs/peers.jsonl

A row has F1, nats, the seconds to write (the text is read, and shortened), the positions that a head keeps and the
bytes of the cache that is left, in the dtype of computing; ours have the bytes of the message too. At the end a line
for each press and ratio, with the share of the text's gain in nats. Presses shorten the opening too; ours stays whole.
"""

import argparse
import collections
import functools
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from examples import with_transformers
from lw_jax.core import environment
from lw_jax.core.errors import UserError, leave
from lw_jax.core.precision import DTYPES

PRESSES = "KVzipPress,FastKVzipPress,ExpectedAttentionPress"
CHILD = Path(__file__).with_name("kvpress_run.py")
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser, assignments, rest = common.parser(__doc__, argv, None)
    parser.add_argument("--workdir", required=True, help="a run or an exported wire of encoder.kind='cache'")
    parser.add_argument("--reader", required=True)
    parser.add_argument("--python", required=True, help="of an environment with kvpress")
    parser.add_argument("--ratios", type=common.numbers, default=(2, 4, 8))
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--presses", default=PRESSES)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(rest)
    environment.hide_idle_cuda()
    from lw_jax.evals import answers
    from lw_jax.inference.coded_wire import CodedWire

    wire: Any = with_transformers.open_wire(args.workdir, args.reader, assignments)
    if not isinstance(wire, CodedWire):
        raise UserError(f"--workdir {args.workdir}: a wire of trained latents; name one of encoder.kind='cache'")
    cases, decode = questions_of(wire, args.reader, args.questions), wire.recipe.tokenizers[args.reader].decode
    rows = itertools.chain(_ours(wire, args, cases), _theirs(_case(wire, args, cases), args.python))
    del wire  # the child loads the same model, and both together may not fit
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found: list[Row] = []
    with args.out.open("w", encoding="utf-8") as file:
        for row in rows:
            if "error" not in row:
                told = answers.first_line(decode(row.pop("ids")))
                row |= {"answer": told, "f1": answers.f1(told, cases[row["question"]]["example"].answers)}
            file.write(json.dumps(row) + "\n")
            file.flush()
            found.append(row)
    print(summarise(found))
    return 0


def questions_of(wire: Any, reader: str, count: int) -> list[Row]:
    """Returns held-out questions with the ids of their prompts' parts."""
    from lw_jax.data.examples import spread
    from lw_jax.evals.control_rows import ANSWER
    from lw_jax.inference.coded_evaluation import what_is_read

    wire._check_reader(reader)
    encoded = wire.recipe.encode(wire.recipe.curriculum.examples("validation"))
    fields, found = encoded.readers[reader], []
    for index in spread(len(encoded), count):
        parts = {"before": "before", "text": "own", "after": "after", "answer": "answer"}
        ids = {name: [int(one) for one in fields[key].ids[index]] for name, key in parts.items()}
        host = wire._put(encoded.collate([index])["readers"][reader], reader)
        text, answer = what_is_read(wire, encoded, index, reader), {key: host[key] for key in ANSWER}
        found.append({"example": encoded.examples[index], "text": text, "ids": ids, "fields": answer})
    return found


def _ours(wire: Any, args: argparse.Namespace, cases: list[Row]) -> Iterator[Row]:
    """Yields our rows, without and with the text's message, a question at a time."""
    import jax
    import numpy as np

    from lw_jax.core.types import Example

    name, new = args.reader, wire.recipe.cfg.eval.max_new_tokens
    model, params = wire.recipe.wire.readers[name].config, wire.frozen[name]
    each = 2 * model.head_dim * params["embed"].dtype.itemsize
    for ratio in args.ratios:
        for number, case in enumerate(cases):
            one: Example = case["example"]
            write = functools.partial(wire.write, case["text"], ratio=ratio, readers=(name,))
            write()  # compiles
            started = time.perf_counter()
            message = write()
            seconds, section = time.perf_counter() - started, wire.section(message, name)
            packed, masked = (wire.prompt([section], [one.question], name, whole=whole) for whole in (False, True))
            ids = np.asarray(wire.functions.generate(params, packed, name, new))[0]
            scores = jax.device_get(wire.functions.score(params, masked, case["fields"], name))
            kept = int((section.levels > 0).sum())
            yield {
                "press": "ours",
                "ratio": ratio,
                "question": number,
                "write_seconds": seconds,
                "nll": float(scores["nll"][0]),
                "tokens": int(scores["tokens"][0]),
                "positions": kept / (model.layers * model.kv_heads),
                "kept_bytes": kept * each,
                "held_bytes": kept * each,
                "message_bytes": len(message),
                "ids": [int(token) for token in ids if token >= 0],
            }


def _case(wire: Any, args: argparse.Namespace, cases: list[Row]) -> Row:
    """Returns what the child is told."""
    import jax

    from lw_jax.recipes import frozen_models

    cfg = wire.recipe.cfg
    llm = cfg.llms[args.reader]
    location = frozen_models.locate(cfg, llm.source, llm.sha256)
    return {
        "folder": str(location if location.is_dir() else location.parent),
        "gguf": None if location.is_dir() else location.name,
        "dtype": DTYPES[llm.weights],
        "device": "cuda" if jax.default_backend() == "gpu" else "cpu",
        "presses": args.presses.split(","),
        "ratios": list(args.ratios),
        "stops": list(wire.recipe.wire.readers[args.reader].stops),
        "max_new_tokens": cfg.eval.max_new_tokens,
        "questions": [one["ids"] for one in cases],
    }


def _theirs(case: Row, python: str) -> Iterator[Row]:
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case.json"
        file.write_text(json.dumps(case), "utf-8")
        with subprocess.Popen([python, str(CHILD), str(file)], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None, "a pipe"
            for line in child.stdout:
                if line.startswith("{"):  # presses print lines of their own
                    yield json.loads(line)
        if child.returncode:
            raise UserError(f"--python {python}: {CHILD.name} ended with {child.returncode}; its lines are above")


def summarise(rows: Sequence[Row]) -> str:
    groups: dict[tuple[str, int], list[Row]] = collections.defaultdict(list)
    for row in rows:
        groups[row["press"], row["ratio"]].append(row)
    nothing, text = (_nats(groups[name, 1]) for name in ("nothing", "text"))
    head = ("press", "of", "F1", "nats", "gain", "write, s", "positions", "kept MB", "held MB", "")
    cells, keys = [], ("f1", "write_seconds", "positions", "kept_bytes", "held_bytes")
    for (press, ratio), own in groups.items():
        if errors := [one["error"] for one in own if "error" in one]:
            cells.append((press, str(ratio), *[""] * 7, f"{len(errors)} of {len(own)} failed: {errors[0]}"))
            continue
        f1, seconds, positions, kept, held = (statistics.mean(one[key] for one in own) for key in keys)
        figures = (f"{one:.3f}" for one in (f1, _nats(own), (nothing - _nats(own)) / (nothing - text), seconds))
        sizes = (f"{size / 1e6:.2f}" for size in (kept, held))
        cells.append((press, str(ratio), *figures, f"{positions:.1f}", *sizes, ""))
    return common.table(head, cells)


def _nats(rows: Sequence[Row]) -> float:
    return sum(one["nll"] for one in rows) / sum(one["tokens"] for one in rows)


if __name__ == "__main__":
    leave(main)
