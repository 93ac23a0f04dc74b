"""Our side of peer.py: writes the case that both sides read, checks and times, each in a process of its own."""

import dataclasses
import functools
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.peer import LAYERS, settle
from lw_jax import recipes
from lw_jax.benchmarking import timing
from lw_jax.core import runtime
from lw_jax.core.config import Config
from lw_jax.core.tree import flatten_paths
from lw_jax.core.types import EXACT, TASKS
from lw_jax.evals.wire_functions import WireFunctions
from lw_jax.hub import families, peft, weights
from lw_jax.models import decoder
from lw_jax.planning import workload
from lw_jax.recipes import frozen_models
from lw_jax.training.step_spec import StepSpec
from sharding import place

SEED = 0


def write(case: str, **spec: Any) -> dict[str, Any]:
    """Writes CASE/full, the shapes of every model, and CASE/check, cut models with weights; returns the machine."""
    full, check = Path(case) / "full", Path(case) / "check"
    cfg = settle(**spec)
    for number, (name, shapes) in enumerate(_models(cfg).items()):
        kind = "qwen2" if shapes.qkv_bias else "llama"
        (full / name).mkdir(parents=True)
        (full / name / "config.json").write_text(json.dumps(families.hf_fields(shapes, kind)), "utf-8")
        own = dataclasses.replace(shapes, layers=min(LAYERS, shapes.layers))
        draw = jax.jit(functools.partial(decoder.init, cfg=own, dtype="float32"))
        weights.save(check / name, draw(jax.random.key(number)), own, model_type=kind)
    _write(cfg, full)
    cfg = _cut(settle(**spec, precision="fp32"), check)
    recipe = _write(cfg, check)
    learns = trainable(cfg, recipe)
    if cfg.recipe == "dpo":
        peft.save(check / "adapter", learns, recipe.lora, cfg=recipe.model, model_type="llama", base="")
    else:
        stored = {path: x for path, x in flatten(learns).items() if "encoder/body/" not in path}
        np.savez(check / "trainable.npz", allow_pickle=False, **stored)
    return {"device": "cuda" if jax.default_backend() == "gpu" else "cpu", "name": runtime.describe()}


def _cut(cfg: Config, case: Path) -> Config:
    """Returns the same run over the cut models that `write` puts into a folder."""
    llms = {name: dataclasses.replace(llm, source=str(case / name), sha256="") for name, llm in cfg.llms.items()}
    encoder = dataclasses.replace(cfg.encoder, source=str(case / "body"), sha256="", layers=LAYERS)
    return dataclasses.replace(cfg, llms=llms, encoder=encoder if cfg.recipe == "latentwire" else cfg.encoder)


def _models(cfg: Config) -> dict[str, Any]:
    found = {name: frozen_models.outline(cfg, llm.source) for name, llm in cfg.llms.items()}
    if cfg.recipe == "latentwire":
        body = frozen_models.outline(cfg, cfg.encoder.source)
        found["body"] = dataclasses.replace(body, layers=cfg.encoder.layers or body.layers, tied=True)
    return found


def _write(cfg: Config, case: Path) -> Any:
    """Writes the batch and what the other side must know beside shapes; returns the recipe."""
    recipe: Any = recipes.outline(cfg)
    np.savez(case / "batch.npz", allow_pickle=False, **flatten(ragged(cfg, recipe.batch_widths())))
    told = {"dtype": workload.arithmetic(cfg, recipe.placement.platform), "readers": list(cfg.llms)}
    told |= {"remat": cfg.compute.remat, "dpo": dataclasses.asdict(cfg.dpo)}
    told |= {"slots": cfg.encoder.slots, "width": cfg.encoder.width, "hidden": cfg.adapter.hidden}
    told |= {"answer_tokens": cfg.eval.max_new_tokens, "body_learns": cfg.encoder.rate > 0}
    told |= {"tasks": len(TASKS), "task": TASKS.index("answer")}
    if cfg.recipe == "dpo":
        own, targets = recipe.lora, list(cfg.lora.targets)
        told["lora"] = {"r": own.rank, "lora_alpha": own.alpha, "lora_dropout": own.dropout, "target_modules": targets}
    (case / "spec.json").write_text(json.dumps(told), "utf-8")
    return recipe


def flatten(tree: Any) -> dict[str, np.ndarray]:
    """Returns a tree's arrays by path, those of a reader under its name."""
    return {path.removeprefix("readers/"): np.asarray(leaf) for path, leaf in flatten_paths(tree).items()}


def trainable(cfg: Config, recipe: Any) -> Any:
    """Returns what learns, equal in every process; the second matrices of LoRA pairs are not 0, so that they count."""
    if cfg.recipe == "dpo":
        shapes = recipe.abstract.trainable
        rng = np.random.default_rng(SEED)
        return jax.tree.map(lambda x: rng.normal(0, 0.02, x.shape).astype(x.dtype), shapes)
    body = frozen_models.load_body(Path(cfg.encoder.source), recipe.wire.encoder.body)
    sizes = dict.fromkeys(cfg.llms, np.float32(0.02))
    return jax.jit(recipe.wire.init)(jax.random.key(SEED), body=body, embedding_rms=sizes)


class Side:
    """Our models of one configuration: stored weights of a case, or random ones."""

    def __init__(self, cfg: Config, case: Path | None):
        self.cfg = cfg
        self.recipe: Any = recipes.outline(cfg)
        self.placement = self.recipe.placement
        self.program = StepSpec(cfg, self.recipe)
        self.state: Any = timing.fill(self.program.state)
        if case is None:
            self.frozen: Any = timing.fill(self.program.frozen)
        else:
            at = self.recipe.shardings.frozen
            self.frozen = {
                name: frozen_models.load(case / name, cfg, llm, at[name], self.placement.platform)
                for name, llm in cfg.llms.items()
            }
            placed = self.recipe.shardings.trainable
            self.state["trainable"] = jax.device_put(trainable(cfg, self.recipe), placed)
        self.batch = ragged(cfg, self.recipe.batch_widths())
        self.rows = place.put_parts(self.batch, self.placement, place.put_eval)

    def stepper(self) -> Callable[[], Any]:
        """Returns the training step: -> its values, the new state."""
        batch = place.put_parts(self.batch, self.placement, functools.partial(place.put_batch, accumulation=1))

        def step() -> Any:
            self.state, values = self.program.step(self.state, self.frozen, batch)
            return values, self.state

        return step

    def encoder(self) -> Callable[[], Any]:
        encode = self.functions.encode
        return lambda: encode(self.state["trainable"], self.rows["source"])

    def answerer(self, name: str, prompt: Any) -> Callable[[], Any]:
        """Returns one reader's answers, all of the same length."""
        generate, count = self.functions.generate, self.cfg.eval.max_new_tokens
        return lambda: generate(self.frozen[name], prompt, name, count)

    def prompt(self, name: str, latents: Any) -> Any:
        fields = self.rows["readers"][name]
        return self.functions.prompt_from_latents(self.state["trainable"], self.frozen[name], fields, latents, name)

    @functools.cached_property
    def functions(self) -> Any:
        """Functions of the wire, of readers that do not stop."""
        wire = self.recipe.wire
        readers = {name: dataclasses.replace(reader, stops=()) for name, reader in wire.readers.items()}
        return WireFunctions(dataclasses.replace(wire, readers=readers), self.placement)


def time(case: str, part: str, precision: str, calls: int, **spec: Any) -> dict[str, Any]:
    del case  # random weights at full depth
    side = Side(settle(**spec, precision=precision), None)
    if part == "answer":
        latents = side.encoder()()
        work = [side.answerer(name, side.prompt(name, latents)) for name in side.cfg.llms]
    else:
        work = [side.stepper() if part == "step" else side.encoder()]
    seconds = timing.repeat(lambda: [call() for call in work], repeats=calls, warmup=0)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak_bytes": timing.peak_bytes(), "host_bytes": host}


def check(case: str, part: str, precision: str, check: str, **spec: Any) -> dict[str, Any]:
    """Writes latents and each reader's first logits and answers, and returns a step's loss and gradient's norm."""
    del part  # all of them
    found, folder = {}, Path(case) / "check"
    with jax.default_matmul_precision("highest" if precision == "fp32" else None):
        side = Side(_cut(settle(**spec, precision=precision), folder), folder)
        if side.cfg.recipe == "latentwire":
            latents = found["latents"] = side.encoder()()
            logits = jax.jit(side.recipe.wire.answer_logits, static_argnums=1)
            for name in side.cfg.llms:
                prompt, fields = side.prompt(name, latents), side.rows["readers"][name]
                found[f"{name}/logits"] = logits(side.frozen[name], name, prompt, fields)[:, 0]
                found[f"{name}/ids"] = side.answerer(name, prompt)()
        values, _ = side.stepper()()
    np.savez(check, allow_pickle=False, **{key: np.asarray(value, np.float32) for key, value in found.items()})
    return {key: float(values[key]) for key in ("loss", "grad_norm")}


def ragged(cfg: Config, widths: Any) -> Any:
    """Returns a batch of random tokens in rows of random lengths, padded as ours are; equal in every process."""
    rng, rows = np.random.default_rng(SEED), cfg.train.global_batch
    whole = np.tile(np.array([cfg.encoder.slots, cfg.encoder.width, EXACT], np.int32), (rows, 1))

    def tokens(shape: tuple[int, ...], *, left: bool) -> tuple[np.ndarray, np.ndarray]:
        width, at = shape[-1], np.arange(shape[-1])
        real = rng.integers((width + 1) // 2, width + 1, (rows, *shape[:-1]))[..., None]
        mask = at >= width - real if left else at < real
        return rng.integers(1, 256, (rows, *shape), np.int32) * mask, mask

    def fill(node: Any, name: str) -> Any:
        if not isinstance(node, dict):
            if name == "channel" or not hasattr(node, "shape"):
                return whole if name == "channel" else node
            return np.ones((rows, *node.shape), node.dtype)
        made = {key: fill(value, key) for key, value in node.items()}
        if "mask" in node:
            made["ids"], made["mask"] = tokens(node["ids"].shape, left=name in ("before", "after"))
        if name == "before":  # the same words in every row, as a prompt's opening is
            made |= {key: np.repeat(made[key][:1], rows, axis=0) for key in ("ids", "mask")}
        if "completion" in node:  # of a pair: what follows the prompt, a quarter of the longest row
            made["completion"] = made["mask"] & (np.arange(node["ids"].shape[-1]) >= node["ids"].shape[-1] // 4)
        if "targets" in node:
            made["targets"], real = tokens(node["targets"].shape, left=False)
            made["answer_inputs"], made["weights"] = made["targets"][:, :-1], real.astype(np.float32)
        return made

    return fill(widths, "")
