"""What both children of peer.py share: their words, their models, their timed steps. Knows no JAX."""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers


def parse(told: str | None) -> argparse.Namespace:
    """Returns the words of the command line."""
    parser = argparse.ArgumentParser(description=told, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="one step in fp32 on the stored weights")
    parser.add_argument("--compile", action="store_true", help="through torch.compile")
    return parser.parse_args()


def build(folder: Path, dtype: str, device: str, *, load: bool) -> Any:
    """Returns the model of a folder, its weights loaded, or drawn where the folder has none."""
    words: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    if load:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, **words)
        return loaded.to(device)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder), **words)


def report(
    step: Callable[[], tuple[torch.Tensor, torch.Tensor]], args: argparse.Namespace, *, versions: Mapping[str, str]
) -> None:
    """Takes steps, each until the device has finished it, and prints seconds, first loss and gradient's norm as JSON.

    Without --check the first two warm up.
    """
    seconds, told = [], {}
    for number in range(args.steps if args.check else args.steps + 2):
        started = time.perf_counter()
        loss, norm = step()
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        if number == 0:
            told = {"loss": float(loss.detach()), "grad_norm": float(norm), "first_seconds": seconds[0]}
    timed = seconds if args.check else seconds[2:]
    told |= {"seconds": timed, "median": statistics.median(timed)}
    told |= {"peak_bytes": torch.cuda.max_memory_allocated() if args.device == "cuda" else None}
    told |= {"host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    print(json.dumps(told | {"torch": torch.__version__, "transformers": transformers.__version__, **versions}))
