"""Validation comes after the save, fits itself into memory, and is made up where it is missing: it costs no step."""

import contextlib
import functools
import json
import signal
import types

import jax
import numpy as np
import pytest

from lw_jax.core import runtime
from lw_jax.core.errors import UserError
from lw_jax.training import trainer
from lw_jax.training.checkpoint import Checkpointer
from tests import tiny
from tests.invariant.test_out_of_memory import EXHAUSTED
from tests.tiny import untimed_rows

CHANGES = {"train__eval_every": 2, "train__checkpoint_every": 100, "eval__batch": 4}  # 10 examples: three batches
SAME = 1e-5  # relative, fp32: sums in another order
STEPS = {}  # (folder of the text, changes) -> the step, which is traced and compiled once for all runs alike


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """An undisturbed run: (code, its folder, its trainable tree)."""
    folder = tmp_path_factory.mktemp("whole")
    return run_in(folder, text), folder


class Wrapped:
    """A step whose validation can fail."""

    def __init__(self, step, evaluate):
        self.step, self.lower, self._evaluate = step, step.lower, evaluate

    def __call__(self, *args):
        return self.step(*args)

    def evaluate(self, trainable, frozen, batch, key):
        self._evaluate(len(batch["index"]))
        return self.step.evaluate(trainable, frozen, batch, key)


def run_in(folder, text, *, evaluate=lambda rows: None, stop=lambda step: False, **changes):
    """(exit code, trainable tree) of a run, or of what is left of one."""
    recipe = tiny.make_ttt(text, **CHANGES | changes)
    folder.mkdir(exist_ok=True)
    with Checkpointer(folder / "checkpoints", keep=2, identity=recipe.identity()) as checkpointer:
        run = trainer.Run(recipe.cfg, recipe, checkpointer, folder)
        step = STEPS.setdefault((text, *changes.items()), run.step_spec.step)
        run.step_spec.step = Wrapped(step, evaluate)
        code = run.train(stop)
    return code, jax.device_get(run.state["trainable"])


def scores_of(folder):
    """Checkpoint -> its validation loss, None where it has none."""
    records = {
        path.parent.name: json.loads(path.read_text())["record"] for path in folder.glob("checkpoints/*/record.json")
    }
    return {int(step): record["metrics"].get("nll") for step, record in records.items()}


def fail(message=EXHAUSTED):
    raise jax.errors.JaxRuntimeError(message)


def test_every_validated_state_is_saved_with_its_score_whatever_checkpoint_every_says(whole):
    (code, _), folder = whole
    logged = {row["step"]: row["validation/loss"] for row in untimed_rows(folder) if "validation/loss" in row}
    assert code == 0 and sorted(logged) == [2, 4, 6]
    scores = scores_of(folder)
    assert scores == {step: logged[step] for step in scores}
    assert {4, 6} <= scores.keys() and min(logged, key=logged.get) in scores


def test_validation_that_does_not_fit_is_halved_and_says_the_same(whole, text, tmp_path, capsys):
    evaluate = lambda rows: fail() if rows > 2 else None  # noqa: E731
    code, trainable = run_in(tmp_path / "run", text, evaluate=evaluate)
    assert code == 0
    jax.tree.map(np.testing.assert_array_equal, trainable, whole[0][1])
    for ours, theirs in zip(untimed_rows(tmp_path / "run"), untimed_rows(whole[1]), strict=True):
        assert ours.keys() == theirs.keys()
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=SAME)
    assert capsys.readouterr().out.count("eval.batch") == 1, "told once, and kept for the next validation"


def test_validation_that_never_fits_costs_no_step(text, tmp_path, capsys):
    code, _ = run_in(tmp_path / "run", text, evaluate=lambda rows: fail())
    assert code == 0
    assert max(scores_of(tmp_path / "run")) == 6 and not any(scores_of(tmp_path / "run").values())
    assert "step 6: not validated: out of memory" in capsys.readouterr().out


@pytest.mark.parametrize("at", [4, 6])
def test_fault_in_validation_leaves_the_checkpoint_and_the_next_start_makes_it_up(whole, text, tmp_path, at):
    calls = iter(range(100))
    evaluate = lambda rows: fail("INTERNAL: a fault") if next(calls) == (at // 2 - 1) * 3 + 1 else None  # noqa: E731
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        run_in(tmp_path / "run", text, evaluate=evaluate)
    assert max(scores_of(tmp_path / "run")) == at
    assert scores_of(tmp_path / "run")[at] is None
    code, trainable = run_in(tmp_path / "run", text)
    assert code == 0
    jax.tree.map(np.testing.assert_array_equal, trainable, whole[0][1])
    assert untimed_rows(tmp_path / "run") == untimed_rows(whole[1])
    assert scores_of(tmp_path / "run") == scores_of(whole[1])


def test_killed_between_the_log_and_the_score_no_row_stands_twice(whole, text, tmp_path, monkeypatch):
    def kill(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpointer, "add_score", kill)
        run_in(tmp_path / "run", text)
    assert [row["step"] for row in untimed_rows(tmp_path / "run")][-2:] == [2, 2]
    run_in(tmp_path / "run", text)
    assert untimed_rows(tmp_path / "run") == untimed_rows(whole[1])


def test_signal_in_validation_ends_it_between_its_batches_without_another_step(whole, text, tmp_path):
    calls = []

    def evaluate(rows):
        calls.append(rows)
        if len(calls) == 5:  # the second batch of step 4
            signal.raise_signal(signal.SIGTERM)

    with runtime.Preemption() as preemption:
        code, _ = run_in(tmp_path / "run", text, evaluate=evaluate, stop=preemption.requested)
    assert code == runtime.REQUEUE and len(calls) == 5
    assert max(scores_of(tmp_path / "run")) == 4
    code, trainable = run_in(tmp_path / "run", text)
    assert code == 0
    jax.tree.map(np.testing.assert_array_equal, trainable, whole[0][1])
    assert untimed_rows(tmp_path / "run") == untimed_rows(whole[1])


def test_loss_that_is_no_number_names_the_checkpoint_that_there_is_and_no_other(text, tmp_path):
    wild = {"optim__learning_rate": 1e15, "optim__clip_norm": 1e15}
    with pytest.raises(UserError) as later:
        run_in(tmp_path / "run", text, train__eval_every=0, **wild)
    assert "no checkpoint" in str(later.value) and "learning_rate" in str(later.value)


def test_loss_that_is_no_number_before_anything_was_learned_blames_no_learning_rate(text, tmp_path):
    recipe = tiny.make_ttt(text, **CHANGES)
    with Checkpointer(tmp_path / "checkpoints", keep=2, identity=recipe.identity()) as checkpointer:
        run = trainer.Run(recipe.cfg, recipe, checkpointer, tmp_path)
        build = recipe.build

        def damaged(frozen=None):
            found = build(frozen)
            leaves, kind = jax.tree.flatten(found.trainable)
            leaves[0] = leaves[0] * np.float32("nan")
            return type(found)(jax.tree.unflatten(kind, leaves), found.frozen)

        recipe.build = damaged
        with pytest.raises(UserError) as raised:
            run.train(lambda step: False)
    assert "step 1: train/loss is nan" in str(raised.value)
    assert "learning_rate" not in str(raised.value) and "is kept" not in str(raised.value)


class Loading(BaseException):
    """The run goes on to its weights."""


@pytest.mark.parametrize(("overlong", "match"), [("refuse", r"config\.encoder\.window"), ("drop", None)])
def test_held_out_data_is_read_before_weights_and_what_is_left_of_it_is_told(
    overlong, match, root, tmp_path, monkeypatch, capsys
):
    def load(*_):
        raise Loading

    rows = [{"context": text, "question": "Who?", "answers": ["Mara"]} for text in ("Mara has a lamp.", "Mara " * 500)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = tiny.make_config(root, data__validation=str(tmp_path / "held_out.jsonl"), data__overlong=overlong)
    monkeypatch.setattr(trainer.Run, "_restore_or_initialise", load)
    with pytest.raises(UserError if match else Loading, match=match):
        tiny.train_in(tmp_path / "run", cfg)
    assert match or "held-out data: 1 of 2 questions" in capsys.readouterr().out


class Widths:
    """A loader of batches so wide."""

    def __init__(self, widths):
        self._widths, self.state = iter(widths), dict

    def __next__(self):
        return next(self._widths)


def test_compiling_for_further_shapes_is_no_step_s_time():
    stopped: list[int] = []
    clock = types.SimpleNamespace(paused=lambda: stopped.append(number) or contextlib.nullcontext())
    run = types.SimpleNamespace(_compiled=set(), state={}, accumulation=1, _report_pending=lambda: None)
    run._loader, run._frozen, run.first_step = Widths((3, 3, 5, 5, 3, 4)), {}, 0
    run.reporter = types.SimpleNamespace(clock=clock, compiling=lambda step: contextlib.nullcontext())
    run.step_spec = types.SimpleNamespace(put=lambda width, _: {"ids": np.zeros((2, width))}, step=lambda *_: ({}, {}))
    run._timing = functools.partial(trainer.Run._timing, run)
    for number in range(1, 7):
        trainer.Run._step(run, number)
    assert stopped == [3, 6]
