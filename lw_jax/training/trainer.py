"""The trainer: one jitted step and one loop for every recipe. It never asks which recipe it runs."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lw_jax.core import runtime
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.data.data_schedule import Course, widths_of
from lw_jax.data.loader import Loader
from lw_jax.training import metrics, micro_batch_search, optimizers, preflight, validation_room
from lw_jax.training.checkpoint import Checkpointer
from lw_jax.training.device_monitor import Devices, Sampler
from lw_jax.training.held_out import HeldOut
from lw_jax.training.program import Program
from lw_jax.training.progress import Live
from lw_jax.training.recipe import Plannable, Recipe, Watched, unit_of
from lw_jax.training.train_step import State
from sharding import place

_REMEDY = (
    "The checkpoint is kept. To go on all the same: --config.train.alarm=warn, or a later train.alarm_step; to mend "
    "it: a lower optim.learning_rate, adapter.start='aligned', stages.pretrain.share, more examples"
)


class Run:
    """One training run; without a checkpointer and a workdir nothing is written."""

    def __init__(self, cfg: Config, recipe: Recipe, checkpointer: Checkpointer | None, workdir: Path | None):
        self.cfg, self.recipe, self.checkpointer, self.workdir = cfg, recipe, checkpointer, workdir
        self.placement = recipe.placement
        self.program = Program(cfg, recipe)
        self.accumulation = self.program.accumulation(cfg.train.micro_batch)
        self.schedule = optimizers.schedule(cfg.optim, self.program.stretches)
        self.state: State = {}
        self._pending: tuple[int, Tree] | None = None  # a step's values that are not read yet
        self._prepared: tuple[Loader, int, Tree] | None = None
        self._saved: int | None = None  # the newest checkpoint
        self._owed = False  # the restored checkpoint's validation was not finished
        self.held_out = HeldOut(self.program, tell=lambda line: self._tell([line]))
        self.live = Live(cfg.train.steps, enabled=jax.process_index() == 0)
        self.logs: list[metrics.MetricsLog | metrics.TensorBoard] = []
        used = {device for mesh in self.placement.meshes for device in mesh.local_devices}
        number = f"-{jax.process_index()}" if jax.process_index() else ""
        self.sampler = Sampler(
            Devices(sorted(used, key=lambda device: device.id), lambda line: self._tell([line])),
            path=workdir / f"devices{number}.jsonl" if workdir else None,
        )

    def prepare(self) -> None:
        """Opens the data, fits the micro-batch, and builds or restores the state."""
        course = self.recipe.course()
        self._tell(course.describe())
        loader = Loader(
            course,
            global_batch=self.cfg.train.global_batch,
            seed=self.cfg.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        self._fit(course)
        self._start = loader.state()
        first, frozen = self._restore_or_build(loader)
        self._tell([self._describe_batch()])
        self._prepared = loader, first, frozen

    def train(self, stop_requested: Callable[[int], bool]) -> int:
        """Runs the loop, after `prepare` where that was not called; returns 0 or `runtime.REQUEUE`."""
        if self._prepared is None:
            self.prepare()
        assert self._prepared is not None
        loader, first, frozen = self._prepared
        self._prepared = None  # or a second copy of the frozen weights would be held after a restart
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.sampler)
            view = Live(self.cfg.train.steps, first, enabled=jax.process_index() == 0, devices=self.sampler.describe)
            self.live = stack.enter_context(view)
            code = self._attempt(frozen, loader, first, stop_requested)
        self._tell(self.sampler.summary())
        return code

    def _attempt(self, frozen: Tree, loader: Loader, first: int, stop_requested: Callable[[int], bool]) -> int:
        """Runs the loop, again with half the micro-batch each time that memory runs out."""
        while True:
            try:
                with self._open_logs(first):
                    return self._loop(frozen, loader, first, stop_requested)
            except micro_batch_search.OutOfMemory as error:
                self._tell([self._halve(error)])
                reached = self._step_held()
                if reached is None:
                    first, frozen = self._restore_or_build(loader, frozen)
                else:
                    first = reached
                    loader.restore(self._before)

    @contextlib.contextmanager
    def _open_logs(self, first: int) -> Iterator[None]:
        """Opens the run's logs without what they hold beyond the step taken up; the first process alone has some."""
        self.logs = []
        if self.workdir is None or jax.process_index() != 0:
            yield
            return
        log = metrics.MetricsLog(self.workdir / "metrics.jsonl", resumed_step=first, revalidate=self._owed)
        with metrics.TensorBoard(self.workdir / "tensorboard", resumed_step=first) as board:
            self.logs = [log, board]
            yield

    def _log(self, step: int, values: dict[str, float]) -> None:
        for log in self.logs:
            log.write(step, values)

    def _step_held(self) -> int | None:
        """Returns the step of the state in memory; None where the failed program has taken the state with it."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
            return None
        try:
            return int(self.state["step"])
        except jax.errors.JaxRuntimeError:  # an output of the failed program, which raises its error when it is read
            return None

    def _fit(self, course: Course) -> None:
        """Takes the largest micro-batch that fits, where the configuration leaves it open and the memory is known."""
        room = micro_batch_search.room(self.cfg)
        if room is None:
            return
        self._check_validation(room)
        if self.cfg.train.micro_batch:
            return
        # One for the whole run: the least of what its batches' shapes allow.
        found = [
            micro_batch_search.largest_micro_batch(self.program, widths_of(batch), room) for batch in course.shapes()
        ]
        needs = max(found, key=lambda one: (one.accumulation, one.peak))
        if needs.peak > room.limit:
            raise UserError(micro_batch_search.refusal(self.program, needs, room))
        self.accumulation = needs.accumulation
        self._tell(micro_batch_search.describe(self.program, needs, room))

    def _check_validation(self, room: micro_batch_search.Room) -> None:
        """Says before the first step when validation would not fit at eval.batch, by arithmetic."""
        if self.checkpointer is None or not isinstance(self.recipe, Plannable):  # such a run does not validate
            return
        found = validation_room.validation(self.program, self.recipe, self.recipe.batch_widths(), room)
        if not found.fits:
            self._tell([f"{validation_room.describe(found, room)}; the run halves it where memory runs out"])

    def _halve(self, error: micro_batch_search.OutOfMemory) -> str:
        micro = self.micro_batch
        if micro % 2 or jax.process_count() > 1:
            why = "it cannot be halved" if jax.process_count() == 1 else "processes cannot agree on another one by now"
            raise UserError(
                f"out of memory with a micro-batch of {micro} a device, and {why}: {error}. Set "
                f"--config.train.micro_batch to less, --config.compute.remat=full, or split the readers "
                "(--config.mesh.placement=tensor)"
            ) from error
        self.accumulation *= 2
        return (
            f"out of memory with a micro-batch of {micro} a device: goes on with {self.micro_batch} and "
            f"{self.accumulation} accumulated; the mathematics stays the same"
        )

    @property
    def micro_batch(self) -> int:
        """Returns how many examples one device holds at once."""
        return self.cfg.train.global_batch // self.placement.data // self.accumulation

    def _restore_or_build(self, loader: Loader, frozen: Tree | None = None) -> tuple[int, Tree]:
        """Takes up the last checkpoint or starts anew; returns the step and the frozen weights."""
        restored = self.checkpointer.restore(self.program.state()) if self.checkpointer else None
        if restored is not None:
            self._tell([f"goes on from step {restored.step}"])
            self.state, self._saved = restored.state, restored.step
            self._owed = self._is_validated(restored.step) and not restored.metrics
            loader.restore(restored.data)
            return restored.step, self.recipe.load_frozen() if frozen is None else frozen
        weights = self.recipe.build(frozen)
        replicated = NamedSharding(self.placement.learner, P())
        placed = jax.tree.map(lambda leaf: leaf.sharding, self.program.state()["opt_state"])
        opt_state = jax.jit(self.program.optimizer.init, out_shardings=placed)(weights.trainable)
        step = jax.device_put(jnp.zeros((), jnp.int32), replicated)
        self.state = {"trainable": weights.trainable, "opt_state": opt_state, "step": step}
        loader.restore(self._start)
        self._owed = False
        return 0, weights.frozen

    def _loop(
        self,
        frozen: Tree,
        loader: Loader,
        first: int,
        stop_requested: Callable[[int], bool],
    ) -> int:
        train = self.cfg.train
        clock = metrics.Clock(first, train.steps)
        self._pending = None
        owed, self._owed = self._owed, False
        if owed and not self._validate(first, frozen, clock, stop_requested):
            return runtime.REQUEUE
        put = functools.partial(place.put_batch, accumulation=self.accumulation)
        for step in range(first + 1, train.steps + 1):
            self._before = loader.state()
            try:
                with micro_batch_search.out_of_memory():
                    batch = place.put_parts(next(loader), self.placement, put)
                    self.state, values = self.program.step(self.state, frozen, batch)
                    if step == first + 1:
                        jax.block_until_ready(values)
                        self._tell([f"first step, compiled and run, in {metrics.duration(clock.compiled(step))}"])
                        self.sampler.restart()
                    self._report_pending(clock)
            except micro_batch_search.OutOfMemory:
                with micro_batch_search.out_of_memory():
                    self._report_pending(clock)  # the step before this one was taken
                raise
            self._pending = (step, values)
            self.live.advance(step)
            stop = stop_requested(step)
            validated = self._is_validated(step)
            if self.checkpointer and (validated or step % train.checkpoint_every == 0 or stop):
                with (
                    micro_batch_search.out_of_memory()
                ):  # logged before it is saved, so that a kill in between leaves no gap
                    self._report_pending(clock, final=step == train.steps)
                with clock.paused() if validated else contextlib.nullcontext():
                    self.checkpointer.save(step, self.state, data=loader.state(), wait=stop or validated)
                self._saved = step
            if stop and (validated or step < train.steps):
                # Without a validation, which could outlast the time left before the kill: the next start makes it up.
                self._tell([f"stopped on request at step {step}; the same command goes on from there"])
                return runtime.REQUEUE
            if validated and not self._validate(step, frozen, clock, stop_requested):
                return runtime.REQUEUE
        with micro_batch_search.out_of_memory():
            self._report_pending(clock, final=True)
        return 0

    def _is_validated(self, step: int) -> bool:
        """Says whether a step is saved, then validated, whatever `train.checkpoint_every` says."""
        train = self.cfg.train
        due = step in (train.steps, preflight.alarm_step(train)) or (train.eval_every and step % train.eval_every == 0)
        return self.checkpointer is not None and bool(due)

    def _validate(self, step: int, frozen: Tree, clock: metrics.Clock, stop_requested: Callable[[int], bool]) -> bool:
        """Gives the checkpoint of a step its score; says False where it was stopped on request.

        The score comes last: a checkpoint without one is validated again when it is restored.

        Raises:
          UserError: the run has collapsed and `train.alarm` is "stop".
        """
        assert self.checkpointer is not None, "only what is saved is validated"
        try:
            with clock.paused():
                values = self.held_out.measure(self.state["trainable"], frozen, lambda: stop_requested(step))
        except micro_batch_search.OutOfMemory as error:
            lost = "the checkpoint has no score, and no collapse can be seen"
            self._tell([f"step {step}: not validated: {error}; {lost}. Shorten what is held out, or split the readers"])
            return True
        if values is None:
            self._tell([f"stopped on request in the validation of step {step}; the same command goes on from there"])
            return False
        self._tell([f"step {step}  validation  {self.held_out.describe(values)}"])
        self._log(step, {f"validation/{name}": value for name, value in values.items()})
        collapse = self._collapse(step, values)
        if collapse and self.cfg.train.alarm == "stop":
            raise UserError(f"{collapse}. {_REMEDY}")
        if values:
            self.checkpointer.add_score(step, values["loss"])
        return True

    def _collapse(self, step: int, validated: dict[str, float]) -> str:
        """Returns what is wrong with a run that is worth nothing, from the step on at which that can be said."""
        alarm = preflight.alarm_step(self.cfg.train)
        if not alarm or step < alarm or not isinstance(self.recipe, Watched):
            return ""
        found = self.recipe.collapse(step, validated)
        if found:
            self._tell([found])
        return found

    def _report_pending(self, clock: metrics.Clock, *, final: bool = False) -> None:
        """Reports the last step's values, a step late, so that the devices never wait for the host."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._check_finite(*pending)
            self._report(*pending, clock, final=final)

    def _report(self, step: int, values: Tree, clock: metrics.Clock, *, final: bool = False) -> None:
        train = self.cfg.train
        if not (final or step % train.log_every == 0):
            return
        found = {name: float(value) for name, value in values.items()}
        unit, each = unit_of(self.recipe)
        pace, left = clock.lap(step)
        fields = {name: f"{name} {value:.4g}" for name, value in found.items()}
        row = {f"train/{name}": value for name, value in found.items()}
        row |= {"train/learning_rate": float(jnp.asarray(self.schedule(step - 1)))}
        if math.isnan(pace):  # no step has passed since the one that compiled
            fields |= {"pace": "- s/step", "rate": f"- {unit}/s"}
        else:
            rate = train.global_batch / pace
            fields |= {"pace": f"{pace:.2f} s/step", "rate": f"{rate * each:,.1f} {unit}/s"}
            row |= {
                "train/seconds_per_step": pace,
                "train/samples_per_second": rate,
                f"train/{unit}_per_second": rate * each,
            }
        self.live.update(step, fields, left)
        self._log(step, row | {"examples": step * train.global_batch, **self.sampler.scalars()})

    def _check_finite(self, step: int, values: Tree) -> None:
        """Raises UserError where the step's loss, or its gradient and so the weights after it, is no number."""
        wrong = {name: float(values[name]) for name in ("loss", "grad_norm") if not math.isfinite(float(values[name]))}
        if not wrong:
            return
        told = ", ".join(f"train/{name} is {value}" for name, value in wrong.items())
        others = [name for name in values if name not in wrong and not math.isfinite(float(values[name]))]
        told = f"step {step}: {told}" + (f" (so is {', '.join(others)})" if others else "")
        optim = self.cfg.optim
        if step == 1 and "loss" in wrong:
            raise UserError(
                f"{told}, before any weight has moved: a weight, an example or compute.dtype="
                f"{self.cfg.compute.dtype} makes it so; load other weights, or set --config.compute.dtype=fp32"
            )
        kept = "no checkpoint was saved yet" if self._saved is None else f"checkpoint {self._saved} is kept"
        raise UserError(
            f"{told}; {kept}. Lower optim.learning_rate={optim.learning_rate} or optim.clip_norm={optim.clip_norm}, "
            "or raise optim.warmup_steps"
        )

    def _describe_batch(self) -> str:
        trainable = sum(leaf.size for leaf in jax.tree.leaves(self.state["trainable"]))
        return (
            f"global batch {self.cfg.train.global_batch} = {self.micro_batch} a device x {self.placement.data} data x "
            f"{self.accumulation} accumulated; {trainable:,} trainable parameters"
        )

    def _tell(self, lines: list[str]) -> None:
        for line in lines:
            self.live.tell(line)
