"""The original project's batch size formula, for comparison only: its users see where a plan differs, and why.

Source: the original's batch size note for H100 GPUs and the calculator it names (calculate_optimal_batch_sizes.py).
Nothing of it decides anything here; `lw_jax.planning.planner` compiles the step instead.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from lw_jax.core.errors import UserError

MEMORY_GB = 80.0  # an H100, as the note counts
UTILISATION = 0.85  # of it, for the largest batch
FROZEN_GB = 32.0  # both readers, where the note's own parts (16 and 14) add up to 30
TRAINED_PARAMETERS = 0.1e9
BYTES = 2  # bf16 weights, gradients and activations
OPTIMIZER_BYTES = 12  # of Adam, a trained parameter
OVERHEAD = 0.08  # of the memory, for CUDA's kernels and buffers
# Values kept for backward, per position, width and layer, with gradient checkpointing; one model's sizes.
KEPT, POSITIONS, WIDTH, LAYERS = 1.5, 1024, 4096, 32


@dataclasses.dataclass(frozen=True)
class LegacyBatch:
    """Result of the formula, in GB of 1e9 bytes; a batch of 0 means that nothing fits."""

    memory_gb: float  # of one GPU
    fixed_gb: Mapping[str, float]  # on every GPU, however many there are
    sample_gb: float  # activations of one example
    per_gpu: int
    total: int
    utilisation: float  # reached on one GPU


def legacy_batch(*, memory_gb: float = MEMORY_GB, utilisation: float = UTILISATION, gpus: int = 1) -> LegacyBatch:
    """Returns the original's largest batch: 69 on one H100 at 85 %, 59 at 80 %.

    Raises:
        UserError: memory, utilisation or the number of GPUs is outside its range.
    """
    if not (memory_gb > 0 and 0 < utilisation <= 1 and gpus >= 1):
        raise UserError(
            f"legacy batch of {gpus} GPUs with {memory_gb:g} GB at {utilisation:g}: memory must be above 0, the "
            "utilisation above 0 and at most 1, and there must be at least one GPU; correct the one that is not."
        )
    trained = TRAINED_PARAMETERS / 1e9
    fixed = {
        "frozen weights": FROZEN_GB,
        "trained weights": trained * BYTES,
        "optimizer": trained * OPTIMIZER_BYTES,
        "gradients": trained * BYTES,
        "overhead": memory_gb * OVERHEAD,
    }
    held = sum(fixed.values())
    sample = KEPT * POSITIONS * WIDTH * LAYERS * BYTES / 1e9
    total = max(0, int(gpus * (memory_gb * utilisation - held) / sample))
    return LegacyBatch(memory_gb, fixed, sample, total // gpus, total, (held + total / gpus * sample) / memory_gb)


def text(found: Mapping[str, Any]) -> str:
    """Returns the original's budget beside a plan's (of `planner.make`), with the reasons, for people."""
    # Cards are sold by binary gigabytes, which the original calls GB: an "80 GB" H100 reports 84.9e9 bytes.
    memory = float(math.ceil(found["memory_bytes"] / 2**30))
    gpus, target = found["devices"], found["limit_bytes"] / found["memory_bytes"]
    theirs = legacy_batch(memory_gb=memory, gpus=gpus)
    best = found["chosen"]
    lines = [
        f"{found['target']}: the original's batch formula beside the plan; GB (1e9 bytes) on each GPU",
        "",
        *_table(theirs, best),
        "",
        f"the original's batch at its {UTILISATION:.0%} of {memory:g} GB: {_batch(theirs, gpus)}",
    ]
    for share in sorted({0.8, round(target, 4)} - {UTILISATION}):
        other = legacy_batch(memory_gb=memory, utilisation=share, gpus=gpus)
        lines.append(f"the same formula at {share:.0%}: {_batch(other, gpus)}")
    limit = f"{found['limit_bytes'] / 1e9:.1f} GB = {target:.0%} of {found['memory_bytes'] / 1e9:.1f} GB"
    if best is None:
        return "\n".join([*lines, f"the plan, within {limit}: {found['why']}"])
    how = "compiled" if found["compiled"] else "by arithmetic, not compiled"
    return "\n".join(
        [
            *lines,
            f"the plan ({how}): {best['strategy']} {best['mesh']}, recomputation {best['remat']}, "
            f"{best['micro_batch']} a GPU x {best['accumulation']} accumulated for a global batch of "
            f"{found['global_batch']}, within {limit}",
        ]
    )


def _batch(found: LegacyBatch, gpus: int) -> str:
    if not found.total:
        return f"no room ({found.utilisation:.1%} taken before the first example)"
    whole = f", {found.total} on {gpus}" if gpus > 1 else ""
    return f"{found.per_gpu} a GPU{whole} ({found.utilisation:.1%} reached)"


def _table(theirs: LegacyBatch, best: Mapping[str, Any] | None) -> list[str]:
    ours = {} if best is None else _ours(best)
    fixed = sum(theirs.fixed_gb.values())
    rows = {
        **theirs.fixed_gb,
        "all of these": fixed,
        "activations of one example": theirs.sample_gb,
        "peak": theirs.utilisation * theirs.memory_gb,
    }
    lines = [f"{'':<28}{'original':>9}{'plan':>8}  why they differ"]
    for name, size in rows.items():
        own = f"{ours[name]:.2f}" if name in ours else "-"
        lines.append(f"{name:<28}{size:>9.2f}{own:>8}  {REASONS[name]}".rstrip())
    return lines


def _ours(best: Mapping[str, Any]) -> dict[str, float]:
    """Returns a planned candidate's bytes under the formula's names, in GB."""
    held = {"frozen weights": "weights", "trained weights": "trainable", "optimizer": "optimizer"}
    sizes = {name: best[f"{key}_bytes"] / 1e9 for name, key in held.items()}
    return sizes | {
        "all of these": sum(sizes.values()),
        "activations of one example": best["activation_bytes"] / 1e9 / best["micro_batch"],
        "peak": best["peak_bytes"] / 1e9,
    }


REASONS = {
    "frozen weights": "the plan counts the shapes, and only what its strategy puts on one GPU",
    "trained weights": f"the original assumes {TRAINED_PARAMETERS / 1e6:.0f} M in bf16; the plan counts, in fp32",
    "optimizer": f"two fp32 moments take 8 bytes a parameter; {OPTIMIZER_BYTES} would keep a second copy of it",
    "gradients": "in the plan part of the activations: the compiler reuses their room",
    "overhead": "in the plan no term: the utilisation target leaves this room",
    "all of these": "",
    "activations of one example": (
        f"of one model, {KEPT:g} x {POSITIONS} positions x {WIDTH} wide x {LAYERS} layers; the plan's: as compiled, of "
        "all models and with gradients"
    ),
    "peak": "",
}
