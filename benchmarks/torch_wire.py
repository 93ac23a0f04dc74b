"""The wire's training step in PyTorch, as a good user of transformers writes it; a child of peer.py, knows no JAX.

    python benchmarks/torch_wire.py CASE --device cuda --steps 5 [--check] [--compile]

CASE is a folder that peer.py wrote: spec.json, batch.npz, a folder with config.json for each model and, where the loss
is checked, their weights and trainable.npz. Prints one JSON line.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch_run import build, parse, report

Arrays = dict[str, Any]


class Head(torch.nn.Module):
    """A body's states -> latents: softmax mix over layers, mean over contiguous windows, linear, unit RMS."""

    def __init__(self, states: int, width: int, latent: int, slots: int):
        super().__init__()
        self.mix = torch.nn.Parameter(torch.zeros(states))
        self.project = torch.nn.Linear(width, latent)
        self.slots = slots

    def forward(self, states: tuple[torch.Tensor, ...], mask: torch.Tensor, eps: float) -> torch.Tensor:
        """Takes states [b s d] of all layers and mask [b s]; returns fp32 latents [b m z]."""
        share = self.mix.softmax(0)
        mixed = torch.stack([share[i].to(x.dtype) * unit_rms(x, eps) for i, x in enumerate(states)]).sum(0)
        y = self.project(self.windows(mask).to(mixed.dtype) @ mixed).float()
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)

    def windows(self, mask: torch.Tensor) -> torch.Tensor:
        """Returns rows [b m s] that average each slot's window of the real tokens, at least one."""
        length = mask.sum(1)[:, None]
        slot = torch.arange(self.slots, device=mask.device)[None]
        first = slot * length // self.slots
        last = torch.maximum((slot + 1) * length // self.slots, first + 1)
        token = torch.arange(mask.shape[1], device=mask.device)[None, None]
        inside = (token >= first[:, :, None]) & (token < last[:, :, None]) & mask[:, None]
        return inside.float() / inside.sum(2, keepdim=True).clamp(min=1)


class Adapter(torch.nn.Module):
    """Latents -> soft prefix of one reader and, behind it, the vector that names the task."""

    def __init__(self, latent: int, hidden: int, out: int, tasks: int):
        super().__init__()
        self.norm = torch.nn.RMSNorm(latent, eps=1e-6)
        self.up, self.down = torch.nn.Linear(latent, hidden), torch.nn.Linear(hidden, out)
        self.skip = torch.nn.Linear(latent, out, bias=False)
        self.gain = torch.nn.Parameter(torch.ones(()))
        self.tasks = torch.nn.Parameter(torch.randn(tasks, out))

    def forward(self, latents: torch.Tensor, task: int) -> torch.Tensor:
        """Takes [b m z], returns [b m+1 d]."""
        y = self.skip(latents) + self.down(F.gelu(self.up(self.norm(latents)), approximate="tanh"))
        vector = self.tasks[task].to(y.dtype).expand(y.shape[0], 1, -1)
        return torch.cat([y, vector], 1) * self.gain.to(y.dtype)


class Wire(torch.nn.Module):
    """An encoder that learns in front of frozen readers."""

    def __init__(self, case: Path, spec: dict[str, Any], device: str, *, check: bool):
        super().__init__()
        self.spec = spec
        dtype = "float32" if check else spec["dtype"]
        self.body: Any = build(case / "body", "float32", device, load=check).model
        self.eps = self.body.config.rms_norm_eps
        self.body.norm = torch.nn.Identity()  # the last state is mixed like the others, before any norm
        self.body.requires_grad_(spec["body_learns"])
        width, states = self.body.config.hidden_size, self.body.config.num_hidden_layers + 1
        with torch.device(device):
            self.head = Head(states, width, spec["width"], spec["slots"])
            self.readers, self.adapters = torch.nn.ModuleDict(), torch.nn.ModuleDict()
            for name in spec["readers"]:
                reader = build(case / name, dtype, device, load=check).requires_grad_(False)
                out = reader.config.hidden_size
                self.readers[name] = reader
                self.adapters[name] = Adapter(spec["width"], spec["hidden"], out, spec["tasks"])
        if spec["remat"] != "none":
            one: Any
            for one in (self.body, *self.readers.values()):
                one.gradient_checkpointing_enable({"use_reentrant": False})
                one.train()  # or transformers does not recompute; there is no dropout

    def forward(self, batch: Arrays) -> torch.Tensor:
        """Returns the mean cross-entropy over the answer tokens of all readers."""
        ids, mask = batch["source/ids"], batch["source/mask"]
        seen = torch.where(mask[:, None, None], 0.0, float("-inf")).expand(-1, 1, mask.shape[1], -1)
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        states = self.body(
            ids, attention_mask=seen, position_ids=positions, output_hidden_states=True, use_cache=False
        ).hidden_states
        latents = self.head(states, mask, self.eps)
        total, weight = torch.zeros((), device=ids.device), torch.zeros((), device=ids.device)
        for name, module in self.readers.items():
            reader: Any = module
            fields = {key.removeprefix(f"{name}/"): value for key, value in batch.items() if key.startswith(f"{name}/")}
            embed = reader.get_input_embeddings()
            prefix = self.adapters[name](latents, self.spec["task"])
            parts = (embed(fields["before/ids"]), prefix, embed(fields["after/ids"]), embed(fields["answer_inputs"]))
            rows, ones = len(prefix), torch.ones_like
            marks = (
                fields["before/mask"],
                torch.ones(rows, prefix.shape[1], dtype=torch.bool, device=prefix.device),
                fields["after/mask"],
                ones(fields["answer_inputs"], dtype=torch.bool),
            )
            attended = torch.cat(marks, 1)
            targets, counted = fields["targets"], fields["weights"]
            logits = reader(
                inputs_embeds=torch.cat([part.to(parts[0].dtype) for part in parts], 1),
                attention_mask=attended.long(),
                position_ids=(attended.long().cumsum(1) - 1).clamp(min=0),
                logits_to_keep=targets.shape[1],
                use_cache=False,
            ).logits.float()
            each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
            total, weight = total + (each * counted).sum(), weight + counted.sum()
        return total / weight


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Divides by the root mean square of the last axis, in fp32, and casts back."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def load_trainable(wire: Wire, stored: Arrays) -> None:
    """Copies the head and the adapters from our tree, whose matrices are [in, out]."""
    own = dict(wire.named_parameters())
    for path, value in stored.items():
        name = path.replace("encoder/head/", "head/").replace("/", ".")
        name = name.replace(".kernel", ".weight").replace(".scale", ".weight")
        flat = torch.from_numpy(value.T.copy() if path.endswith("kernel") else value)
        with torch.no_grad():
            own[name].copy_(flat)


def main() -> None:
    """Runs the steps and prints what they took."""
    args = parse(__doc__)
    torch.manual_seed(0)
    spec = json.loads((args.case / "spec.json").read_text("utf-8"))
    wire = Wire(args.case, spec, args.device, check=args.check)
    loaded = np.load(args.case / "batch.npz")
    batch = {key: torch.from_numpy(loaded[key]).to(args.device) for key in loaded.files}
    batch = {key: value.long() if value.dtype == torch.int32 else value for key, value in batch.items()}
    if args.check:
        load_trainable(wire, dict(np.load(args.case / "trainable.npz")))
    learns = [one for one in wire.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(learns, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.01)
    call = torch.compile(wire) if args.compile else wire
    narrow = torch.autocast(args.device, torch.bfloat16, enabled=spec["dtype"] == "bfloat16" and not args.check)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad(set_to_none=True)
        with narrow:
            loss = call(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(learns, 1.0)
        optimizer.step()
        return loss, norm

    report(step, args, versions={})


if __name__ == "__main__":
    main()
