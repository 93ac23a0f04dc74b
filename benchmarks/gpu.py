"""Everything that is to be measured on one card, in one JSON: `make bench-gpu`.

    python benchmarks/gpu.py --out bench-gpu.json
    python benchmarks/gpu.py --out small.json --small      # the same cases on tiny models, on any machine

Cases run one after the other, each in processes of its own, the most wanted first; one that would begin after
--minutes is left out and said to be. A case that fails is told with its code, and the others still run (code 1).
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from lw_jax.core.config import flags

WIRE = "mesh.placement=single eval.batch=64 eval.max_new_tokens=32 "
WIRE += "encoder.window=128 data.question_tokens=16 data.answer_tokens=32"
# Two readers in bf16 fill most of a card: the rest is for one batch of 64 that keeps everything for its backward pass.
KEPT = f"{WIRE} train.global_batch=64 train.micro_batch=64 compute.remat=none"
# PyTorch at 64 does not fit 80 GB (measured on an H100): sides are compared in samples/s, each at the most it can hold.
OF_PEER = f"{WIRE} train.global_batch={{0}} train.micro_batch={{0}} compute.remat=none"
RECOMPUTED = f"{WIRE} train.global_batch=256 train.micro_batch=256"
TTT = "mesh.placement=single train.global_batch=256 train.micro_batch=256 compute.remat=full"
DPO = "mesh.placement=single train.global_batch=4 train.micro_batch=4 compute.remat=full"
W8A8 = "llms.llama.weights=w8a8 llms.qwen.weights=w8a8"
FP8 = "llms.llama.weights=fp8 llms.qwen.weights=fp8"
# Configuration -> that of the small run, with its sizes.
SMALL = {
    "large.py": ("smoke.py", "data.question_tokens=16 train.global_batch=4 eval.batch=2 eval.max_new_tokens=3"),
    "ttt/ttt_125m.py": ("ttt/ttt_smoke.py", ""),
    "dpo/llama3.py": ("dpo/smollm2.py", "dpo.max_length=32 train.global_batch=2"),
    "default.py": ("default.py", ""),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement: the script or verb, its configuration, sizes, and other values, which the small run has too."""

    name: str
    script: str  # "bench" | "peer" | "load"
    config: str
    sizes: str
    values: str = ""
    words: str = "--parts step"

    def of(self, *, small: bool) -> tuple[str, dict[str, str]]:
        """Returns the configuration's file and the values beside it."""
        config, sizes = SMALL[self.config] if small else (self.config, self.sizes)
        return config, dict(word.split("=", 1) for word in f"{sizes} {self.values}".split())


CASES = (
    Case("wire step, kept", "bench", "large.py", KEPT),
    Case("wire step, w8a8", "bench", "large.py", KEPT, W8A8),
    Case("wire step, fp8", "bench", "large.py", KEPT, FP8),
    Case("wire step, peer at 16", "peer", "large.py", OF_PEER.format(16)),
    Case("answers", "bench", "large.py", WIRE, words="--parts encode,answer"),
    Case("answers, unstacked", "bench", "large.py", WIRE, "eval.layers=unstacked", "--parts answer"),
    Case("wire step, recomputed", "bench", "large.py", RECOMPUTED, "compute.remat=full"),
    Case("TTT step, kernel", "bench", "ttt/ttt_125m.py", TTT, "ttt.form=kernel"),
    Case("TTT step, scan", "bench", "ttt/ttt_125m.py", TTT),
    Case("DPO step", "bench", "dpo/llama3.py", DPO),
    Case("DPO step, reference cached", "bench", "dpo/llama3.py", DPO, "dpo.reference=cached"),
    Case("load", "load", "default.py", "", "llms.llama.weights=bf16", "--parts load"),
    Case("wire step, peer at 32", "peer", "large.py", OF_PEER.format(32)),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--small", action="store_true", help="tiny models: that nothing rots")
    parser.add_argument("--minutes", type=float, default=7.5, help="no case begins after so many (default: 7.5)")
    parser.add_argument("--cases", default="", metavar="NAME;NAME", help="some alone, as CASES names them")
    args = parser.parse_args(argv)
    chosen = args.cases.split(";") if args.cases else [case.name for case in CASES]
    if unknown := set(chosen) - {case.name for case in CASES}:
        parser.error(f"--cases: {', '.join(map(repr, sorted(unknown)))} is none of {'; '.join(c.name for c in CASES)}")
    started, found = time.monotonic(), {}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if case.name not in chosen:
            continue
        if time.monotonic() - started > 60 * args.minutes:
            found[case.name] = {"left_out": f"it would have begun after {args.minutes} minutes"}
        else:
            common.say(case.name)
            found[case.name] = run(case, small=args.small)
        args.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return int(any("code" in one for one in found.values()))


def run(case: Case, *, small: bool) -> dict[str, Any]:
    """Returns what a case's command wrote, with the command and its seconds."""
    config, values = case.of(small=small)
    own = ["--config", f"configs/{config}", *flags(values)]
    with tempfile.TemporaryDirectory() as folder:
        file, turns = Path(folder) / "bench.json", "--rounds 1 --steps 1" if small else "--rounds 2 --steps 5"
        if case.script == "load":
            source = write_model(Path(folder) / "model", small=small)
            own += flags({"llms.llama.source": source, "llms.llama.sha256": ""})
        command = (
            ["benchmarks/peer.py", *own, *turns.split(), "--json", str(file)]
            if case.script == "peer"
            else ["run.py", "bench", *own, *case.words.split(), "--workdir", folder]
        )
        begun = time.monotonic()
        code = subprocess.run([sys.executable, *command], cwd=common.ROOT, stdout=sys.stderr, check=False).returncode
        told = {"command": " ".join(command), "whole_seconds": round(time.monotonic() - begun, 1)}
        return told | ({"code": code} if code else json.loads(file.read_text("utf-8")))


def write_model(folder: Path, *, small: bool) -> Path:
    """Writes a Llama-3.1-8B of zeros (small: SmolLM2-135M) as safetensors in bf16; starts no device."""
    import jax
    import numpy as np

    from lw_jax.hub import architectures, weights
    from lw_jax.models import decoder

    shapes = architectures.KNOWN["HuggingFaceTB/SmolLM2-135M" if small else "meta-llama/Llama-3.1-8B"]
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), decoder.abstract(shapes, "bfloat16"))
    weights.save(folder, zeros, shapes, model_type="llama")
    return folder


if __name__ == "__main__":
    sys.exit(main())
