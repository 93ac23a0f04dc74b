"""Our work against PyTorch's, by turns on this machine: same models, same batch, same results, checked first.

    python benchmarks/peer.py --config configs/embeddings.py --precision best --json peer.json
    python benchmarks/peer.py --config configs/large.py --config.train.global_batch=64

The other side is benchmarks/torch_wire.py (transformers, SDPA, soft prefix by inputs_embeds) for a wire and
benchmarks/torch_dpo.py (TRL's own trainer) for preference tuning. Parts: a training step; `encode`, a batch's texts to
latents; `answer`, a batch of answers by transformers' own generate. First both sides compute every part of one ragged
batch in fp32, with equal weights and every model cut to --check-layers; they must agree to 1e-3, else code 1.

With --precision own (the default) each side then takes the configuration's own precision, in --rounds turns. With
--precision best each side is timed in every way it has (fp32, bf16, frozen models stored in bf16, through
torch.compile), one short turn each; the fastest of each side whose results are within the tolerance of its precision
goes on to the rounds. Each turn is a process of its own with random weights at full depth, nothing beside it; on the
GPU where there is one. Needs requirements-dev.txt; fetches nothing.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common, variants
from benchmarks.peer_ours import OTHERS, settle
from benchmarks.variants import Variant
from lw_jax.core.errors import UserError, leave

PARTS = {"latentwire": ("step", "encode", "answer"), "dpo": ("step",)}
MORE = {"step": 1, "encode": 4, "answer": 1}  # timed calls for each of --steps: a batch of texts is encoded in no time

Told = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser, assignments, rest = common.parser(__doc__, argv)
    parser.add_argument("--precision", choices=("own", "best"), default="own", help="each side's (default: own)")
    parser.add_argument("--parts", metavar="A,B", help="step, encode, answer (default: step; with best all there are)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (default: 3)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a turn (default: 5)")
    parser.add_argument("--check-layers", type=int, default=2, help="of each model in the check (default: 2)")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a turn, compiling included (default: 300)")
    parser.add_argument("--compile", action="store_true", help="with own: the other side through torch.compile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also written here")
    args = parser.parse_args(rest)
    cfg = settle(args.config, assignments)
    parts = args.parts.split(",") if args.parts else PARTS[cfg.recipe][: None if args.precision == "best" else 1]
    if unknown := [part for part in parts if part not in PARTS[cfg.recipe]]:
        raise UserError(f"--parts {unknown[0]}: recipe {cfg.recipe!r} has {', '.join(PARTS[cfg.recipe])}; name some")
    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(args, assignments, cfg.recipe, Path(folder))
        found: Told = {"config": args.config, "assignments": dict(assignments), "precision": args.precision}
        found |= {"recipe": cfg.recipe, "batch": cfg.train.global_batch, "remat": cfg.compute.remat} | sides.machine
        ours, theirs = (sides.check(one, parts[0]) for one in (variants.OURS[0], variants.FP32))
        found["check"] = {"ours": ours, "theirs": theirs, "layers": args.check_layers}
        off = {part: variants.differences(part, ours, theirs) for part in {"step": 0} | dict.fromkeys(parts)}
        found["check"]["difference"] = off
        if any(variants.refusal(one, variants.TOLERANCE["fp32"]) for one in off.values()):
            print(json.dumps(found, indent=2))
            print("error: the two sides do not compute the same; nothing is timed", file=sys.stderr)
            return 1
        found["parts"] = {part: compare(sides, part, choices(part, cfg.recipe, args)) for part in parts}
    best = {part: one["ratio"]["median"] for part, one in found["parts"].items() if "ratio" in one}
    found["theirs_over_ours_best"] = best
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    print(variants.table(found))
    return 0


def choices(part: str, recipe: str, args: argparse.Namespace) -> list[Variant]:
    if args.precision == "best":
        return variants.of_part(part, recipe)
    return [Variant("ours", "own", "as configured"), Variant("theirs", "own", "as configured", compiled=args.compile)]


class Sides:
    """The children of both sides over one case."""

    def __init__(self, args: argparse.Namespace, assignments: Mapping[str, str], recipe: str, folder: Path):
        self.args, self.folder = args, folder
        self.environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}  # first compiled here
        spec = ["--config", args.config, *common.flags(assignments), "--case", str(folder)]
        self.words = {
            "ours": [str(common.ROOT / "benchmarks" / "peer_ours.py"), *spec],
            "theirs": [str(common.ROOT / "benchmarks" / OTHERS[recipe])],
        }
        write = ["--do", "write", "--layers", str(args.check_layers)]
        self.machine: Told = common.child([*self.words["ours"], *write])
        self._checked: dict[tuple[Variant, str], Told] = {}

    def check(self, variant: Variant, part: str) -> Told:
        """Returns what a variant computes with stored weights; raises UserError where it cannot.

        What takes no torch.compile computes all parts at once.
        """
        which = part if variant.compiled else "all"
        if (variant, which) not in self._checked:
            file = self.folder / f"checked-{len(self._checked)}.npz"
            own = ["--part", which, "--precision", variant.precision]
            if variant.side == "ours":
                own += ["--do", "check", "--out", str(file), "--layers", str(self.args.check_layers)]
            else:
                own = [str(self.folder / "check"), *own, "--check", str(file)]
            self._checked[variant, which] = self._run(variant, own) | {"file": str(file)}
        return self._checked[variant, which]

    def turn(self, variant: Variant, part: str, *, warmup: int, steps: int) -> Told:
        own = ["--part", part, "--precision", variant.precision, "--warmup", str(warmup), "--steps", str(steps)]
        own = ["--do", "time", *own] if variant.side == "ours" else [str(self.folder / "full"), *own]
        return self._run(variant, own)

    def _run(self, variant: Variant, own: Sequence[str]) -> Told:
        words = [*self.words[variant.side], *own]
        if variant.side == "theirs":
            words += ["--device", self.machine["device"], *(["--compile"] if variant.compiled else [])]
        return common.child(words, seconds=self.args.limit, environment=self.environment)


@dataclasses.dataclass
class Entry:
    """What is known of a variant: its turns, how far it is from PyTorch in fp32, why it has no turn or cannot count."""

    variant: Variant
    turns: list[Told] = dataclasses.field(default_factory=list)
    off: dict[str, float] = dataclasses.field(default_factory=dict)
    why: str = ""


def compare(sides: Sides, part: str, every: Sequence[Variant]) -> Told:
    """Times all variants of a part once and the best of each side in all rounds; returns rows and ratio."""
    entries, best = [Entry(one) for one in every], {}
    for side in ("ours", "theirs"):
        choice = [one for one in entries if one.variant.side == side]
        chosen = choice[0] if len(choice) == 1 else fastest(sides, part, choice)
        best |= {side: chosen} if chosen else {}
    found: Told = {"best": {side: one.variant.name for side, one in best.items()}}
    if len(best) == 2:
        rounds: dict[str, list[Told]] = {side: [] for side in best}
        for number in range(sides.args.rounds):
            print(f"{part}: round {number + 1} of {sides.args.rounds} ...", file=sys.stderr, flush=True)
            for side, one in best.items():
                steps = MORE[part] * sides.args.steps
                rounds[side].append(sides.turn(one.variant, part, warmup=2, steps=steps))
        for side, one in best.items():
            one.turns = rounds[side]
        found["ratio"] = variants.ratio(rounds)
    return found | {"rows": [variants.row(one.variant, one.turns, why=one.why, off=one.off) for one in entries]}


def fastest(sides: Sides, part: str, entries: Sequence[Entry]) -> Entry | None:
    """Takes a short turn of each variant; returns the fastest whose results are right, None where no one's are.

    What torch.compile made is checked only where it may be that one.
    """
    for entry in entries:
        print(f"{part}: {entry.variant.side}, {entry.variant.name} ...", file=sys.stderr, flush=True)
        try:
            entry.turns = [sides.turn(entry.variant, part, warmup=1, steps=2 * MORE[part])]
        except UserError as error:
            entry.why = str(error)
        if entry.turns and not entry.variant.compiled:
            measure(sides, part, entry)
    timed = [one for one in entries if one.turns and one.variant.counted]
    for entry in sorted(timed, key=lambda one: one.turns[0]["median"]):
        if entry.variant.compiled:
            measure(sides, part, entry)
        if not entry.why:
            return entry
    return None


def measure(sides: Sides, part: str, entry: Entry) -> None:
    """Compares a variant with PyTorch in fp32, both on stored weights."""
    try:
        found, reference = sides.check(entry.variant, part), sides.check(variants.FP32, part)
    except UserError as error:
        entry.why = str(error)
        return
    entry.off = variants.differences(part, found, reference)
    entry.why = variants.refusal(entry.off, entry.variant.tolerance) if entry.variant.counted else ""


if __name__ == "__main__":
    leave(main)
