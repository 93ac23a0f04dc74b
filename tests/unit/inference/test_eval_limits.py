"""What an evaluation leaves out or refuses: rows without a second text, swapped rows alone, prompts beyond a reader."""

import contextlib
import copy
import dataclasses
import json
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import peer_compaction
from lw_jax.core.errors import UserError
from lw_jax.core.types import Example
from lw_jax.data import prompt_tokens
from lw_jax.evals import cache_rows, control_rows
from lw_jax.evals.control_rows import Measured
from lw_jax.inference import coded_evaluation, evaluation, evaluation_log
from lw_jax.models import attention_matching
from lw_jax.planning import plan_cache
from tests import tiny

ALL = ("text", "latents", "shuffled", "random", "ceiling", "none")


@pytest.fixture(scope="module")
def untrained(root):
    """A wire that takes texts beyond its reader's positions."""
    return tiny.make_wire(root, only="llama", eval__curve="none", data__context_tokens=4000, encoder__windows=64)


def ask(wire, tmp_path, texts, rows, answers=("3", "3", "3")):
    """The wire, its held-out questions about these texts and asked in these rows."""
    file = tmp_path / "held_out.jsonl"
    questions = [
        {"context": text, "question": f"How many {i}?", "answers": [answer]}
        for i, (text, answer) in enumerate(zip(texts, answers, strict=False))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in questions), "utf-8")
    asked, cfg = copy.copy(wire), wire.recipe.cfg
    asked.recipe = copy.copy(wire.recipe)
    data, options = dataclasses.replace(cfg.data, validation=str(file)), dataclasses.replace(cfg.eval, rows=rows)
    asked.recipe.cfg = dataclasses.replace(cfg, data=data, eval=options)
    return asked


def test_rows_that_need_a_second_text_are_left_out_where_there_is_none(untrained, tmp_path, capsys):
    texts = ["Mara has 3 lamps."] * 3
    found = evaluation.evaluate(ask(untrained, tmp_path, texts, ALL))
    assert list(found.summary["llama"]) == ["text", "latents", "none"]
    said = capsys.readouterr().out
    assert "shuffled, random, ceiling" in said and "COLLAPSED" not in said
    assert "gap_nll" not in found.readers["llama"]
    with pytest.raises(UserError, match=r"config.eval.rows: shuffled"):
        evaluation.evaluate(ask(untrained, tmp_path, texts, ("shuffled",)))


def test_cache_that_cannot_be_written_is_refused_before_anything_is_measured(root, tmp_path, monkeypatch):
    wire = tiny.make_wire(root, only="llama", encoder__kind="lm", encoder__source=str(root / "llama"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "file"))  # no folder can be made there
    monkeypatch.setattr(evaluation, "measure", lambda *_: pytest.fail("measured, and lost"))
    with pytest.raises(UserError, match="LW_JAX_CACHE"):
        evaluation.evaluate(wire)


def test_a_quiet_evaluation_silences_no_other_thread(untrained, tmp_path, capsys, monkeypatch):
    """A server's log goes on beside it, and behind two evaluations that end in the order of their begin."""
    asked = ask(untrained, tmp_path, ["Mara has 3 lamps.", "Tom has 3 bells."], ("none",))
    begun, second, ended = threading.Event(), threading.Event(), threading.Event()
    timed = evaluation.first_token.measure

    def measure(*args, **words):
        if not begun.is_set():
            begun.set()
            assert second.wait(60)
        else:
            second.set()
            assert ended.wait(60)
        return timed(*args, **words)

    monkeypatch.setattr(evaluation.first_token, "measure", measure)

    def evaluate():
        evaluation.evaluate(asked, quiet=True)
        ended.set()

    threads = [threading.Thread(target=evaluate) for _ in range(2)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    assert second.wait(60)
    print("beside")
    for thread in threads:
        thread.join()
    print("behind")
    assert capsys.readouterr().out == "beside\nbehind\n"


def test_random_latents_are_not_those_of_the_one_text_that_is_measured(untrained, tmp_path, capsys):
    asked = ask(untrained, tmp_path, ["Mara has 3 lamps.", "Tom owns 8 kites."], ("none", "random"), ("3", "8"))
    options = dataclasses.replace(asked.recipe.cfg.eval, examples=1)
    asked.recipe.cfg = dataclasses.replace(asked.recipe.cfg, eval=options)
    assert {record["row"] for record in evaluation.measure(asked).records} == {"none"}
    assert "random need a second text, and all measured questions" in capsys.readouterr().out


def test_swapped_rows_alone_are_measured(untrained, tmp_path):
    texts, rows = ["Mara has 3 lamps.", "Tom owns 8 kites."], ("swapped", "swapped_text")
    found = evaluation.evaluate(ask(untrained, tmp_path, texts, rows, ("3", "8")))
    assert list(found.summary["llama"]) == ["swapped", "swapped_text"]
    assert {record["answers"][0] for record in found.measured.records} == {"3", "8"}
    with pytest.raises(UserError, match="eval.rows: nothing is measured"):
        evaluation.evaluate(ask(untrained, tmp_path, ["Mara has 3 lamps.", "Tom owns 3 kites."], rows))


def test_prompts_beyond_a_reader_s_positions_are_refused(untrained, tmp_path):
    texts = [f"Mara has 3 {' '.join(['lamp'] * 300)}.", "Tom has 3."]
    with pytest.raises(UserError, match=r"reader 'llama': .* 512; "):
        evaluation.measure(ask(untrained, tmp_path, texts, ("text", "none")))
    assert evaluation.measure(ask(untrained, tmp_path, texts, ("latents", "none"))).records, "no row reads the text"


def limit(monkeypatch, recipe, name, most):
    """Lets a reader have been trained on so many positions."""
    reader = recipe.wire.readers[name]
    config = dataclasses.replace(reader.config, max_positions=most)
    monkeypatch.setitem(recipe.wire.readers, name, dataclasses.replace(reader, config=config))


def refused(short, match):
    return pytest.raises(UserError, match=match) if short else contextlib.nullcontext()


def longest(fields, *keys):
    return sum(max(map(len, fields[key].ids)) for key in keys)


def test_positions_have_the_learned_vector_and_are_those_of_swapped_texts_too(root, monkeypatch):
    recipe = tiny.make_recipe(root, only="llama", eval__rows=("text_taught", "swapped_text"))
    encoded = recipe.data("validation", rows=("context", "asked", "text"))
    new = max(longest(encoded.readers["llama"], "answer") - 1, recipe.cfg.eval.max_new_tokens)
    needed = longest(encoded.readers["llama"], "context", "asked") + 1 + new
    for short in (0, 1):
        limit(monkeypatch, recipe, "llama", needed - short)
        with refused(short, "'llama'"):
            evaluation._check_positions(recipe, encoded, dataclasses.replace(recipe.cfg.eval, rows=("text_taught",)))
    limit(monkeypatch, recipe, "llama", 20)
    with refused(True, "'llama'"):
        evaluation._make_swaps(recipe, encoded)


def test_a_text_that_is_read_twice_for_a_ceiling_has_no_more_positions_than_its_reader(root, monkeypatch):
    recipe = tiny.make_recipe(root, only="llama", eval__rows=("ceiling",))
    encoded = recipe.data("validation", rows=("context", "asked"))
    attached = control_rows.attach_ceiling(encoded, range(len(encoded))).collate(range(len(encoded)))
    names = "before", "context", "probe"
    fields = jax.tree.map(jnp.asarray, {key: attached["readers"]["llama"][key] for key in names})
    before = fields["before"]["mask"].sum(axis=1, keepdims=True, dtype=jnp.int32)
    params = {"embed": jnp.zeros((400, 1))}
    read = int(
        attention_matching.join(params, fields["context"], fields["probe"], before=before).mask.sum(axis=1).max()
    )
    needed = (
        2 * longest(encoded.readers["llama"], "context")
        + longest(encoded.readers["llama"], "asked")
        - int(before[0, 0])
    )
    assert read <= needed < read + 8, "the longest text and the longest question may be two examples'"
    for short in (0, 1):
        limit(monkeypatch, recipe, "llama", needed - short)
        with refused(short, "'llama'.*'ceiling' reads twice"):
            evaluation._check_positions(recipe, encoded, recipe.cfg.eval)


def make_coded(root, **changes) -> Any:
    """A wire of kind "cache" without weights."""
    recipe = tiny.make_recipe(root, only="qwen", encoder__kind="cache", encoder__width=200, **changes)
    return types.SimpleNamespace(
        ratio=None, recipe=recipe, codes={}, frozen={"qwen": {}}, functions=None, fingerprint=""
    )


def test_texts_that_cannot_be_read_twice_are_refused_before_any_is_measured(root, monkeypatch):
    wire, measured = make_coded(root), []
    monkeypatch.setattr(cache_rows, "measure", lambda *given, **options: measured.append(given) or [])
    fields = wire.recipe.encode(wire.recipe.curriculum.examples("validation")).readers["qwen"]
    for short in (0, 1):
        limit(monkeypatch, wire.recipe, "qwen", longest(fields, "before", "own", "own", "again") - short)
        with refused(short, "'qwen'.*context_tokens"):
            coded_evaluation.measure(wire, batch=8)
    assert len(measured) == 1


def test_records_of_another_program_are_dropped_and_of_another_taught_vector_those_of_its_rows(
    root, monkeypatch, tmp_path, capsys
):
    wire, wanted = make_coded(root, eval__rows=("none", "text_taught")), []

    def measure(bench, encoded, indices, *, rows, log, **options):
        wanted.append(log.missing("qwen", rows, indices))
        log.add([{"reader": "qwen", "row": row, "index": index} for row in wanted[-1] for index in indices])
        return log.read(["qwen"], rows, indices)

    def resume(**taught):
        coded_evaluation.measure(wire, batch=8, folder=tmp_path, taught=taught)
        return wanted[-1]

    monkeypatch.setattr(cache_rows, "measure", measure)
    assert resume(qwen=np.ones(3)) == ["none", "text_taught"]
    assert resume(qwen=np.ones(3)) == []
    assert resume(qwen=np.full(3, 2.0)) == ["text_taught"]
    wire.recipe.cfg = dataclasses.replace(
        wire.recipe.cfg, eval=dataclasses.replace(wire.recipe.cfg.eval, rows=("none",))
    )
    assert resume() == [], "without the row nothing is taught"
    assert "are replaced" not in capsys.readouterr().out
    monkeypatch.setattr(plan_cache, "code", lambda: "of another version")
    assert resume() == ["none"] and "are replaced" in capsys.readouterr().out


def test_a_message_is_timed_with_what_the_rows_read_of_a_text(root):
    wire, written = make_coded(root, data__overlong="cut", data__context_tokens=40), []
    encoded = wire.recipe.encode(wire.recipe.curriculum.examples("validation"))
    wire.write = lambda text, **named: written.append(text)
    wire.section = wire.prompt = lambda *given: None
    wire.text_layout, reused = lambda reader: wire.recipe.layout, []
    wire.functions = types.SimpleNamespace(
        placement=types.SimpleNamespace(data=1),
        place=lambda fields, reader: fields,
        prompt_from_text=lambda *given: None,
        reuse_opening=lambda *given, **opening: reused.append(opening),
        begin=lambda *given: 0,
    )
    measured = Measured(encoded, [0], encoded.count_slots([0]), [])
    coded_evaluation.measure_times(wire, measured, "qwen")
    assert all(opening["skipped"] > 0 for opening in reused) and reused, "the opening is read beforehand for both"
    (cut,), whole, own = set(written), encoded.examples[0].context, encoded.readers["qwen"]["own"].ids[0]
    assert cut and whole.startswith(cut.strip()) and len(cut) < len(whole)
    assert len(prompt_tokens.tokenize(wire.recipe.tokenizers["qwen"], [cut])[0]) <= len(own) + 1
    wire._check_reader, wire._put = lambda reader: None, lambda fields, reader: fields
    assert peer_compaction.questions_of(wire, "qwen", 1)[0]["text"] == cut


def test_the_key_of_an_evaluation_is_of_all_texts_without_holding_them_together(untrained, monkeypatch):
    recipe, hashed = untrained.recipe, []
    monkeypatch.setattr(evaluation_log, "content_hash", lambda content: hashed.append(json.dumps(content)) or "key")
    one = Example("a", "Ann is in Rome. " * 99, "Where?", ("Rome",))
    for example in (one, *(dataclasses.replace(one, **{name: "x"}) for name in ("id", "context", "question"))):
        evaluation_log._key(recipe, "f 4", types.SimpleNamespace(examples=[example]))  # pyright: ignore
    assert len(set(hashed)) == 4 and "Ann is in Rome" not in hashed[0]


def test_records_serve_whatever_batch_layers_and_curve_the_next_start_takes(untrained):
    def key(**changes):
        recipe = types.SimpleNamespace(
            cfg=tiny.change(untrained.recipe.cfg, **changes), placement=untrained.recipe.placement
        )
        return evaluation_log._key(recipe, "f 4", types.SimpleNamespace(examples=[]))  # pyright: ignore

    other = {"eval__batch": 3, "eval__layers": "unstacked", "eval__curve": "f1", "eval__rows": ("text",)}
    assert key(**other) == key() != key(eval__max_new_tokens=3)
