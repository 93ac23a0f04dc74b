"""The wire in PyTorch, as a good user of transformers writes it; a child of peer.py, knows no JAX."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.torch_run import Job, stepper

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
        latents = latents.to(self.skip.weight.dtype)
        y = self.skip(latents) + self.down(F.gelu(self.up(self.norm(latents)), approximate="tanh"))
        vector = self.tasks[task].to(y.dtype).expand(y.shape[0], 1, -1)
        return torch.cat([y, vector], 1) * self.gain.to(y.dtype)


class Wire(torch.nn.Module):
    """An encoder that learns in front of frozen readers."""

    def __init__(self, job: Job):
        super().__init__()
        spec = self.spec = job.spec
        self.body: Any = job.build("body", trained=True).model
        self.eps = self.body.config.rms_norm_eps
        self.body.norm = torch.nn.Identity()  # the last state is mixed like the others, before any norm
        self.body.requires_grad_(spec["body_learns"])
        width, states = self.body.config.hidden_size, self.body.config.num_hidden_layers + 1
        with torch.device(job.device):
            self.head = Head(states, width, spec["width"], spec["slots"])
            self.readers, self.adapters = torch.nn.ModuleDict(), torch.nn.ModuleDict()
            for name in spec["readers"]:
                reader = self.readers[name] = job.build(name).requires_grad_(False)
                out = reader.config.hidden_size
                self.adapters[name] = Adapter(spec["width"], spec["hidden"], out, spec["tasks"])
        if job.check:
            with np.load(job.case / "trainable.npz") as stored:
                load_trainable(self, dict(stored))
        if job.precision == "whole":
            self.to(torch.bfloat16)

    def latents(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen = torch.where(mask[:, None, None], 0.0, float("-inf")).to(self.body.dtype)
        states = self.body(
            ids,
            attention_mask=seen.expand(-1, 1, mask.shape[1], -1),
            position_ids=(mask.long().cumsum(1) - 1).clamp(min=0),
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
        return self.head(states, mask, self.eps)

    def prompt(self, name: str, latents: torch.Tensor, fields: Arrays) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns embeddings [b p d] and mask [b p] of a reader's prompt."""
        reader: Any = self.readers[name]
        embed = reader.get_input_embeddings()
        prefix = self.adapters[name](latents, self.spec["task"])
        before, after = embed(fields["before/ids"]), embed(fields["after/ids"])
        marks = (fields["before/mask"], prefix.new_ones(prefix.shape[:2], dtype=torch.bool), fields["after/mask"])
        return torch.cat([before, prefix.to(before.dtype), after], 1), torch.cat(marks, 1)

    def forward(self, batch: Arrays) -> torch.Tensor:
        """Returns the mean cross-entropy over the answer tokens of all readers."""
        latents = self.latents(batch["source/ids"], batch["source/mask"])
        total, weight = torch.zeros((), device=latents.device), torch.zeros((), device=latents.device)
        for name, module in self.readers.items():
            reader: Any = module
            fields = of_reader(batch, name)
            embeddings, mask = self.prompt(name, latents, fields)
            answer, targets, counted = fields["answer_inputs"], fields["targets"], fields["weights"]
            attended = torch.cat([mask, torch.ones_like(answer, dtype=torch.bool)], 1).long()
            hidden = reader.model(
                inputs_embeds=torch.cat([embeddings, reader.get_input_embeddings()(answer)], 1),
                attention_mask=attended,
                position_ids=(attended.cumsum(1) - 1).clamp(min=0),
                use_cache=False,
            ).last_hidden_state[:, -targets.shape[1] :]
            # A frozen head over rows that do not lie together would be copied for each row of the batch, as it is
            # with `logits_to_keep`.
            logits = reader.lm_head(hidden.contiguous()).float()
            each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
            total, weight = total + (each * counted).sum(), weight + counted.sum()
        return total / weight


def of_reader(batch: Arrays, name: str) -> Arrays:
    return {key.removeprefix(f"{name}/"): value for key, value in batch.items() if key.startswith(f"{name}/")}


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


def train(wire: Wire, batch: Arrays, job: Job) -> Callable[[], Any]:
    """Returns the training step: -> (loss, gradient's norm)."""
    model: Any
    for model in (wire.body, *wire.readers.values()) if job.spec["remat"] != "none" else ():
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # or transformers does not recompute; there is no dropout
    forward = torch.compile(wire) if job.compiled else wire

    def call() -> torch.Tensor:
        with job.narrow():
            loss = forward(batch)
        loss.backward()
        return loss

    return stepper(wire, call, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.01)


def encoder(wire: Wire, batch: Arrays, job: Job) -> Callable[[], torch.Tensor]:
    wire.eval()
    call = torch.compile(wire.latents) if job.compiled else wire.latents

    def encode() -> torch.Tensor:
        with torch.inference_mode(), job.narrow():
            return call(batch["source/ids"], batch["source/mask"])

    return encode


def answerer(wire: Wire, name: str, job: Job) -> Callable[..., Any]:
    """Returns transformers' own generation by one reader: (embeddings, mask, more settings) -> what it gives."""
    reader: Any = wire.readers[name].eval()
    reader.generation_config.eos_token_id = None  # every answer has all its tokens
    reader.generation_config.pad_token_id = 0
    words: dict[str, Any] = {"max_new_tokens": job.spec["answer_tokens"], "do_sample": False, "use_cache": True}
    if job.compiled:
        reader.forward = torch.compile(reader.forward)
        words["cache_implementation"] = "static"

    def answer(embeddings: torch.Tensor, mask: torch.Tensor, **more: Any) -> Any:
        with torch.inference_mode(), job.narrow():
            return reader.generate(inputs_embeds=embeddings, attention_mask=mask.long(), **words, **more)

    return answer


def check(wire: Wire, batch: Arrays, job: Job) -> dict[str, float]:
    """Writes latents and each reader's first logits and answers, and returns a step's loss and gradient's norm."""
    found: Arrays = {}
    if job.part != "step":
        latents = found["latents"] = encoder(wire, batch, job)()
    for name in wire.readers if job.part in ("answer", "all") else ():
        with torch.inference_mode(), job.narrow():
            prompt = wire.prompt(name, latents, of_reader(batch, name))
        told = answerer(wire, name, job)(*prompt, output_logits=True, return_dict_in_generate=True)
        found |= {f"{name}/logits": told.logits[0], f"{name}/ids": told.sequences}
    learns = job.part in ("step", "all") and job.precision != "whole"
    return job.checked(found, train(wire, batch, job) if learns else None)


def run(**words: Any) -> dict[str, Any]:
    job = Job(**words)
    wire, batch = Wire(job), job.batch()
    if job.check:
        return job.report(check(wire, batch, job))
    if job.part == "answer":
        size = len(batch["source/ids"]), job.spec["slots"], job.spec["width"]
        with torch.inference_mode():
            latents = torch.randn(*size, device=job.device)
            prompts = {name: wire.prompt(name, latents, of_reader(batch, name)) for name in wire.readers}
        calls = [functools.partial(answerer(wire, name, job), *prompt) for name, prompt in prompts.items()]
    else:
        calls = [{"step": train, "encode": encoder}[job.part](wire, batch, job)]
    return job.report(job.timed(lambda: [call() for call in calls]))
