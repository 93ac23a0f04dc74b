"""Our work against PyTorch's, by turns on this machine: same models, same batch, same results, checked first.

    python benchmarks/peer.py --config configs/embeddings.py --precision best --json peer.json
    python benchmarks/peer.py --config configs/large.py --config.train.global_batch=64

The other side is benchmarks/torch_wire.py (transformers, SDPA, soft prefix by inputs_embeds) for a wire and
benchmarks/torch_dpo.py (TRL's own trainer) for preference tuning. Parts: a training step; `encode`, a batch's texts to
latents; `answer`, a batch of answers by transformers' own generate. First both sides compute every part of one ragged
batch in fp32, with equal weights and every model cut to two layers; they must agree to 1e-3, else code 1.

With --precision own (the default) each side then takes the configuration's own precision, in --rounds turns. With
--precision best each side is timed in every way it has (fp32, bf16, frozen models stored in bf16, through
torch.compile), one short turn each; the fastest of each side whose results are within the tolerance of its precision
goes on to the rounds. Each turn is a process of its own with random weights at full depth, nothing beside it; on the
GPU where there is one. Needs requirements-dev.txt; fetches nothing.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common, variants
from benchmarks.variants import Entry, Told, Variant
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError, leave

OTHERS = {"latentwire": "torch_wire", "dpo": "torch_dpo"}
PARTS = {"latentwire": ("step", "encode", "answer"), "dpo": ("step",)}
MORE = {"step": 1, "encode": 4, "answer": 1}  # timed calls for each of --steps: a batch of texts is encoded in no time
# Precision -> the configuration's arithmetic and its readers' weights; "own" is as the configuration says.
PRECISIONS = {"fp32": ("fp32", "fp32"), "bf16": ("bf16", "bf16"), "w8a8": ("bf16", "w8a8")}
LAYERS = 2  # of each model in a check
LIMIT = 300  # seconds of a turn, compiling included


def main(argv: Sequence[str] | None = None) -> int:
    parser, assignments, rest = common.parser(__doc__, argv)
    parser.add_argument("--precision", choices=("own", "best"), default="own", help="each side's (default: own)")
    parser.add_argument("--parts", metavar="A,B", help="step, encode, answer (default: step; with best all there are)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (default: 3)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a turn (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also written here")
    args = parser.parse_args(rest)
    cfg, best = settle(args.config, assignments), args.precision == "best"
    parts = args.parts.split(",") if args.parts else PARTS[cfg.recipe][: None if best else 1]
    if unknown := [part for part in parts if part not in PARTS[cfg.recipe]]:
        raise UserError(f"--parts {unknown[0]}: recipe {cfg.recipe!r} has {', '.join(PARTS[cfg.recipe])}; name some")

    configured = [Variant(side, "own", "as configured") for side in ("ours", "theirs")]
    ways = {part: variants.of_part(part, cfg.recipe) if best else configured for part in parts}
    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(cfg.recipe, {"config": args.config, "assignments": assignments, "case": folder})
        found: Told = {"config": args.config, "assignments": assignments, "precision": args.precision}
        found |= {"recipe": cfg.recipe, "batch": cfg.train.global_batch, "remat": cfg.compute.remat} | sides.machine
        ours, theirs = (sides.check(one, parts[0]) for one in (variants.OURS[0], variants.FP32))
        found["check"] = {"ours": ours, "theirs": theirs, "layers": LAYERS}
        off = {part: variants.differences(part, ours, theirs) for part in {"step": 0} | dict.fromkeys(parts)}
        found["check"]["difference"] = off
        if any(variants.refusal(one, variants.TOLERANCE["fp32"]) for one in off.values()):
            print(json.dumps(found, indent=2))
            print("error: the two sides do not compute the same; nothing is timed", file=sys.stderr)
            return 1
        found["parts"] = {part: compare(sides, part, ways[part], args.rounds, args.steps) for part in parts}
    ratios = {part: one["ratio"]["median"] for part, one in found["parts"].items() if "ratio" in one}
    found["theirs_over_ours_best"] = ratios
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    print(variants.table(found))
    return 0


def settle(config: str, assignments: Mapping[str, str], precision: str = "own") -> Config:
    """Returns the configuration as the other side can follow it: one device, nothing automatic, steps by AdamW."""
    cfg = common.load(config, assignments)
    if cfg.recipe not in OTHERS:
        raise UserError(f"--config {config}: recipe {cfg.recipe!r} has no peer here; {', '.join(OTHERS)} have")
    if cfg.recipe == "latentwire" and (cfg.encoder.kind, cfg.encoder.pooling) != ("lm", "windows"):
        raise UserError("config.encoder: the peer has a pretrained decoder body and window pooling; take those")
    if cfg.data.packed_tokens:
        raise UserError(
            f"config.data.packed_tokens = {cfg.data.packed_tokens}: the peer reads one question a row; set it to 0"
        )
    values = {"train.micro_batch": "0", "optim.kind": "adamw"}
    if cfg.compute.remat == "auto":
        values["compute.remat"] = "none"
    if precision != "own":
        values["compute.dtype"], stored = PRECISIONS[precision]
        values |= {f"llms.{name}.weights": stored for name in cfg.llms}
    return common.load(config, {**assignments, **values})


class Sides:
    """The children of both sides over one case."""

    def __init__(self, recipe: str, spec: dict[str, Any]):
        self.spec, self.other = spec, f"{OTHERS[recipe]}.run"
        self.env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{spec['case']}/inductor"}  # first compiled here
        self.machine = common.apart("peer_ours.write", **spec)
        self._checked: dict[tuple[Variant, str], Told] = {}

    def check(self, variant: Variant, part: str) -> Told:
        """Returns what a variant computes with stored weights; raises UserError where it cannot.

        What takes no torch.compile computes all parts at once.
        """
        which = part if variant.compiled else "all"
        if (variant, which) not in self._checked:
            file = f"{self.spec['case']}/checked-{len(self._checked)}.npz"
            self._checked[variant, which] = self._run(variant, "check", part=which, check=file) | {"file": file}
        return self._checked[variant, which]

    def turn(self, variant: Variant, part: str, *, warmup: int, steps: int) -> Told:
        told = self._run(variant, "time", part=part, calls=warmup + steps)
        own = told["seconds"][warmup:]
        return told | {"first_seconds": told["seconds"][0], "seconds": own, "median": statistics.median(own)}

    def _run(self, variant: Variant, doing: str, **words: Any) -> Told:
        words |= {"precision": variant.precision, "seconds": LIMIT, "env": self.env}
        if variant.side == "ours":
            return common.apart(f"peer_ours.{doing}", **self.spec, **words)
        own = {"case": self.spec["case"], "device": self.machine["device"], "compiled": variant.compiled}
        return common.apart(self.other, **own, **words)


def compare(sides: Sides, part: str, every: Sequence[Variant], rounds: int, steps: int) -> Told:
    """Times all variants of a part once and the best of each side in all rounds; returns rows and ratio."""
    entries, best = [Entry(one) for one in every], {}
    for side in ("ours", "theirs"):
        choice = [one for one in entries if one.variant.side == side]
        chosen = choice[0] if len(choice) == 1 else fastest(sides, part, choice)
        best |= {side: chosen} if chosen else {}
    found: Told = {"best": {side: one.variant.name for side, one in best.items()}}
    if len(best) == 2:
        for one in best.values():
            one.turns = []
        for number in range(rounds):
            common.say(f"{part}: round {number + 1} of {rounds}")
            for one in best.values():
                one.turns.append(sides.turn(one.variant, part, warmup=2, steps=MORE[part] * steps))
        found["ratio"] = variants.ratio({side: one.turns for side, one in best.items()})
    return found | {"rows": [one.row() for one in entries]}


def fastest(sides: Sides, part: str, entries: Sequence[Entry]) -> Entry | None:
    """Takes a short turn of each variant; returns the fastest whose results are right, None where no one's are.

    What torch.compile made is checked only where it may be that one.
    """
    for entry in entries:
        common.say(f"{part}: {entry.variant.side}, {entry.variant.name}")
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
    if entry.variant.counted:
        entry.why = variants.refusal(
            entry.off, variants.TOLERANCE["fp32" if entry.variant.precision == "fp32" else "bf16"]
        )


if __name__ == "__main__":
    leave(main)
