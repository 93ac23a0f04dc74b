"""Training loop: one jitted step and one loop for every recipe, which it never asks for by name."""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from lw_jax.core import processes, runtime, tree
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.progress import phase
from lw_jax.core.types import Tree
from lw_jax.data.data_schedule import DataSchedule
from lw_jax.data.loader import Loader
from lw_jax.training import (
    evaluation_memory,
    memory_limit,
    micro_batch_search,
    optimizers,
    out_of_memory,
    preflight,
)
from lw_jax.training.checkpoint import Checkpointer
from lw_jax.training.memory_limit import MemoryLimit
from lw_jax.training.out_of_memory import OutOfMemory
from lw_jax.training.recipe import Recipe
from lw_jax.training.reporter import Reporter
from lw_jax.training.sinks import Services
from lw_jax.training.step_spec import StepSpec
from lw_jax.training.train_step import State
from lw_jax.training.validation_loop import ValidationLoop
from sharding import place

StopRequested = Callable[[int], bool]
REMEDY = (  # of a collapse
    "The checkpoint is kept. To continue anyway: --config.train.alarm=warn, or --config.train.alarm_step=0. To repair: "
    "a lower optim.learning_rate, adapter.start='aligned', stages.pretrain.share, more examples"
)


class Run:
    """One training run; without a checkpointer and a workdir nothing is written, and `quiet` nothing is printed."""

    _loader: Loader  # made by `prepare`
    _start: Tree  # its state at step 0
    _before: Tree  # its state before the last step, which may have to be taken again

    def __init__(
        self,
        cfg: Config,
        recipe: Recipe,
        checkpointer: Checkpointer | None,
        workdir: Path | None,
        services: Services | None = None,
        *,
        quiet: bool = False,
    ):
        self.cfg, self.recipe, self.checkpointer, self.placement = cfg, recipe, checkpointer, recipe.placement
        self.step_spec = StepSpec(cfg, recipe)
        self.accumulation = self.step_spec.accumulation(cfg.train.micro_batch)
        self.state: State = {}
        self.reporter = Reporter(self.step_spec, workdir, services, quiet=quiet)
        self.validation_loop = ValidationLoop(self.step_spec, say=self.reporter.say)
        self.first_step = 0  # behind which a prepared run begins
        self._is_prepared = False
        self._frozen: Tree = None
        self._revalidate = False  # the restored checkpoint's validation was not finished
        self._pending: tuple[int, Tree] | None = None  # a step and its values, not read yet
        self._saved: int | None = None  # the newest checkpoint
        self._compiled = set[str]()  # shapes of the batches that were trained on

    @property
    def micro_batch(self) -> int:
        return self.step_spec.cut(self.accumulation).micro_batch

    def prepare(self) -> None:
        with phase("reading and tokenising the data"):
            data_schedule = self.recipe.data_schedule()
        self.reporter.say(*data_schedule.describe())
        if self.checkpointer is not None:  # else it does not validate
            self.reporter.say(*self.validation_loop.describe_data())
        batch, seed = self.cfg.train.global_batch, self.cfg.seed
        self._loader = Loader(data_schedule, global_batch=batch, seed=seed, share=processes.share())
        self._choose_micro_batch(data_schedule)
        self._start = self._loader.state()
        self._restore_or_initialise()
        self.reporter.say(self._describe_batch())
        self._is_prepared = True

    def _choose_micro_batch(self, data_schedule: DataSchedule) -> None:
        """Takes the largest micro-batch that fits, unless it is configured or the memory limit is unknown."""
        limit = memory_limit.local(self.cfg)
        if limit is None:
            return
        self._fit_validation(limit)
        if self.cfg.train.micro_batch:
            return
        shapes = data_schedule.shapes()
        with phase("searching for the largest micro-batch that fits"):
            memories = [micro_batch_search.largest_micro_batch(self.step_spec, widths, limit) for widths in shapes]
        least = max(memories, key=lambda memory: (memory.accumulation, memory.peak))  # one micro-batch for all shapes
        if least.peak > limit.usable:
            raise UserError(micro_batch_search.refusal(self.step_spec, least, limit))
        self.accumulation = least.accumulation
        self.reporter.say(micro_batch_search.describe(least, limit))

    def _fit_validation(self, limit: MemoryLimit) -> None:
        if self.checkpointer is None:  # such a run does not validate
            return
        needs = evaluation_memory.of(evaluation_memory.validation(self.step_spec), limit)
        if self.validation_loop.batch.fit(needs.largest) or not needs.largest:
            taken = "takes it" if needs.largest else "tries that"
            self.reporter.say(f"{needs.description}; the run {taken}; the metrics stay the same")

    def _restore_or_initialise(self) -> None:
        """Restores the last checkpoint, or initialises the state and the data position.

        Raises:
          UserError: weights and state alone do not fit.
        """
        self.state = {}  # or what a failed step left of it would be in memory beside the new one
        try:
            with out_of_memory.detect():
                self._load()
        except OutOfMemory as error:
            raise UserError(
                f"out of memory while weights and training state are loaded, whatever the micro-batch: {error}. End "
                "other programs on the device, store the readers packed (--config.llms.NAME.weights=nf4), or split "
                "them (--config.mesh.placement=tensor)"
            ) from error

    def _load(self) -> None:
        with phase("looking for a checkpoint, and restoring it"):
            restored = self.checkpointer.restore(self.step_spec.state) if self.checkpointer else None
        if restored is None:
            self._initialise()
            self._loader.restore(self._start)
            self.first_step, self._revalidate = 0, False
            return
        self.reporter.say(f"resuming from step {restored.step}")
        self.state, self._saved = restored.state, restored.step
        self._loader.restore(restored.data)
        self.first_step = restored.step
        self._revalidate = self._is_validated(restored.step) and not restored.metrics
        if self._frozen is None and (self._revalidate or restored.step < self.cfg.train.steps):
            self._frozen = self.recipe.load_frozen()

    def _initialise(self) -> None:
        weights = self.recipe.build(self._frozen)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.step_spec.state["opt_state"])
        opt_state = jax.jit(self.step_spec.optimizer.init, out_shardings=shardings)(weights.trainable)
        step = place.replicate(jnp.zeros((), jnp.int32), self.placement.learner)
        self.state = {"trainable": weights.trainable, "opt_state": opt_state, "step": step}
        self._frozen = weights.frozen

    def _describe_batch(self) -> str:
        trainable = tree.count(optimizers.learned(self.recipe.rates, self.recipe.abstract.trainable))
        cut = self.step_spec.cut(self.accumulation)
        padding = cut.describe(micro_batch=bool(self.cfg.train.micro_batch))
        less = f" - {cut.filling} padding rows" if padding else ""
        return (
            f"global batch {cut.global_batch} = {cut.micro_batch} per device x {cut.data_axis} data-parallel x "
            f"{cut.accumulation} accumulated{less}; {trainable:,} trainable parameters; {self.cfg.train.steps:,} steps"
            f"{f'; {padding}' if padding else ''}"
        )

    def train(self, stop_requested: StopRequested, *, halved: Callable[[int, int], None] | None = None) -> int:
        """Trains to the last step, after `prepare` unless that was called; returns 0 or `runtime.REQUEUE`.

        `halved` is called with the step behind which a run goes on and its micro-batch, where that was halved.
        """
        if not self._is_prepared:
            self.prepare()
        self._is_prepared = False
        with self.reporter.live(self.first_step):
            while True:
                try:
                    with self.reporter.open_logs(self.first_step, revalidate=self._revalidate):
                        return self._loop(stop_requested)
                except OutOfMemory as error:
                    self._halve(error)
                self._rewind()  # here the error is gone, and with its traceback the arrays of the failed step
                if halved:  # by one process alone
                    halved(self.first_step, self.micro_batch)

    def _loop(self, stop_requested: StopRequested) -> int:
        self._pending = None
        revalidate, self._revalidate = self._revalidate, False
        if revalidate and not self._validate(self.first_step, stop_requested):
            return runtime.REQUEUE
        for step in range(self.first_step + 1, self.cfg.train.steps + 1):
            self._pending = step, self._step(step)
            self.reporter.advance(step)
            stop, validate = stop_requested(step), self._is_validated(step)
            if self.checkpointer and (stop or validate or step % self.cfg.train.checkpoint_every == 0):
                self._save(step, wait=stop or validate)
            if stop and (validate or step < self.cfg.train.steps):
                # Without a validation, which could outlast the time left before the kill: the next start makes it up.
                self.reporter.say(f"stopped on request at step {step}; run the same command to resume")
                return runtime.REQUEUE
            if validate and not self._validate(step, stop_requested):
                return runtime.REQUEUE
        with out_of_memory.detect():
            self._report_pending(flush=True)
        return 0

    def _step(self, step: int) -> Tree:
        """Takes a step, reports the one before it, and returns the values of this one, not yet computed."""
        self._before, first = self._loader.state(), step == self.first_step + 1
        try:
            with out_of_memory.detect():
                batch = self.step_spec.put(next(self._loader), self.accumulation)
                with self._timing(step, batch, first=first):
                    self.state, values = self.step_spec.step(self.state, self._frozen, batch)
                    if first:
                        jax.block_until_ready(values)
                self._report_pending()
        except OutOfMemory:
            with out_of_memory.detect():
                self._report_pending()  # the step before this one was taken
            raise
        return values

    def _timing(self, step: int, batch: Tree, *, first: bool) -> contextlib.AbstractContextManager[None]:
        """Returns the context of a call of the step: the clock stops where it is compiled for a batch's shapes."""
        shapes = str(jax.tree.map(jnp.shape, batch))
        is_new = shapes not in self._compiled
        self._compiled.add(shapes)
        if first:
            return self.reporter.compiling(step)
        if not is_new:
            return contextlib.nullcontext()
        jax.block_until_ready(self.state)
        return self.reporter.clock.paused()

    def _report_pending(self, *, flush: bool = False) -> None:
        """Reports the last step's values, a step late, so that the devices never wait for the host."""
        pending, self._pending = self._pending, None
        if pending is not None:
            _check_finite(*pending, self.cfg, saved=self._saved)
            self.reporter.report(*pending, flush=flush)

    def _save(self, step: int, *, wait: bool) -> None:
        """Saves a checkpoint; the step is logged first: neither a kill in between nor a resumed run leaves a gap.

        Raises:
          UserError: the state cannot be copied from the devices.
        """
        assert self.checkpointer is not None
        with out_of_memory.detect():
            self._report_pending(flush=True)
        with self.reporter.clock.paused() if self._is_validated(step) else contextlib.nullcontext():
            try:
                with phase(f"saving checkpoint {step}"), out_of_memory.detect():
                    self.checkpointer.save(step, self.state, data=self._loader.state(), wait=wait)
            except OutOfMemory as error:  # a smaller micro-batch would not make the state smaller
                raise UserError(
                    f"out of memory while checkpoint {step} is copied from the devices: {error}; "
                    f"{_describe_kept(self._saved)}. End other programs on the device, lower "
                    "--config.train.micro_batch, or split the readers (--config.mesh.placement=tensor)"
                ) from error
        self._saved = step

    def _is_validated(self, step: int) -> bool:
        return self.checkpointer is not None and preflight.is_validated(self.cfg.train, step)

    def _validate(self, step: int, stop_requested: StopRequested) -> bool:
        """Validates a step and scores its checkpoint; returns False where it was stopped on request.

        The score comes last: a checkpoint without one is validated again when it is restored.

        Raises:
          UserError: the run has collapsed and `train.alarm` is "stop".
        """
        assert self.checkpointer is not None, "only a saved step is validated"
        say = self.reporter.say
        try:
            with self.reporter.clock.paused():
                trainable, frozen = self.state["trainable"], self._frozen
                values = self.validation_loop.measure(trainable, frozen, lambda: stop_requested(step))
        except OutOfMemory as error:
            lost = "the checkpoint has no score and no collapse can be seen"
            say(f"step {step}: not validated: {error}; {lost}. Shorten the validation data, or split the readers")
            return True
        if values is None:
            say(f"stopped on request in the validation of step {step}; run the same command to resume")
            return False
        say(f"step {step}  validation  {self.validation_loop.describe(values)}")
        self.reporter.log(step, {f"validation/{name}": value for name, value in values.items()})
        alarm = preflight.alarm_step(self.cfg.train)
        if alarm and step >= alarm and (collapse := self.recipe.collapse(step, values)):
            say(collapse)
            if self.cfg.train.alarm == "stop":
                raise UserError(f"{collapse}. {REMEDY}")
        if values:
            self.checkpointer.add_score(step, values["loss"])
        return True

    def _halve(self, error: OutOfMemory) -> None:
        before, alone = self.micro_batch, jax.process_count() == 1
        if before == 1 or not alone:
            why = "it cannot be halved" if alone else "processes cannot agree on another one during a run"
            raise UserError(
                f"out of memory with a micro-batch of {before} per device, and {why}: {error}. Lower "
                f"--config.train.micro_batch, set --config.compute.remat=full, or split the readers "
                "(--config.mesh.placement=tensor)"
            ) from error
        self.accumulation = self.step_spec.accumulation(-(-before // 2))
        self.reporter.say(
            f"out of memory with a micro-batch of {before} per device: continuing with {self.micro_batch} and "
            f"{self.accumulation} accumulated; the gradients stay the same"
        )

    def _rewind(self) -> None:
        step = self._step_in_memory()
        if step is None:
            self._restore_or_initialise()
        else:
            self.first_step = step
            self._loader.restore(self._before)

    def _step_in_memory(self) -> int | None:
        """Returns the step of the state; None where the failed program has consumed its donated buffers."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
            return None
        try:
            return int(self.state["step"])
        except jax.errors.JaxRuntimeError:  # an output of the failed program raises its error when it is read
            return None


def _check_finite(step: int, values: Tree, cfg: Config, *, saved: int | None) -> None:
    """Raises UserError for a non-finite loss or gradient norm; `saved` is the newest checkpoint."""
    metrics = {name: float(value) for name, value in values.items()}
    wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
    fatal = [name for name in ("loss", "grad_norm") if name in wrong]
    if not fatal:
        return
    line = f"step {step}: " + ", ".join(f"train/{name} is {metrics[name]}" for name in fatal)
    if others := [name for name in wrong if name not in fatal]:
        line += f" (so is {', '.join(others)})"
    if step == 1 and "loss" in fatal:
        raise UserError(
            f"{line}, before the first update: caused by a weight, an example or compute.dtype={cfg.compute.dtype}; "
            "load other weights, or set --config.compute.dtype=fp32"
        )
    raise UserError(
        f"{line}; {_describe_kept(saved)}. Lower optim.learning_rate={cfg.optim.learning_rate} or "
        f"optim.clip_norm={cfg.optim.clip_norm}, or raise optim.warmup_steps"
    )


def _describe_kept(saved: int | None) -> str:
    return "no checkpoint was saved yet" if saved is None else f"checkpoint {saved} is kept"
