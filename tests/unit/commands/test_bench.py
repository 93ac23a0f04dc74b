"""lw_jax/commands/bench.py: every part measures what it says, by figures that can be counted by hand."""

import dataclasses
from pathlib import Path

import jax
import pytest

from lw_jax.benchmarking import measurement, rows, timing
from lw_jax.benchmarking.measurement import Measured
from lw_jax.benchmarking.rows import Planned, Row
from lw_jax.benchmarking.timing import Ceilings, Spread
from lw_jax.core.config import LLM
from lw_jax.core.errors import UserError
from lw_jax.planning import gpus
from lw_jax.training import memory
from lw_jax.training.step_spec import StepSpec
from tests import tiny

CEILINGS = Ceilings("float32", matmul=2e9, bandwidth=3e9)


@pytest.fixture(autouse=True, scope="module")
def known_ceilings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "ceilings", lambda dtype: dataclasses.replace(CEILINGS, dtype=dtype))
        yield


def make(cfg):
    return Measured(cfg, tiny.place(cfg, "replicate"), repeats=2)


@pytest.fixture(scope="module")
def wire(root):
    return make(tiny.make_config(root, train__global_batch=4, train__micro_batch=2, eval__batch=3))


@pytest.mark.slow
def test_step_tells_speed_share_memory_both_starts_and_the_plan(wire, monkeypatch):
    card = gpus.parse("h100x1").card
    monkeypatch.setattr(gpus, "of_device", lambda device: card)
    (row,) = wire.measure("step")
    assert row.planned.bytes == row.peak_bytes and 0 < row.planned.seconds < row.planned.seconds_at_ceilings
    seconds = row.seconds.median
    assert row.seconds.least <= seconds <= row.seconds.most and row.seconds.repeats == 2
    assert row.samples_per_second == pytest.approx(4 / seconds)
    assert row.of_matmul == pytest.approx(row.flops / seconds / CEILINGS.matmul)
    widths = wire.recipe.batch_widths()
    spec = wire.cfg
    each = spec.encoder.window + sum(
        sum(fields[key]["ids"].size for key in ("before", "after")) + fields["answer_inputs"].size
        for fields in widths["readers"].values()
    )
    assert row.tokens_per_second == pytest.approx(4 * each / seconds)
    assert row.peak_from == "compiled"
    assert row.peak_bytes == memory.measure(StepSpec(spec, wire.recipe), widths, 2).peak
    assert row.compile_seconds > 0 and row.cached_seconds > 0 and "2 accumulated" in row.what


@pytest.mark.slow
def test_encoding_and_answers_are_timed_for_a_whole_batch(wire):
    (encoded,) = wire.measure("encode")
    assert encoded.samples_per_second == pytest.approx(3 / encoded.seconds.median)
    assert encoded.tokens_per_second == pytest.approx(3 * wire.cfg.encoder.window / encoded.seconds.median)
    rows = wire.measure("answer")
    assert [row.subject for row in rows] == ["llama", "qwen"]
    for row in rows:
        shapes = wire.recipe.abstract.frozen[row.subject]
        weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
        looked_up = 0 if "head" not in shapes else shapes["embed"].size * 4
        model = wire.recipe.wire.readers[row.subject].config
        fields = wire.recipe.batch_widths()["readers"][row.subject]
        slots = sum(fields[key]["ids"].size for key in ("before", "after")) + wire.cfg.encoder.slots + 1
        cache = 2 * model.layers * 3 * (slots + wire.cfg.eval.max_new_tokens) * model.kv_heads * model.head_dim * 4
        assert row.bytes == weights - looked_up + cache
        assert row.tokens_per_second == pytest.approx(3 * wire.cfg.eval.max_new_tokens / row.seconds.median)


@pytest.mark.slow
def test_loading_and_reading_use_the_configurations_own_files(wire):
    rows = wire.measure("load")
    for row, name in zip(rows, ("llama", "qwen"), strict=True):
        assert row.bytes == (Path(wire.cfg.llms[name].source) / "model.safetensors").stat().st_size
        assert (row.peak_bytes is not None) == Path("/proc/self/clear_refs").exists()
    (row,) = wire.measure("input")
    assert row.samples_per_second == pytest.approx(4 / row.seconds.median) and 0 < row.padding < 1


def test_batches_are_made_where_a_teacher_s_answers_are_not_in_their_cache(root):
    (row,) = make(tiny.make_config(root, loss__kl=1.0, loss__teacher_k=2, train__global_batch=4)).measure("input")
    assert row.seconds.median > 0 and not row.why_not


def test_a_recipe_has_its_own_parts(tmp_path, wire):
    language = make(tiny.make_ttt_config(tmp_path))
    assert language.parts == ["step", "input"] and wire.parts == list(measurement.PARTS)
    with pytest.raises(UserError, match="--parts answer: recipe 'ttt' has step, input"):
        language.measure("answer")


def test_what_is_not_here_is_told_and_fetched_only_when_asked_for(wire, monkeypatch):
    monkeypatch.setattr(wire, "_missing", lambda part: "hub/model")
    monkeypatch.setattr(wire, "load", lambda: pytest.fail("nothing is to be fetched"))
    (row,) = wire.measure("load", asked=False)
    assert row.seconds is None and "hub/model" in row.why_not
    assert "not measured" in rows.table("card", CEILINGS, [row], {})


@pytest.mark.parametrize("key", ["train", "validation", "passages"])
def test_data_of_the_hub_is_seen_in_a_list_and_matters_to_input_alone(key, wire, monkeypatch):
    data = dataclasses.replace(wire.cfg.data, **{key: "cards, hub:some/texts"})
    monkeypatch.setattr(wire, "cfg", dataclasses.replace(wire.cfg, data=data))
    monkeypatch.setattr(wire, "input", lambda: pytest.fail("nothing is to be fetched"))
    monkeypatch.setattr(wire, "load", lambda: [])
    (row,) = wire.measure("input", asked=False)
    assert "hub:some/texts" in row.why_not and wire.measure("load", asked=False) == []


def test_a_language_models_tokenizer_is_fetched_only_when_asked_for(tmp_path, monkeypatch):
    language = make(tiny.make_ttt_config(tmp_path, ttt__tokenizer="bytes"))
    assert language._missing("input") == ""
    spec = dataclasses.replace(language.cfg.ttt, tokenizer="nobody/words")
    monkeypatch.setattr(language, "cfg", dataclasses.replace(language.cfg, ttt=spec))
    assert language._missing("input") == "nobody/words"


@pytest.mark.parametrize(
    ("tokens", "medians", "told"), [(5, (0.7, 0.5), True), (5, (0.5, 0.7), False), (1, (0.7, 0.5), False)]
)
def test_a_token_s_time_is_told_only_where_the_long_answer_took_longer(tokens, medians, told, wire, monkeypatch):
    spec = dataclasses.replace(wire.cfg, eval=dataclasses.replace(wire.cfg.eval, max_new_tokens=tokens))
    monkeypatch.setattr(wire, "cfg", spec)
    spreads = [Spread(seconds, seconds, seconds, 1) for seconds in medians]
    monkeypatch.setattr(wire, "costs", lambda weights, calls: [{"seconds": spread} for spread in spreads])
    row, _ = wire.measure("answer")
    assert ("a token of all" in row.what) == told and ("a token of all 50.0 ms" in row.what) == told


def test_table_tells_every_figure_once():
    row = Row("step", "wire", "4 samples", Spread(0.5, 0.4, 0.7, 5), 8.0, 1234.0, 1e9, 0.25, peak_bytes=2e9)
    row = dataclasses.replace(row, peak_from="device", compile_seconds=12.0, cached_seconds=1.5, padding=0.125)
    row = dataclasses.replace(row, planned=Planned(1.6e9, 0.4, 0.625))
    lines = rows.table("card", CEILINGS, [row], {}).splitlines()
    assert lines[3].split() == "step wire 0.5000 0.4000..0.7000 8.0 1,234 25% matmul 2.000 device 4 samples".split()
    assert "12.0 s" in lines[4] and "1.5 s" in lines[4] and "12.5%" in lines[6]
    assert lines[5].startswith("step, as planned: 1.600 GB (+25.0% measured), 0.4000 s (+25.0% measured), 0.6250 s")
    told = rows.table("card", CEILINGS, [row], {"a": LLM(weights="fp8"), "b": LLM(weights="nf4")}).splitlines()
    assert "fp8" in told[1] and [told[0], *told[2:]] == lines
    away = dataclasses.replace(
        row, seconds=None, planned=None, predicted_seconds=0.25, peak_from="compiled", compile_seconds=None
    )
    away = dataclasses.replace(away, compiled_flops=2.5e12, compiled_bytes=3e9, padding=None)
    absent = rows.table("card", CEILINGS, [away], {}).splitlines()
    assert absent[3].split() == "step wire 0.2500 predicted 8.0 1,234 25% matmul 2.000 compiled 4 samples".split()
    assert "2.5 TFLOP" in absent[4] and "3.0 GB" in absent[4]
