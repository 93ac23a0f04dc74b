"""A batch that does not fit is cut on the way, and neither the curve nor the log shows where."""

import re
import sys

import jax
import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.training import out_of_memory, trainer
from lw_jax.training.checkpoint import Checkpointer
from tests import tiny

pytestmark = pytest.mark.slow


HALVED = re.compile(r"out of memory with a micro-batch of (\d+)\D+(\d+)\D+(\d+)")  # before, after, accumulated
TAKEN_UP = re.compile(r"from step (\d+)$")
EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."


class Unread:
    """An output of a program that failed after its dispatch: nothing shows until it is read."""

    def is_deleted(self) -> bool:
        return False

    def __float__(self) -> float:
        raise jax.errors.JaxRuntimeError(EXHAUSTED)

    __int__ = block_until_ready = __float__


class Failing:
    """A step whose n-th calls fail, in one of the ways in which a device runs out of memory."""

    def __init__(self, step, calls: set[int], how: str, message: str = EXHAUSTED):
        self.step, self.calls, self.how, self.message = step, calls, how, message
        self.evaluate, self.lower = step.evaluate, step.lower
        self.count = 0

    def __call__(self, state, frozen, batch):
        self.count += 1
        if isinstance(state["step"], Unread):
            return state, {"loss": Unread()}
        if self.count not in self.calls:
            return self.step(state, frozen, batch)
        if self.how == "late":
            return state | {"step": Unread()}, {"loss": Unread()}
        if self.how == "after donation":
            for leaf in jax.tree.leaves(state):
                leaf.delete()
        raise jax.errors.JaxRuntimeError(self.message)


def train_with(recipe, folder, fail, *, checkpoints: bool = True) -> trainer.Run:
    """A whole run whose step is wrapped by `fail`."""
    folder.mkdir(exist_ok=True)
    with Checkpointer(folder / "checkpoints", keep=2, identity=recipe.identity()) as checkpointer:
        run = trainer.Run(recipe.cfg, recipe, checkpointer if checkpoints else None, folder)
        run.step_spec.step = fail(run.step_spec.step)
        assert run.train(lambda step: False) == 0
    return run


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """(exit code, losses, weights) of a TTT run that nothing disturbs; its step compiles in little time."""
    return tiny.unsaved_curve(tiny.make_ttt(text), tmp_path_factory.mktemp("alone") / "run")


CASES = {
    # how, which calls, lines printed: (micro-batch, the next one, accumulated), resumed from step
    "before anything ran, twice": ("before donation", {1, 2}, [(8, 4, 2), (4, 2, 4)], None),
    "micro-batches of three, the last one filled up": ("before donation", {6}, [(3, 2, 4)], None),
    "state lost, no checkpoint yet": ("after donation", {3}, [(8, 4, 2)], None),
    "state lost after a checkpoint": ("after donation", {5}, [(8, 4, 2)], 3),
    "reported late": ("late", {5}, [(8, 4, 2)], 3),
    "reported late, when it is saved": ("late", {3}, [(8, 4, 2)], None),
    "reported late, in the last step": ("late", {6}, [(8, 4, 2)], 3),
}


@pytest.mark.parametrize("name", CASES)
def test_half_the_micro_batch_continues_with_the_same_curve(name, text, alone, tmp_path, capsys):
    how, calls, halvings, taken_up = CASES[name]
    recipe = tiny.make_ttt(text, train__micro_batch=3 if halvings[0][0] == 3 else 0)
    run = train_with(recipe, tmp_path / "run", lambda step: Failing(step, calls, how))
    rows = tiny.logged_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["examples"] for row in rows] == [8, 16, 24, 32, 40, 48]
    tiny.assert_same_curve((0, [row["train/loss"] for row in rows], jax.device_get(run.state["trainable"])), alone)
    told = [line for line in capsys.readouterr().out.splitlines() if HALVED.search(line) or TAKEN_UP.search(line)]
    assert [tuple(map(int, HALVED.search(line).groups())) for line in told[: len(halvings)]] == halvings
    assert [int(TAKEN_UP.search(line)[1]) for line in told[len(halvings) :]] == ([taken_up] if taken_up else [])
    assert (run.micro_batch, run.accumulation) == halvings[-1][1:]
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"3", "6"}


def test_readers_apart_go_on_with_half_too(root, single, tmp_path):
    recipe = tiny.make_recipe(root, devices=2, strategy="split")
    run = train_with(recipe, tmp_path / "run", lambda step: Failing(step, {4}, "after donation"))
    np.testing.assert_allclose(tiny.logged_losses(tmp_path / "run"), single[1], rtol=tiny.LOSS)
    assert run.accumulation == 2


def test_checkpoint_that_does_not_fit_either_is_refused_in_one_line(text, tmp_path, monkeypatch):
    recipe, seen = tiny.make_ttt(text), []
    with Checkpointer(tmp_path, keep=2, identity=recipe.identity()) as checkpointer:
        run = trainer.Run(recipe.cfg, recipe, checkpointer, None)
        run.step_spec.step = Failing(run.step_spec.step, {5}, "after donation")
        run.prepare()

        def restore(*_, **__):
            seen.append((run.state, sys.exc_info()[0]))
            raise jax.errors.JaxRuntimeError(EXHAUSTED)

        monkeypatch.setattr(checkpointer, "restore", restore)
        with pytest.raises(UserError, match=r"out of memory while .*RESOURCE_EXHAUSTED.*config\.mesh\.placement"):
            run.train(lambda step: False)
    assert seen == [({}, None)], "the failed step's arrays are given up first"


def test_checkpoint_that_cannot_be_copied_from_the_device_is_refused_in_one_line(text, tmp_path, monkeypatch):
    def fail(path, **_):
        if path.name == "6":
            raise jax.errors.JaxRuntimeError(EXHAUSTED)
        return save(path, **_)

    recipe = tiny.make_ttt(text)
    with Checkpointer(tmp_path, keep=2, identity=recipe.identity()) as checkpointer:
        save = checkpointer._orbax.save
        monkeypatch.setattr(checkpointer._orbax, "save", lambda path, **kwargs: fail(path, **kwargs))
        rule = r"checkpoint 6 .*RESOURCE_EXHAUSTED.*checkpoint 3 is kept.*config\.mesh\.placement"
        with pytest.raises(UserError, match=rule):
            trainer.Run(recipe.cfg, recipe, checkpointer, None).train(lambda step: False)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_a_run_without_checkpoints_starts_over(text, alone, tmp_path):
    fail = lambda step: Failing(step, {4}, "after donation")  # noqa: E731
    train_with(tiny.make_ttt(text), tmp_path / "run", fail, checkpoints=False)
    np.testing.assert_allclose(tiny.logged_losses(tmp_path / "run"), alone[1], rtol=tiny.LOSS)


@pytest.mark.parametrize("batch", [4, 6])
def test_micro_batch_that_cannot_be_halved_ends_the_run_with_advice(batch, text, tmp_path):
    recipe = tiny.make_ttt(text, train__global_batch=batch)
    words = r"micro-batch of 1\b.*RESOURCE_EXHAUSTED.*train\.micro_batch.*compute\.remat=full"
    with pytest.raises(UserError, match=words):
        train_with(recipe, tmp_path / "run", lambda step: Failing(step, set(range(99)), "before donation"))


def test_several_processes_end_instead_of_disagreeing(text, monkeypatch):
    recipe = tiny.make_ttt(text)
    run = trainer.Run(recipe.cfg, recipe, None, None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="processes cannot agree"):
        run._halve(out_of_memory.OutOfMemory(EXHAUSTED))


def test_other_errors_of_the_runtime_pass(text, tmp_path):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: something else"):
        fail = lambda step: Failing(step, {2}, "before donation", "INTERNAL: something else")  # noqa: E731
        train_with(tiny.make_ttt(text), tmp_path / "run", fail)


def test_memory_that_holds_not_even_one_example_is_refused(root, tmp_path):
    recipe = tiny.make_recipe(root, mesh__memory_gb=0.001, train__global_batch=2)
    with pytest.raises(UserError, match=r"one example .* 80% of 1\.0 MB"):
        train_with(recipe, tmp_path / "run", lambda step: step)
