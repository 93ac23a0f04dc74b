"""Our side of peer.py: writes the case that both sides read, checks and times; a child of it.

    python benchmarks/peer_ours.py --config configs/embeddings.py --case CASE --do time --part step --precision bf16

Prints one JSON line.
"""

import argparse
import dataclasses
import functools
import json
import resource
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks import common
from lw_jax.core import environment
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError, leave

OTHERS = {"latentwire": "torch_wire.py", "dpo": "torch_dpo.py"}
# Precision -> the configuration's arithmetic and its readers' weights; "own" is as the configuration says.
PRECISIONS = {"fp32": ("fp32", "fp32"), "bf16": ("bf16", "bf16"), "w8a8": ("bf16", "w8a8")}
SEED = 0

Told = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser, assignments, rest = common.parser(__doc__, argv)
    parser.add_argument("--case", type=Path, required=True)
    parser.add_argument("--do", choices=("write", "check", "time"), required=True)
    parser.add_argument("--part", choices=("step", "encode", "answer", "all"), default="step", help="all: a check's")
    parser.add_argument("--precision", choices=(*PRECISIONS, "own"), default="own")
    parser.add_argument("--layers", type=int, default=2, help="of each model in a check")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, metavar="FILE", help="a check's arrays, .npz")
    args = parser.parse_args(rest)
    environment.reserve_memory()
    environment.hide_idle_cuda()
    if args.do == "write":
        full, exact = (settle(args.config, assignments, precision) for precision in ("own", "fp32"))
        write(full, args.case / "full")
        write(cut(exact, args.case / "check", args.layers), args.case / "check", origin=full, layers=args.layers)
        told = machine()
    elif args.do == "time":
        told = time_part(settle(args.config, assignments, args.precision), args)
    else:
        told = check(cut(settle(args.config, assignments, args.precision), args.case / "check", args.layers), args)
    print(json.dumps(told))
    return 0


def settle(spec: str, assignments: Mapping[str, str], precision: str = "own") -> Config:
    """Returns the configuration as the other side can follow it: one device, nothing automatic, steps by AdamW."""
    cfg = common.load(spec, assignments)
    if cfg.recipe not in OTHERS:
        raise UserError(f"--config {spec}: recipe {cfg.recipe!r} has no peer here; {', '.join(OTHERS)} have")
    if cfg.recipe == "latentwire" and (cfg.encoder.kind, cfg.encoder.pooling) != ("lm", "windows"):
        raise UserError("config.encoder: the peer has a pretrained decoder body and window pooling; take those")
    if cfg.data.packed_tokens:
        raise UserError(
            f"config.data.packed_tokens = {cfg.data.packed_tokens}: the peer reads one question a row; set it to 0"
        )
    remat = "none" if cfg.compute.remat == "auto" else cfg.compute.remat
    train = dataclasses.replace(cfg.train, micro_batch=0)
    compute, optim = dataclasses.replace(cfg.compute, remat=remat), dataclasses.replace(cfg.optim, kind="adamw")
    cfg = dataclasses.replace(cfg, train=train, compute=compute, optim=optim)
    if precision == "own":
        return cfg
    dtype, stored = PRECISIONS[precision]
    llms = {name: dataclasses.replace(llm, weights=stored) for name, llm in cfg.llms.items()}
    return dataclasses.replace(cfg, llms=llms, compute=dataclasses.replace(cfg.compute, dtype=dtype))


def machine() -> Told:
    import jax

    from lw_jax.core import runtime

    return {"device": "cuda" if jax.default_backend() == "gpu" else "cpu", "name": runtime.describe()}


def cut(cfg: Config, case: Path, layers: int) -> Config:
    """Returns the same run over the cut models that `write` puts into a folder."""
    llms = {name: dataclasses.replace(llm, source=str(case / name), sha256="") for name, llm in cfg.llms.items()}
    encoder = dataclasses.replace(cfg.encoder, source=str(case / "body"), sha256="", layers=layers)
    return dataclasses.replace(cfg, llms=llms, encoder=encoder if cfg.recipe == "latentwire" else cfg.encoder)


def write(cfg: Config, case: Path, *, origin: Config | None = None, layers: int = 0) -> None:
    """Writes what the other side needs; for a configuration cut from `origin` to so many layers, weights as well."""
    import jax

    from lw_jax import recipes
    from lw_jax.hub import families, peft, weights
    from lw_jax.models import decoder

    for number, (name, shapes) in enumerate(models(origin or cfg).items()):
        kind = "qwen2" if shapes.qkv_bias else "llama"
        (case / name).mkdir(parents=True)
        if origin is None:
            (case / name / "config.json").write_text(json.dumps(families.hf_fields(shapes, kind)), "utf-8")
            continue
        own = dataclasses.replace(shapes, layers=min(layers, shapes.layers))
        draw = jax.jit(functools.partial(decoder.init, cfg=own, dtype="float32"))
        weights.save(case / name, draw(jax.random.key(number)), own, model_type=kind)
    recipe: Any = recipes.outline(cfg)
    np.savez(case / "batch.npz", allow_pickle=False, **flatten(ragged(cfg, recipe.batch_widths())))
    (case / "spec.json").write_text(json.dumps(facts(cfg, recipe)), "utf-8")
    if origin is None:
        return
    learns = trainable(cfg, recipe)
    if cfg.recipe == "dpo":
        peft.save(case / "adapter", learns, recipe.lora, cfg=recipe.model, model_type="llama", base="")
        return
    stored = {path: x for path, x in flatten(learns).items() if "encoder/body/" not in path}
    np.savez(case / "trainable.npz", allow_pickle=False, **stored)


def models(cfg: Config) -> dict[str, Any]:
    from lw_jax.recipes import frozen_models

    found = {name: frozen_models.outline(cfg, llm.source) for name, llm in cfg.llms.items()}
    if cfg.recipe == "latentwire":
        body = frozen_models.outline(cfg, cfg.encoder.source)
        found["body"] = dataclasses.replace(body, layers=cfg.encoder.layers or body.layers, tied=True)
    return found


def facts(cfg: Config, recipe: Any) -> Told:
    """Returns what the other side must know beside shapes."""
    from lw_jax.core.types import TASKS
    from lw_jax.planning import workload

    told = {
        "dtype": workload.arithmetic(cfg, recipe.placement.platform),
        "readers": list(cfg.llms),
        "remat": cfg.compute.remat,
    }
    told |= {"lora": dataclasses.asdict(cfg.lora), "dpo": dataclasses.asdict(cfg.dpo)}
    told |= {"slots": cfg.encoder.slots, "width": cfg.encoder.width, "hidden": cfg.adapter.hidden}
    told |= {"answer_tokens": cfg.eval.max_new_tokens}
    return told | {"tasks": len(TASKS), "task": TASKS.index("answer"), "body_learns": cfg.encoder.rate > 0}


def flatten(tree: Any) -> dict[str, np.ndarray]:
    """Returns a tree's arrays by path, those of a reader under its name."""
    import jax

    from sharding.rules import path_of

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_of(path).removeprefix("readers/"): np.asarray(leaf) for path, leaf in leaves}


def trainable(cfg: Config, recipe: Any) -> Any:
    """Returns what learns, equal in every process; the second matrices of LoRA pairs are not 0, so that they count."""
    import jax

    from lw_jax.recipes import encoder_bodies

    if cfg.recipe == "dpo":
        shapes = recipe.abstract().trainable
        rng = np.random.default_rng(SEED)
        return jax.tree.map(lambda x: rng.normal(0, 0.02, x.shape).astype(x.dtype), shapes)
    body = encoder_bodies.BODIES["lm"].load(Path(cfg.encoder.source), cfg.encoder.layers)
    sizes = dict.fromkeys(cfg.llms, np.float32(0.02))
    return jax.jit(recipe.wire.init)(jax.random.key(SEED), body=body, embedding_rms=sizes)


class Side:
    """Our models of one configuration: stored weights of a case, or random ones."""

    def __init__(self, cfg: Config, case: Path | None):
        import jax

        from lw_jax import recipes
        from lw_jax.benchmarking import timing
        from lw_jax.recipes import frozen_models
        from lw_jax.training.step_spec import StepSpec
        from sharding import place

        self.cfg = cfg
        self.recipe: Any = recipes.outline(cfg)
        self.placement = self.recipe.placement
        self.program = StepSpec(cfg, self.recipe)
        self.state: Any = timing.fill(self.program.state)
        if case is None:
            self.frozen: Any = timing.fill(self.program.frozen)
        else:
            at = self.recipe.shardings().frozen
            self.frozen = {
                name: frozen_models.load(case / name, cfg, llm, at[name], self.placement.platform)
                for name, llm in cfg.llms.items()
            }
            placed = self.recipe.shardings().trainable
            self.state["trainable"] = jax.device_put(trainable(cfg, self.recipe), placed)
        self.batch = ragged(cfg, self.recipe.batch_widths())
        self.rows = place.put_parts(self.batch, self.placement, place.put_eval)

    def stepper(self) -> Callable[[], Any]:
        """Returns the training step: -> its values, the new state."""
        from sharding import place

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
        from lw_jax.evals.wire_functions import WireFunctions

        wire = self.recipe.wire
        readers = {name: dataclasses.replace(reader, stops=()) for name, reader in wire.readers.items()}
        return WireFunctions(dataclasses.replace(wire, readers=readers), self.placement)


def time_part(cfg: Config, args: argparse.Namespace) -> Told:
    from lw_jax.benchmarking import timing

    side = Side(cfg, None)
    if args.part == "answer":
        latents = side.encoder()()
        calls = [side.answerer(name, side.prompt(name, latents)) for name in cfg.llms]
    else:
        calls = [side.stepper() if args.part == "step" else side.encoder()]
    seconds = timing.repeat(lambda: [call() for call in calls], repeats=args.warmup + args.steps, warmup=0)
    own = seconds[args.warmup :]
    told = {"first_seconds": seconds[0], "seconds": own, "median": statistics.median(own)}
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return told | {"peak_bytes": timing.peak_bytes(), "host_bytes": host}


def check(cfg: Config, args: argparse.Namespace) -> Told:
    """Writes latents and each reader's first logits and answers, and returns a step's loss and gradient's norm."""
    import jax

    found: Told = {}
    with jax.default_matmul_precision("highest" if args.precision == "fp32" else None):
        side = Side(cfg, args.case / "check")
        if cfg.recipe == "latentwire":
            latents = found["latents"] = side.encoder()()
            logits = jax.jit(side.recipe.wire.answer_logits, static_argnums=1)
            for name in cfg.llms:
                prompt, fields = side.prompt(name, latents), side.rows["readers"][name]
                found[f"{name}/logits"] = logits(side.frozen[name], name, prompt, fields)[:, 0]
                found[f"{name}/ids"] = side.answerer(name, prompt)()
        values, _ = side.stepper()()
    np.savez(args.out, allow_pickle=False, **{key: np.asarray(value, np.float32) for key, value in found.items()})
    return {key: float(values[key]) for key in ("loss", "grad_norm")}


def ragged(cfg: Config, widths: Any) -> Any:
    """Returns a batch of random tokens in rows of random lengths, padded as ours are; equal in every process."""
    from lw_jax.core.types import EXACT

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


if __name__ == "__main__":
    leave(main)
