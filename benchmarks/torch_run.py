"""What both children of peer.py share: their work, their models, their timed calls. Knows no JAX."""

import dataclasses
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers


@dataclasses.dataclass
class Job:
    """What one process does: a part, timed, or checked once from stored weights."""

    case: Path  # a folder that peer_ours.py wrote: spec.json, batch.npz and the models
    device: str
    part: str
    precision: str  # what is in bf16 beside fp32: "fp32" | "autocast" products | "frozen" models too | "whole": all
    compiled: bool  # through torch.compile
    check: str = ""  # .npz to write the arrays of a check to; empty: timed
    calls: int = 0  # timed

    def __post_init__(self):
        self.case = Path(self.case) / ("check" if self.check else "full")
        self.spec = json.loads((self.case / "spec.json").read_text("utf-8"))
        if self.precision == "own":
            self.precision = "frozen" if self.spec["dtype"] == "bfloat16" else "fp32"
        torch.manual_seed(0)

    def narrow(self) -> torch.autocast:
        """Returns the context in which products are in bf16 where the precision says so."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.precision in ("autocast", "frozen"))

    def build(self, name: str, *, trained: bool = False) -> Any:
        """Returns a model of the case, its weights loaded, or drawn where the case has none."""
        narrow = self.precision in ("frozen", "whole") and not trained
        words: dict[str, Any] = {"dtype": torch.bfloat16 if narrow else torch.float32, "attn_implementation": "sdpa"}
        if self.check:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(self.case / name, **words)
            return loaded.to(self.device)
        config = transformers.AutoConfig.from_pretrained(self.case / name)
        with torch.device(self.device):
            return transformers.AutoModelForCausalLM.from_config(config, **words)

    def batch(self) -> dict[str, torch.Tensor]:
        with np.load(self.case / "batch.npz") as stored:
            found = {key: torch.from_numpy(stored[key]).to(self.device) for key in stored.files}
        return {key: value.long() if value.dtype == torch.int32 else value for key, value in found.items()}

    def timed(self, call: Callable[[], Any]) -> dict[str, Any]:
        """Returns the seconds of each call, until the device has finished it."""
        seconds = []
        for _ in range(self.calls):
            started = time.perf_counter()
            call()
            if self.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        return {"seconds": seconds}

    def checked(self, arrays: dict[str, torch.Tensor], step: Callable[[], Any] | None) -> dict[str, float]:
        """Writes the arrays of a check; returns loss and gradient's norm of `step`, where there is one."""
        stored = {key: value.float().cpu().numpy() for key, value in arrays.items()}
        np.savez(self.check, allow_pickle=False, **stored)
        return dict(zip(("loss", "grad_norm"), (float(one.detach()) for one in step()), strict=True)) if step else {}

    def report(self, told: dict[str, Any], **versions: str) -> dict[str, Any]:
        """Returns what was found with memory, threads and versions."""
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else None
        more = {"peak_bytes": peak, "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        more |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
        return told | more | {"transformers": transformers.__version__} | versions


def stepper(model: torch.nn.Module, call: Callable[[], torch.Tensor], **words: Any) -> Callable[[], Any]:
    """Returns the training step by AdamW with `words`: -> (loss, gradient's norm). `call` takes gradients, too."""
    learns = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(learns, fused=True, **words)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad(set_to_none=True)
        loss = call()
        norm = torch.nn.utils.clip_grad_norm_(learns, 1.0)
        optimizer.step()
        return loss, norm

    return step
