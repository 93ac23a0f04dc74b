"""Stands in for the compiler where a test is about what is asked of it: every answer is arithmetic times a factor."""

import dataclasses
from typing import Any

import pytest

from lw_jax.core.types import Tree
from lw_jax.planning import estimate, planner
from lw_jax.training import micro_batch_search
from lw_jax.training.memory import StepMemory
from lw_jax.training.step_spec import StepSpec


class Measure:
    """Takes the place of `memory.measure`; `factors` by recomputation scale what arithmetic says is at work."""

    def __init__(self, **factors: float):
        self.factors = factors
        self.asked: list[tuple[str, str, int]] = []  # strategy, recomputation, micro-batch

    def __call__(self, program: StepSpec, widths: Tree, accumulation: int, **_: Any) -> StepMemory:
        remat, micro = program.cfg.compute.remat, program.cut(accumulation).micro_batch
        self.asked.append((program.placement.strategy, remat, micro))
        guess = estimate.estimate(program, widths, micro, None).needs
        activations = int(guess.activations * self.factors.get(remat, 1.0))
        held = guess.peak - guess.activations
        return dataclasses.replace(guess, activations=activations, by_mesh=(held + activations,))


def replace_compiler(monkeypatch: pytest.MonkeyPatch, **factors: float) -> Measure:
    """Puts a `Measure` in the compiler's place and returns it."""
    standin = Measure(**factors)
    monkeypatch.setattr(micro_batch_search.memory, "measure", standin)
    arithmetic = planner.evaluation_memory
    monkeypatch.setattr(planner, "evaluation_memory", lambda program, room, compile: arithmetic(program, room, None))
    return standin
