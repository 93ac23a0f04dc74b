"""Progress lines, metrics and device readings of one run."""

import collections
import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from lw_jax.core.progress import Live, duration, phase
from lw_jax.core.types import Tree
from lw_jax.training import metrics, optimizers, sinks
from lw_jax.training.device_monitor import Devices, Sampler
from lw_jax.training.step_spec import StepSpec


class Reporter:
    """Reports a run to people and to the files of its workdir; of several processes the first one alone."""

    def __init__(self, step_spec: StepSpec, workdir: Path | None, services: sinks.Services | None, *, quiet: bool):
        cfg, recipe = step_spec.cfg, step_spec.recipe
        self._train, self._recipe, self._workdir, self._services = cfg.train, recipe, workdir, services
        self._is_first_process = jax.process_index() == 0
        self._shows = self._is_first_process and not quiet
        self._schedule = optimizers.schedule(cfg.optim, step_spec.phases)
        self._live = Live(cfg.train.steps, enabled=self._shows)
        self._logs: list[metrics.MetricsLog | sinks.TensorBoard] = []
        self.clock = metrics.Clock(0, cfg.train.steps)
        self.last: dict[str, float] = {}  # metrics that were reported
        self._steps: list[tuple[int, dict[str, float]]] = []  # metrics of the steps since then
        used = {device for mesh in recipe.placement.meshes for device in mesh.local_devices}
        suffix = "" if self._is_first_process else f"-{jax.process_index()}"
        self._sampler = Sampler(
            Devices(sorted(used, key=lambda device: device.id), self.say),
            path=workdir / f"devices{suffix}.jsonl" if workdir else None,
            report=self.say,
        )

    def say(self, *lines: str) -> None:
        for line in lines:
            self._live.show_line(line)

    @contextlib.contextmanager
    def live(self, first: int) -> Iterator[None]:
        view = Live(self._train.steps, first, enabled=self._shows, devices=self._sampler.describe)
        with self._sampler, view as self._live:
            yield

    @contextlib.contextmanager
    def open_logs(self, first: int, *, revalidate: bool) -> Iterator[None]:
        """Opens the metrics logs without rows beyond step `first` and restarts the clock."""
        self._logs, self.clock = [], metrics.Clock(first, self._train.steps)
        self._steps = [(step, values) for step, values in self._steps if step <= first]  # others are taken again
        folder = self._workdir if self._is_first_process else None
        with contextlib.ExitStack() as stack:
            if folder:
                file = folder / "metrics.jsonl"
                self._logs = [metrics.MetricsLog(file, resumed_step=first, revalidate=revalidate)]
            if folder and "tensorboard" in self._train.log_to:
                board = sinks.TensorBoard(folder / "tensorboard", resumed_step=first)
                self._logs.append(stack.enter_context(board))
            yield

    def log(self, step: int, values: dict[str, float]) -> None:
        for log in tuple(self._logs):
            try:
                log.write(step, values)
            except sinks.Failed as error:
                self._logs.remove(log)
                self.say(sinks.describe("tensorboard", error))
        if self._services is not None:
            self.say(*self._services.write(step, values))

    @contextlib.contextmanager
    def compiling(self, step: int) -> Iterator[None]:
        with phase("compiling the training step", ends=False):
            yield
        self.say(f"first step, compiled and run, in {duration(self.clock.compiled(step))}")
        self._sampler.restart()

    def advance(self, step: int) -> None:
        self._live.advance(step)

    def report(self, step: int, values: Tree, *, flush: bool = False) -> None:
        """Takes each step's values; at a step that is logged, reports their means since the last one that was.

        `flush` logs the step whatever `train.log_every` is.

        A single step would show some tasks or lengths alone: those of a mixture come in a fixed order.
        """
        self._steps.append((step, {name: float(value) for name, value in values.items()}))
        if not (flush or step % self._train.log_every == 0):
            return
        columns: dict[str, list[float]] = collections.defaultdict(list)
        for _, metrics_of_step in self._steps:
            for name, value in metrics_of_step.items():
                columns[name].append(value)
        scalars = self.last = {name: sum(column) / len(column) for name, column in columns.items()}
        self._steps = []
        unit, per_example = self._recipe.unit
        pace, left = self.clock.lap(step)
        fields = {name: f"{name} {value:.4g}" for name, value in scalars.items()}
        row = {f"train/{name}": value for name, value in scalars.items()}
        row |= {"train/learning_rate": float(jnp.asarray(self._schedule(step - 1)))}
        if math.isnan(pace):  # no step has passed since the one that compiled
            fields |= {"pace": "- s/step", "rate": f"- {unit}/s"}
        else:
            rate = self._train.global_batch / pace
            fields |= {"pace": f"{pace:.2f} s/step", "rate": f"{rate * per_example:,.1f} {unit}/s"}
            row |= {
                "train/seconds_per_step": pace,
                "train/samples_per_second": rate,
                f"train/{unit}_per_second": rate * per_example,
            }
        self._live.update(step, list(fields.values()), left)
        self.log(step, row | {"examples": step * self._train.global_batch, **self._sampler.scalars()})
