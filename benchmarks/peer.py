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

import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError, leave

OTHERS = {"latentwire": "torch_wire", "dpo": "torch_dpo"}
PARTS = {"latentwire": ("step", "encode", "answer"), "dpo": ("step",)}
MORE = {"step": 1, "encode": 4, "answer": 1}  # timed calls for each of --steps: a batch of texts is encoded in no time
# Precision -> the configuration's arithmetic and its readers' weights; "own" is as the configuration says.
PRECISIONS = {"fp32": ("fp32", "fp32"), "bf16": ("bf16", "bf16"), "w8a8": ("bf16", "w8a8")}
LAYERS = 2  # of each model in a check
LIMIT = 300  # seconds of a turn, compiling included
# Largest difference from PyTorch in fp32, relative: of a step's loss and the norm of its gradient; of latents and of an
# answer's first logits, by root mean square. bf16 has 8 bits, so that one rounding is up to 0.4 %.
TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}
# Heading of the table -> the key of a row, and the format and factor of its numbers.
SHOWN = {
    "side": ("side",),
    "variant": ("variant",),
    "best": ("best",),
    "s": ("median", ".4f"),
    "least": ("least", ".4f"),
    "most": ("most", ".4f"),
    "first s": ("first_seconds", ".1f"),
    "peak GB": ("peak_bytes", ".2f", 1e-9),
    "off fp32": ("off", ".1e"),
    "": ("why",),
}

Told = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way of computing on one side."""

    side: str  # "ours" | "theirs"
    precision: str  # as the children know it
    label: str
    compiled: bool = False  # by torch.compile; ours always is, by XLA
    counted: bool = True  # may be the best

    @property
    def name(self) -> str:
        return f"{self.label}, compiled" if self.compiled else self.label


FP32 = Variant("theirs", "fp32", "fp32")
AUTOCAST = Variant("theirs", "autocast", "bf16 autocast")
FROZEN = Variant("theirs", "frozen", "bf16 autocast, frozen in bf16")
WHOLE = Variant("theirs", "whole", "all in bf16")
OURS = (
    Variant("ours", "fp32", "fp32"),
    Variant("ours", "bf16", "bf16"),
    Variant("ours", "w8a8", "readers w8a8, other mathematics", counted=False),
)


@dataclasses.dataclass
class Entry:
    """What is known of a variant: its turns, how far it is from PyTorch in fp32, why it has no turn or cannot count."""

    variant: Variant
    turns: list[Told] = dataclasses.field(default_factory=list)
    off: dict[str, float] = dataclasses.field(default_factory=dict)
    why: str = ""

    def row(self) -> Told:
        """Returns the variant's row: seconds over all its turns, or why it has none or does not count."""
        one = self.variant
        told: Told = {"side": one.side, "variant": one.name, "counted": one.counted and not self.why, "why": self.why}
        told |= {"difference": self.off, "turns": self.turns}
        if self.turns:
            every = [second for turn in self.turns for second in turn["seconds"]]
            medians = [turn["median"] for turn in self.turns]
            told |= {"median": statistics.median(medians), "least": min(every), "most": max(every)}
            told["first_seconds"] = self.turns[0]["first_seconds"]
            told["peak_bytes"] = max(turn["peak_bytes"] or turn["host_bytes"] for turn in self.turns)
        return told


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
    ways = {part: variants_of(part, cfg.recipe) if best else configured for part in parts}
    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(cfg.recipe, {"config": args.config, "assignments": assignments, "case": folder})
        found: Told = {"config": args.config, "assignments": assignments, "precision": args.precision}
        found |= {"recipe": cfg.recipe, "batch": cfg.train.global_batch, "remat": cfg.compute.remat} | sides.machine
        ours, theirs = (sides.check(one, parts[0]) for one in (OURS[0], FP32))
        found["check"] = {"ours": ours, "theirs": theirs, "layers": LAYERS}
        off = {part: differences(part, ours, theirs) for part in {"step": 0} | dict.fromkeys(parts)}
        found["check"]["difference"] = off
        if any(refusal(one, TOLERANCE["fp32"]) for one in off.values()):
            print(json.dumps(found, indent=2))
            print("error: the two sides do not compute the same; nothing is timed", file=sys.stderr)
            return 1
        found["parts"] = {part: compare(sides, part, ways[part], args.rounds, args.steps) for part in parts}
    ratios = {part: one["ratio"]["median"] for part, one in found["parts"].items() if "ratio" in one}
    found["theirs_over_ours_best"] = ratios
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    print(describe(found))
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
        found["ratio"] = ratio({side: one.turns for side, one in best.items()})
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
        found, reference = sides.check(entry.variant, part), sides.check(FP32, part)
    except UserError as error:
        entry.why = str(error)
        return
    entry.off = differences(part, found, reference)
    if entry.variant.counted:
        entry.why = refusal(entry.off, TOLERANCE["fp32" if entry.variant.precision == "fp32" else "bf16"])


def variants_of(part: str, recipe: str) -> list[Variant]:
    """Returns all variants of a part, ours first, each side's eager ones before what torch.compile made.

    Where nothing learns, autocast is left eager: it casts every weight for each token, so that one would compile the
    model in bf16 instead. The encoder has no frozen reader.
    """
    ours = [one for one in OURS if one.precision != "w8a8" or (part != "encode" and recipe == "latentwire")]
    eager = [FP32, AUTOCAST, FROZEN] if part == "step" else [FP32, AUTOCAST, WHOLE]
    compiled = [one for one in eager if part == "step" or one is not AUTOCAST]
    return [*ours, *eager, *(dataclasses.replace(one, compiled=True) for one in compiled)]


def differences(part: str, found: Told, reference: Told) -> dict[str, float]:
    """Returns how far a check's result is from the reference, relative, of each thing that the part gives.

    Both hold `loss` and `grad_norm` of a step, and under `file` the path of the arrays.
    """
    if part == "step":
        return {key: abs(found[key] / reference[key] - 1) for key in ("loss", "grad_norm")}
    with np.load(Path(found["file"])) as mine, np.load(Path(reference["file"])) as theirs:
        keys = [key for key in theirs.files if (key == "latents" if part == "encode" else key.endswith("/logits"))]
        return {
            key: float(np.sqrt(np.mean((mine[key] - theirs[key]) ** 2) / np.mean(theirs[key] ** 2))) for key in keys
        }


def refusal(found: Mapping[str, float], tolerance: float) -> str:
    """Returns what is too far from the reference; empty: nothing. A value that is no number is too far."""
    wrong = [f"{key} differs by {value:.1e}" for key, value in found.items() if not value <= tolerance]
    return f"{', '.join(wrong)}; at most {tolerance:g}" if wrong else ""


def ratio(turns: Mapping[str, Sequence[Told]]) -> Told:
    """Returns how much longer the other side's median takes, over all turns and in each pair of them."""
    medians = {side: [one["median"] for one in turns[side]] for side in ("ours", "theirs")}
    pairs = [theirs / ours for ours, theirs in zip(medians["ours"], medians["theirs"], strict=True)]
    whole = statistics.median(medians["theirs"]) / statistics.median(medians["ours"])
    return {"median": whole, "least": min(pairs), "most": max(pairs)}


def describe(found: Told) -> str:
    check = found["check"]
    lines = [f"{found['recipe']}, batch {found['batch']}, remat {found['remat']}, on {found['name']}"]
    ours, theirs = (check[side] for side in ("ours", "theirs"))
    lines.append(
        f"check, {check['layers']} layers, fp32: loss {ours['loss']:.6f} and {theirs['loss']:.6f}, "
        f"gradient {ours['grad_norm']:.6f} and {theirs['grad_norm']:.6f}"
    )
    for name, part in found["parts"].items():
        rows = [
            one
            | {"best": "*" if one["variant"] == part["best"].get(one["side"]) else ""}
            | {"off": max(one["difference"].values(), default=None)}
            for one in part["rows"]
        ]
        lines += ["", name, common.columns(rows, SHOWN)]
        if "ratio" in part:
            ratios = part["ratio"]
            spread = f"turn by turn {ratios['least']:.2f}..{ratios['most']:.2f}"
            best = ", each side at its best (*)" * (found["precision"] == "best")
            lines.append(f"{name}, theirs / ours{best}: {ratios['median']:.2f} ({spread})")
        else:
            lines.append(f"{name}: no ratio, as one side has nothing that counts")
    return "\n".join(lines)


if __name__ == "__main__":
    leave(main)
