"""The ways in which peer.py times both sides, what may count as the best of them, and the table."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common

# Largest difference from PyTorch in fp32, relative: of a step's loss and the norm of its gradient; of latents and of an
# answer's first logits, by root mean square. bf16 has 8 bits, so that one rounding is up to 0.4 %.
TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}

SHOWN = {
    **{
        "side": ("side",),
        "variant": ("variant",),
        "best": ("best",),
        "s": ("median", ".4f"),
        "least": ("least", ".4f"),
    },
    **{"most": ("most", ".4f"), "first s": ("first_seconds", ".1f"), "peak GB": ("peak_bytes", ".2f", 1e-9)},
    **{"off fp32": ("off", ".1e"), "": ("why",)},
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


def of_part(part: str, recipe: str) -> list[Variant]:
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


def table(found: Told) -> str:
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
