"""The verb's files and words, of a random wire from end to end."""

import copy
import dataclasses
import json
import math
import re

import jax
import numpy as np
import pytest

from lw_jax.core import progress
from lw_jax.core.errors import UserError
from lw_jax.evals import control_rows, quality_curve, results
from lw_jax.inference import evaluation, evaluation_log, taught_text
from lw_jax.inference.trained_wire import TrainedWire
from lw_jax.report import page, records
from lw_jax.training import run_folder
from tests import tiny

ROWS = ("text", "text_taught", "latents", "shuffled", "none", "selected_taught")
FILES = ["eval.json", "predictions.jsonl", "slots.json", "bytes.csv"]


@pytest.fixture(scope="module")
def wire(root):
    changes = {"eval__examples": 5, "eval__batch": 3, "eval__rows": ROWS}
    changes |= {"eval__taught_steps": 3, "encoder__kind": "lm"}
    changes |= {"eval__curve_examples": 2, "eval__max_new_tokens": 2}
    changes |= {"encoder__source": str(tiny.readers(root)["llama"])}
    recipe = tiny.make_recipe(root, **changes)
    built = recipe.build()
    return TrainedWire(recipe, built.trainable, built.frozen, 6)


@pytest.fixture(scope="module")
def found(wire):
    return evaluation.evaluate(wire)


def read_strictly(text):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def reported(wire, folder):
    """The folder as `report` reads it, once its page could be made."""
    (folder / "config.json").write_text(run_folder.config_text(wire.recipe.cfg), "utf-8")
    run = records.read(folder)
    assert "Controls" in page.render(run)
    return run


def test_files_hold_what_was_found(wire, found, tmp_path):
    assert [path.name for path in evaluation.write(found, tmp_path, step=6, data="cards")] == FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    result = read_strictly((tmp_path / "eval.json").read_text(encoding="utf-8"))
    assert result.keys() == results.Results.__annotations__.keys()
    assert result["step"] == 6 and result["counts"]["kept"] == 16
    assert result["rows"]["qwen"]["latents"]["nll"] == found.summary["qwen"]["latents"]["nll"]
    assert result["rows"]["llama"].keys() == set(ROWS)
    assert len(result["curve"]["points"]) == 2 * len(quality_curve.BITS) and result["curve"]["examples"] == 2
    assert result["curve"]["text_bytes"].keys() == {"UTF-8", "gzip", "zstd", "brotli", "language model"}
    assert result["joint"]["examples"] == 5 and result["latents"]["inputs"] == 5
    lines = (tmp_path / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    told = [read_strictly(line) for line in lines]
    assert len(told) == 2 * 5 * len(ROWS)
    assert all(("picked" in record) == (record["row"] == "latents") for record in told)
    slots = read_strictly((tmp_path / "slots.json").read_text(encoding="utf-8"))
    assert len(slots) == 5 and slots[0][0] == pytest.approx(1.0)
    run = reported(wire, tmp_path)
    assert run.curve is not None and len(run.predictions) == len(told) and run.slots == slots


def test_more_examples_than_a_run_validates_on_are_measured_and_the_time_left_is_reported(wire, monkeypatch, capsys):
    recipe = wire.recipe
    options = dataclasses.replace(recipe.cfg.eval, examples=20, batch=5, rows=("none",))
    more = copy.copy(recipe)  # its limit is 16
    more.cfg = dataclasses.replace(recipe.cfg, eval=options)
    monkeypatch.setenv(progress.SECONDS, "0.001")
    found = evaluation.measure(TrainedWire(more, wire.trainable, wire.frozen, wire.step))
    assert len(found.examples) == len({example.id for example in found.examples}) == 20
    assert len(found.records) == 2 * 20
    found_lines = re.findall(r"^answering .*: (\d) of 8 batches, left ", capsys.readouterr().err, re.MULTILINE)
    assert {2, 7} <= set(map(int, found_lines)) <= set(range(2, 9))


def test_evaluation_that_was_cut_short_resumes(wire, found, tmp_path, monkeypatch, capsys):
    answer, answered = control_rows.WireSession.answer, []

    def counted(*given, **options):
        if len(answered) == killed_after:
            raise KeyboardInterrupt
        answered.append(given)
        return answer(*given, **options)

    monkeypatch.setattr(control_rows.WireSession, "answer", counted)
    killed_after = 5
    with pytest.raises(KeyboardInterrupt):
        evaluation.measure(wire, folder=tmp_path)
    kept, killed_after = 5 * wire.recipe.cfg.eval.batch, 99
    assert len((tmp_path / evaluation_log.PARTIAL).read_text("utf-8").splitlines()) == 1 + kept
    capsys.readouterr()
    again = evaluation.measure(wire, folder=tmp_path)
    assert f"resuming: {kept} records" in capsys.readouterr().out
    assert len(answered) == 2 * 2 * len(ROWS), "none twice: batches, readers, rows"
    tiny.assert_same_scores(again.records, found.measured.records)
    evaluation.write(found, tmp_path, step=6, data="cards")
    assert not (tmp_path / evaluation_log.PARTIAL).exists()


def test_selected_words_fill_the_message_s_positions_in_the_text_s_order(wire, found):
    for name, tokenizer in wire.recipe.tokenizers.items():
        fields = found.measured.encoded.readers[name]
        room = wire.recipe.cfg.encoder.slots + 1
        for record in found.measured.of(name, "selected_taught"):
            index = record["index"]
            taken = int(record["positions"]) - 1  # the vector is one
            assert room - 3 <= taken <= room
            whole, before = fields["selected_context"].ids[index], len(fields["before"].ids[index])
            assert len(whole) == before + taken
            words = tokenizer.decode(whole[before:].tolist()).split()
            context = found.measured.encoded.examples[index].context
            at = 0
            for word in words[:-1]:  # the last one may be cut
                at = context.find(word, at)
                assert at >= 0, (words, context)
            assert words


def test_taught_vector_is_kept_and_lowers_the_loss_of_the_text(wire, found, monkeypatch, capsys):
    recipe = wire.recipe
    first = taught_text.teach(recipe, wire.frozen, batch=4)
    assert "text_taught" not in capsys.readouterr().out, "the evaluation has kept it"
    longer = dataclasses.replace(recipe.cfg.eval, taught_steps=24)
    monkeypatch.setattr(recipe, "cfg", dataclasses.replace(recipe.cfg, eval=longer))
    second = taught_text.teach(recipe, wire.frozen, batch=4)
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == ["text_taught llama", "text_taught qwen"]
    rows, nll = dataclasses.replace(recipe.cfg.eval, rows=("text_taught",), examples=0), []
    for vectors in (first, second):
        session = control_rows.WireSession(
            wire.functions, wire.frozen, recipe.tokenizers, wire.trainable, taught=vectors
        )
        measured = control_rows.measure(session, found.measured.encoded, options=rows)
        nll.append({name: sum(record["nll"] for record in measured.of(name, "text_taught")) for name in vectors})
    for name, vector in second.items():
        assert vector.shape == (1, recipe.wire.readers[name].config.width)
        assert not np.array_equal(vector, first[name])
        assert nll[1][name] < nll[0][name]


def test_numbers_that_json_has_no_word_for_become_null(found, tmp_path):
    broken = dataclasses.replace(found, latents={"effective_rank": math.nan}, slots=[[math.inf, 1.0]])
    evaluation.write(broken, tmp_path, step=6, data="cards")
    assert read_strictly((tmp_path / "eval.json").read_text(encoding="utf-8"))["latents"] == {"effective_rank": None}
    assert read_strictly((tmp_path / "slots.json").read_text(encoding="utf-8")) == [[None, 1.0]]


def test_without_a_curve_there_is_no_picture(wire, found, tmp_path):
    paths = evaluation.write(dataclasses.replace(found, curve=None, joint=None), tmp_path, step=6, data="cards")
    assert [path.name for path in paths] == FILES[:3]
    result = read_strictly((tmp_path / "eval.json").read_text(encoding="utf-8"))
    assert result["curve"] is None and result["joint"] is None
    assert reported(wire, tmp_path).curve is None


def exhaust(least):
    def measure(*_, options, **__):
        if options.batch >= least:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return options.batch

    return measure


def test_what_does_not_fit_into_memory_is_measured_in_smaller_batches(wire, monkeypatch, capsys):
    monkeypatch.setattr(evaluation.control_rows, "measure", exhaust(2))
    assert evaluation.measure(wire) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if "out of memory" in line]
    assert ["eval.batch=3: now 1" in line for line in told] == [True]
    monkeypatch.setattr(evaluation.control_rows, "measure", exhaust(1))
    with pytest.raises(UserError, match="mesh.placement=tensor") as refusal:
        evaluation.measure(wire)
    assert "bits" not in str(refusal.value), "llms.NAME.weights are the run's: another value is refused"


def test_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(wire, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Not a directory"):
        tiny.call("eval", wire.recipe.cfg, tmp_path / "file")


def test_readers_are_chosen_of_an_exported_wire_alone(wire, tmp_path):
    with pytest.raises(UserError, match="--reader llama: a run is evaluated with all of its readers"):
        tiny.call("eval", wire.recipe.cfg, tmp_path, reader=["llama"])
