"""The original project's published figures on GPUs, as its three documents print them; none of them was measured.

Each constant names its document: "GPU configuration analysis", "elastic guide" or "batch size note". GB as printed.
"""

import dataclasses

from lw_jax.planning import legacy

SAMPLES = 40_000  # GPU configuration analysis: 5,000 samples, 8 epochs
EPOCH = 5_000


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of the GPU configuration analysis."""

    memory_gb: float
    samples_per_second: float
    epoch_minutes: float
    hours: float
    recommendation: str


OPTIONS = {
    1: Option(34.0, 2.0, 42, 5.6, "recommended"),
    2: Option(17.0, 3.5, 24, 3.2, "balanced"),
    4: Option(8.5, 6.0, 14, 1.9, "only if urgent"),
}
PARTS_GB = {"weights": 30, "optimizer": 2, "activations": 2}  # of its 34 GB, the same document

# GPU configuration analysis, "Scaling Considerations": the factor on the time, and the setting that makes ours.
SCALING = {
    "samples 5,000 -> 10,000": (2.0, "data"),
    "epochs 8 -> 16": (2.0, "data"),
    "batch on one GPU 4 -> 8": (1 / 1.3, "micro_batch"),
    "latents 32 -> 64": (1.2, "slots"),
}

# Elastic guide, "Configuration Strategies by GPU Count".
STRATEGIES = {
    1: {"h100": "single, accumulation", "a100": "single, accumulation"},
    2: {"h100": "data parallel", "a100": "Llama on 0, Qwen on 1"},
    3: {"h100": "Llama on 0-1, Qwen on 2", "a100": "Llama on 0-1, Qwen on 2"},
    4: {"h100": "data parallel", "a100": "Llama on 0-1, Qwen on 2-3, 2-way data parallel"},
}
# The same in this project's words; several where the guide's layout has several readings.
OUR_WORDS = {
    "single, accumulation": ("single",),
    "data parallel": ("replicate",),
    "Llama on 0, Qwen on 1": ("split",),
    "Llama on 0-1, Qwen on 2": ("hybrid3",),
    "Llama on 0-1, Qwen on 2-3, 2-way data parallel": ("split", "hybrid4"),
}

# Elastic guide, "Performance Expectations": target -> (samples/s, effective batch).
THROUGHPUT = {"a100_40x1": (50, 64), "a100_40x2": (80, 96), "a100_40x4": (160, 128), "h100x4": (320, 256)}
# Not of a document but of the original's training: 32 latents, an anchor of 3, an answer of about 6 tokens.
POSITIONS = 41
# Elastic guide, "Memory Calculations" and its default: GB of both readers, of one example; utilisation; H100's batch.
GUIDE_WEIGHTS_GB, GUIDE_SAMPLE_GB, GUIDE_UTILISATION, GUIDE_BATCH = 14 + 13, 0.75, 0.75, 64

# What each document holds for the memory of one GPU, in GB: analysis, guide, note.
MEMORY = {
    "Llama weights": ("16", "14", "16"),
    "Qwen weights": ("14", "13", "14"),
    "frozen weights": ("30", "27", f"{legacy.FROZEN_GB:.0f}"),
    "trained weights": ("< 1", "-", "0.2"),
    "optimizer": ("2", "2 x 4", "1.2"),
    "gradients": ("-", "-", "0.2"),
    "overhead": ("-", "-", "6.4"),
    "activations of one example": ("0.5", "0.75", f"{legacy.legacy_batch().sample_gb:.2f}"),
    "left for activations": ("-", "-", "40"),
}
NOTE_BATCH = 64  # batch size note: on each of 1 to 4 H100, "at 80 %"
