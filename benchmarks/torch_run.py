"""What both children of peer.py share: their words, their models, their timed calls. Knows no JAX."""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

# What is stored and computed in bf16 beside fp32: nothing; products, by autocast; the frozen models' weights as well;
# every weight and all arithmetic (where nothing learns).
PRECISIONS = ("fp32", "autocast", "frozen", "whole")


def parse(told: str | None, parts: Sequence[str]) -> argparse.Namespace:
    """Returns the words of the command line; `precision` "own" is replaced by that of the case."""
    parser = argparse.ArgumentParser(description=told, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", choices=(*parts, "all"), default="step", help="what is done; all: with --check")
    parser.add_argument("--precision", choices=(*PRECISIONS, "own"), default="own")
    parser.add_argument("--compile", action="store_true", help="through torch.compile")
    parser.add_argument("--warmup", type=int, default=2, help="calls before those that are timed")
    parser.add_argument("--steps", type=int, default=5, help="timed calls")
    parser.add_argument(
        "--check", type=Path, metavar="FILE", help="once and from stored weights; arrays go into this .npz"
    )
    args = parser.parse_args()
    args.spec = json.loads((args.case / "spec.json").read_text("utf-8"))
    if args.precision == "own":
        args.precision = "frozen" if args.spec["dtype"] == "bfloat16" else "fp32"
    return args


def stored(precision: str) -> str:
    return "bfloat16" if precision in ("frozen", "whole") else "float32"


def narrow(args: argparse.Namespace) -> torch.autocast:
    """Returns the context in which products are in bf16 where the precision says so."""
    return torch.autocast(args.device, torch.bfloat16, enabled=args.precision in ("autocast", "frozen"))


def build(folder: Path, dtype: str, device: str, *, load: bool) -> Any:
    """Returns the model of a folder, its weights loaded, or drawn where the folder has none."""
    words: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    if load:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, **words)
        return loaded.to(device)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder), **words)


def timed(call: Callable[[], Any], args: argparse.Namespace) -> dict[str, Any]:
    """Returns the seconds of each call, until the device has finished it, after those that warm up."""
    seconds = []
    for _ in range(args.warmup + args.steps):
        started = time.perf_counter()
        call()
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    own = seconds[args.warmup :]
    return {"first_seconds": seconds[0], "seconds": own, "median": statistics.median(own)}


def say(told: Mapping[str, Any], args: argparse.Namespace, **versions: str) -> None:
    """Prints what was found as one line of JSON, with memory, threads and versions."""
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else None
    more = {"peak_bytes": peak, "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    more |= {"threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({**told, **more, **versions}))
