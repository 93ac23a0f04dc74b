"""The trainer: one jitted step and one loop for every recipe. It never asks which recipe it runs."""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lw_jax import metrics, optim, recipes, sources
from lw_jax.checkpoint import Checkpointer
from lw_jax.core import config, runtime
from lw_jax.core import rng as rngs
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.types import LossTerms, Tree
from lw_jax.data.batches import Encoded
from lw_jax.data.loader import Loader, eval_batches
from lw_jax.recipes.base import Recipe
from lw_jax.recipes.selfmade import PREFIX, SelfmadeReader, folder
from sharding import mesh as meshes
from sharding import place

State = dict[str, Tree]  # {"trainable", "opt_state", "step"}: all that moves, besides the data position


def main(cfg: Config, *, resolved: dict[str, Any], workdir: Path) -> int:
    """Trains until `train.steps`, or saves and returns `runtime.REQUEUE` when asked to stop."""
    del resolved
    runtime.start()
    runtime.enable_compile_cache(sources.cache_root() / "compiled")
    mesh = meshes.make(data=cfg.mesh.data, model=cfg.mesh.model)
    print(meshes.describe(mesh), flush=True)
    make_selfmade_readers(cfg)
    recipe = recipes.make(cfg, mesh)
    identity = recipes.identity(recipe, cfg)
    with Checkpointer(workdir / "checkpoints", keep=cfg.train.keep, identity=identity) as checkpointer:
        run = Run(cfg, mesh, recipe, checkpointer, workdir)
        with runtime.Preemption() as preemption:
            return run.train(preemption.requested)


def make_selfmade_readers(cfg: Config) -> None:
    """Trains and saves every self-made reader that the configuration names and that is not there yet."""
    named = {llm.source for llm in cfg.llms.values()} | {cfg.encoder.source}
    for source in sorted(source for source in named if source.startswith(PREFIX)):
        if (folder(cfg, source) / "config.json").exists():
            continue
        sizes = cfg.selfmade
        own = dataclasses.replace(
            cfg,
            seed=0,
            train=dataclasses.replace(
                cfg.train, steps=sizes.steps, global_batch=sizes.batch, micro_batch=0, log_every=100, eval_every=0
            ),
            optim=config.Optim(sizes.learning_rate, sizes.steps // 10, 0.1, 0.01, 1.0, 0.9, 0.99, 1e-8),
        )
        print(f"reader {source}: trained here once, then frozen", flush=True)
        recipe = SelfmadeReader(own, meshes.make(data=1, model=1), source=source)
        run = Run(own, recipe.mesh, recipe, None, None)
        run.train(lambda step: False)
        recipe.save(run.state["trainable"])


@dataclasses.dataclass
class Run:
    """One training run; without a checkpointer and a workdir nothing is written."""

    cfg: Config
    mesh: Mesh
    recipe: Recipe
    checkpointer: Checkpointer | None
    workdir: Path | None

    def __post_init__(self) -> None:
        train = self.cfg.train
        self.accumulation = place.accumulation(
            global_batch=train.global_batch, micro_batch=train.micro_batch, data_axis=self.mesh.shape["data"]
        )
        self.optimizer = optim.make(
            self.cfg.optim, steps=train.steps, rates=self.recipe.rates, abstract=self.recipe.abstract().trainable
        )
        self.schedule = optim.schedule(self.cfg.optim, train.steps)
        self.state: State = {}

    def train(self, stop_requested: Callable[[int], bool]) -> int:
        """Builds or restores the state and runs the loop; returns 0 or `runtime.REQUEUE`."""
        encoded = self.recipe.data("train")
        self._tell(encoded.describe())
        loader = Loader(
            encoded,
            global_batch=self.cfg.train.global_batch,
            seed=self.cfg.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        weights = self.recipe.build()
        first = self._restore_or_start(weights.trainable, loader)
        self._tell([self._describe_batch()])
        log = None
        if self.workdir is not None and jax.process_index() == 0:
            log = metrics.MetricsLog(self.workdir / "metrics.jsonl", resumed_step=first)
        return self._loop(weights.frozen, loader, first, log, stop_requested)

    def abstract_state(self) -> State:
        """Returns the state as shapes with shardings, for restore and planner."""
        shapes = self.recipe.abstract().trainable
        trainable = place.place_shapes(shapes, self.recipe.shardings().trainable)
        replicated = NamedSharding(self.mesh, P())
        rest = jax.eval_shape(lambda tree: (self.optimizer.init(tree), jnp.zeros((), jnp.int32)), shapes)
        # What learns is replicated (sharding.tables.TRAINABLE), and its moments with it.
        opt_state, step = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), rest
        )
        return {"trainable": trainable, "opt_state": opt_state, "step": step}

    def _restore_or_start(self, trainable: Tree, loader: Loader) -> int:
        restored = self.checkpointer.restore(self.abstract_state()) if self.checkpointer else None
        if restored is None:
            replicated = NamedSharding(self.mesh, P())
            opt_state = jax.jit(self.optimizer.init, out_shardings=replicated)(trainable)
            step = jax.device_put(jnp.zeros((), jnp.int32), replicated)
            self.state = {"trainable": trainable, "opt_state": opt_state, "step": step}
            return 0
        self._tell([f"goes on from step {restored.step}"])
        self.state = restored.state
        loader.restore(restored.data)
        return restored.step

    def _loop(
        self,
        frozen: Tree,
        loader: Loader,
        first: int,
        log: metrics.MetricsLog | None,
        stop_requested: Callable[[int], bool],
    ) -> int:
        train = self.cfg.train
        step_fn = make_step(self.recipe.loss, self.optimizer, seed=self.cfg.seed)
        clock = metrics.Clock(first, train.steps)
        pending: tuple[int, Tree] | None = None
        for step in range(first + 1, train.steps + 1):
            batch = place.put_batch(next(loader), self.mesh, accumulation=self.accumulation)
            self.state, values = step_fn(self.state, frozen, batch)
            if pending is not None:  # read one step late, so that the devices never wait for the host
                self._check_finite(*pending)
                self._report(*pending, clock, log)
            elif step == first + 1:
                jax.block_until_ready(values)
                self._tell([f"first step, compiled and run, in {metrics.duration(clock.compiled(step))}"])
            pending = (step, values)
            validated = self._validate_if_due(step, frozen, log)
            stop = stop_requested(step)
            if self.checkpointer and (step % train.checkpoint_every == 0 or step == train.steps or stop):
                self._check_finite(step, values)
                self.checkpointer.save(
                    step, self.state, data=loader.state(), metrics=validated, wait=stop or step == train.steps
                )
            if stop and step < train.steps:
                self._tell([f"stopped on request at step {step}; the same command goes on from there"])
                return runtime.REQUEUE
        if pending is not None:
            self._check_finite(*pending)
            self._report(*pending, clock, log, final=True)
        return 0

    def _validate_if_due(self, step: int, frozen: Tree, log: metrics.MetricsLog | None) -> dict[str, float] | None:
        train = self.cfg.train
        due = step == train.steps or (train.eval_every > 0 and step % train.eval_every == 0)
        if self.checkpointer is None or not due:
            return None
        values = self.validate(frozen)
        self._tell([f"step {step}  validation  " + _words(values)])
        if log is not None:
            log.write(step, {f"validation/{name}": value for name, value in values.items()})
        return {"nll": values["loss"]}

    def validate(self, frozen: Tree) -> dict[str, float]:
        """Returns the mean loss and metrics over the validation examples, each weighted by its tokens."""
        key = rngs.stream(self.cfg.seed, "validation")
        sums: dict[str, list[float]] = {}
        size = place.round_up(self.cfg.eval.batch, self.mesh)
        for batch in eval_batches(self._validation, batch=size, limit=self.cfg.eval.examples):
            placed = place.put_eval(_masked(batch), self.mesh)
            terms = self._loss(self.state["trainable"], frozen, placed, key)
            for name, pair in (terms.terms | {"loss": (terms.sum, terms.weight)}).items():
                total = sums.setdefault(name, [0.0, 0.0])
                total[0] += float(pair[0])
                total[1] += float(pair[1])
        return {name: total / weight for name, (total, weight) in sums.items()}

    @functools.cached_property
    def _validation(self) -> Encoded:
        return self.recipe.data("validation")

    @functools.cached_property
    def _loss(self) -> Callable[..., LossTerms]:
        return jax.jit(self.recipe.loss)

    def _report(
        self, step: int, values: Tree, clock: metrics.Clock, log: metrics.MetricsLog | None, *, final: bool = False
    ) -> None:
        train = self.cfg.train
        if not (final or step % train.log_every == 0):
            return
        found = {name: float(value) for name, value in values.items()}
        pace, left = clock.lap(step)
        rate = train.global_batch / pace if pace else 0.0
        self._tell(
            [
                f"step {step}/{train.steps}  {_words(found)}  {pace:.2f} s/step  {rate:.1f} samples/s  "
                f"left {metrics.duration(left)}"
            ]
        )
        if log is not None:
            row = {f"train/{name}": value for name, value in found.items()}
            row |= {"train/learning_rate": float(jnp.asarray(self.schedule(step - 1))), "train/seconds_per_step": pace}
            log.write(step, row | {"examples": step * train.global_batch})

    def _check_finite(self, step: int, values: Tree) -> None:
        loss = float(values["loss"])
        if not math.isfinite(loss):
            where = f"; the last good checkpoint in {self.workdir} is kept" if self.workdir else ""
            raise UserError(
                f"step {step}: train/loss is {loss}{where}. Lower optim.learning_rate={self.cfg.optim.learning_rate} "
                f"or optim.clip_norm={self.cfg.optim.clip_norm}, or raise optim.warmup_steps"
            )

    def _describe_batch(self) -> str:
        data = self.mesh.shape["data"]
        micro = self.cfg.train.global_batch // data // self.accumulation
        trainable = sum(leaf.size for leaf in jax.tree.leaves(self.state["trainable"]))
        return (
            f"global batch {self.cfg.train.global_batch} = {micro} a device x {data} data x {self.accumulation} "
            f"accumulated; {trainable:,} trainable parameters"
        )

    def _tell(self, lines: list[str]) -> None:
        if jax.process_index() == 0:
            for line in lines:
                print(line, flush=True)


def make_step(
    loss: Callable[..., Any], optimizer: optax.GradientTransformation, *, seed: int
) -> Callable[[State, Tree, Tree], tuple[State, dict[str, jax.Array]]]:
    """Returns the jitted optimizer step (state, frozen, batch [a b ...]) -> (state, metrics); the state is donated.

    Sums and weights are accumulated over the leading axis and divided once, so that a step is the same however the
    global batch is cut.
    """

    def objective(trainable: Tree, frozen: Tree, batch: Tree, rng: jax.Array):
        terms = loss(trainable, frozen, batch, rng)
        return terms.sum, terms

    def step(state: State, frozen: Tree, batch: Tree) -> tuple[State, dict[str, jax.Array]]:
        trainable = state["trainable"]
        rng = rngs.stream(seed, "loss", state["step"])

        gradients, terms = _accumulate(objective, trainable, frozen, batch, rng)
        gradients = jax.tree.map(lambda leaf: leaf / terms.weight, gradients)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], trainable)
        state = {
            "trainable": optax.apply_updates(trainable, updates),
            "opt_state": opt_state,
            "step": state["step"] + 1,
        }
        values = {name: total / weight for name, (total, weight) in terms.terms.items()}
        return state, {"loss": terms.sum / terms.weight, **values, "grad_norm": optax.tree.norm(gradients)}

    return jax.jit(step, donate_argnums=0)


def _accumulate(objective: Callable[..., Any], trainable: Tree, frozen: Tree, batch: Tree, rng: jax.Array):
    """Sums gradients and loss terms over the micro-batches."""
    gradient = jax.grad(objective, has_aux=True)

    def one(index: jax.Array, micro: Tree):
        return gradient(trainable, frozen, micro, jax.random.fold_in(rng, index))

    count = jax.tree.leaves(batch)[0].shape[0]
    first = one(jnp.zeros((), jnp.int32), jax.tree.map(lambda leaf: leaf[0], batch))
    if count == 1:
        return first

    def add(total: Tree, inputs: tuple[jax.Array, Tree]) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, total, one(*inputs)), None

    rest = jax.tree.map(lambda leaf: leaf[1:], batch)
    total, _ = jax.lax.scan(add, first, (jnp.arange(1, count, dtype=jnp.int32), rest))
    return total


def _masked(batch: Tree) -> Tree:
    """Drops the examples that only fill the last batch from every weight."""
    valid = batch["valid"]
    readers = {
        name: fields | {"weights": fields["weights"] * valid[:, None]} for name, fields in batch["readers"].items()
    }
    return {"source": batch["source"], "readers": readers, "index": batch["index"]}


def _words(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())
