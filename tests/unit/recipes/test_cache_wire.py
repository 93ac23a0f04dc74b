"""A wire of kind "cache" on two tiny readers: started, evaluated, asked, written and read."""

import collections
import copy
import dataclasses
import json
import sys
import types
from typing import Any

import jax
import numpy as np
import pytest

import lw_jax
from benchmarks import peer_compaction
from configs import pair
from lw_jax.commands import evaluate, train
from lw_jax.core import config, validation
from lw_jax.core.errors import UserError
from lw_jax.core.types import Example
from lw_jax.data import batches
from lw_jax.evals import cache_functions, cache_rows
from lw_jax.evals.cache_functions import CacheFunctions
from lw_jax.evals.control_rows import ANSWER
from lw_jax.inference import coded_evaluation, evaluation, evaluation_log, trained_wire
from lw_jax.inference.coded_wire import CodedWire
from lw_jax.inference.export import MOST_CACHE_BYTES
from lw_jax.models import cache_code, cache_codec, cache_message
from lw_jax.recipes import cache_start
from lw_jax.recipes.cache_held_out import HeldOut
from lw_jax.recipes.cache_wire import CacheWire
from lw_jax.report import page, records
from lw_jax.training import memory_limit, wire_tensors
from tests import tiny

TEXT = "Mira keeps a copper lantern in the old mill. Tom keeps a silver bell in the new barn."
QUESTION = "What does Mira keep?"
LIMIT = 512  # positions of a window, and of LongRope's short frequencies
ALIKE = 0.99  # correlation of logits: all numbers of a token, about a byte each


def make_config(root, **changes):
    cfg = tiny.make_config(root, **tiny.CACHE | {"mesh__placement": "single"} | changes)
    validation.validate(cfg)
    return cfg


@pytest.fixture(scope="module")
def run(root, tmp_path_factory):
    """The folder of a started run, and what it printed."""
    cfg = make_config(root)
    return tiny.train_in(tmp_path_factory.mktemp("cache"), cfg), cfg


@pytest.fixture(scope="module")
def wire(run):
    found = lw_jax.load_wire(run[0])
    assert isinstance(found, CodedWire)
    return found


@pytest.fixture(scope="module")
def message(wire):
    return wire.write(TEXT)


@pytest.fixture
def opened(wire, monkeypatch):
    """Gives commands the wire that is open, whose programs are compiled, with their configuration."""

    def open_wire(cfg, path, readers=()):
        other = copy.copy(wire)
        other.recipe = copy.copy(wire.recipe)
        other.recipe.cfg = cfg
        return other

    for module in (trained_wire, evaluate):
        monkeypatch.setattr(module, "open_wire", open_wire)


def test_a_message_of_all_positions_answers_as_the_text(wire):
    whole = wire.write(TEXT, ratio=1)
    for reader in ("llama", "qwen"):
        for question in (QUESTION, "Where is the bell?"):
            assert wire.read(whole, reader, question) == wire.read_text(TEXT, reader, question)


def test_a_text_is_read_however_long_a_message_may_be(wire):
    text, most = " ".join([TEXT] * 8), wire.recipe.cfg.data.context_tokens
    prompt = wire.text_prompt(text, "llama", QUESTION)
    assert most < prompt.mask.sum() < wire.recipe.wire.readers["llama"].config.max_positions


def test_questions_batches_and_streams_agree(wire, message):
    other = wire.write("Tom keeps a silver bell in the new barn. Ben has a boat.")
    alone = [wire.read(message, "qwen", QUESTION), wire.read(other, "qwen", "What has Ben?")]
    assert wire.read([message, other], "qwen", [QUESTION, "What has Ben?"]) == alone
    assert wire.read(message, "qwen", [QUESTION, QUESTION]) == [alone[0]] * 2
    assert "".join(wire.read(message, "qwen", QUESTION, stream=True)) == alone[0]


def test_the_bytes_say_what_was_written(wire, message):
    section = wire.section(message, "llama")
    assert section.ratios == (2,) and wire.write(TEXT) == message
    code = wire.trainable["codes"]["llama"]
    count = cache_functions.count_kept(code, np.array([len(section.numbers)]), 2)[:, 0]
    np.testing.assert_array_equal((section.levels > 0).sum(axis=1), count)
    assert 0.4 < (section.levels > 0).mean() < 0.6
    told = wire.describe(memoryview(message))
    assert f"{len(section.numbers)} tokens" in told and "llama" in told and "qwen" in told


def test_a_message_without_a_part_for_any_reader_is_said_to_have_none(monkeypatch):
    monkeypatch.setattr(cache_codec, "read_frame", lambda message: {"1" * 16: message})
    wire: Any = types.SimpleNamespace(codings={"llama": types.SimpleNamespace(fingerprint="0" * 16)})
    assert CodedWire.describe(wire, b"of other readers") == "no part for llama"


@pytest.mark.slow
def test_packed_and_masked_prompts_score_alike(wire, message):
    """Answers take the memory of the kept keys alone, scores mask the others: both are the same attention."""
    for name in ("llama", "qwen"):
        asked = [wire.section(message, name)], [QUESTION], name
        packed, masked = (wire.prompt(*asked, whole=whole) for whole in (False, True))
        assert packed.packed is not None and masked.packed is None
        assert packed.kv_prefix.mask.shape[1] < masked.kv_prefix.mask.shape[1] - 32, "of the opening alone"
        config = wire.recipe.wire.readers[name].config
        assert int(packed.packed.count.sum()) <= 0.6 * 64 * config.layers * config.kv_heads
        begin = wire.recipe.wire.begin
        found = [begin(wire.frozen[name], name, one, max_new_tokens=1)[0] for one in (packed, masked)]
        np.testing.assert_allclose(*found, atol=1e-4)


def test_what_stands_before_messages_is_read_once_for_all_of_them(wire, message, monkeypatch):
    wire.read(message, "qwen", QUESTION)
    monkeypatch.setattr(CacheFunctions, "_read_opening", lambda *_: pytest.fail("read again"))
    prompt = wire.prompt([wire.section(message, "qwen")], ["When?"], "qwen")
    assert prompt.packed is not None and prompt.kv_prefix is not None and prompt.shared_prefix is None
    wire.read(message, "qwen", "When?")


def test_a_reader_takes_its_own_section_alone(wire, message):
    alone = wire.write(TEXT, readers=("qwen",))
    assert len(alone) < len(message)
    assert wire.write(TEXT, readers=("qwen", "qwen")) == alone, "named twice, it has one section"
    assert wire.read(alone, "qwen", QUESTION) == wire.read(message, "qwen", QUESTION)
    with pytest.raises(UserError, match=wire.codings["llama"].fingerprint):
        wire.read(alone, "llama", QUESTION)


def test_a_message_of_more_tokens_than_a_reader_has_positions_is_refused_before_its_keys_are_made(
    wire, message, monkeypatch
):
    section = wire.section(message, "qwen")
    tokens = wire.recipe.wire.readers["qwen"].config.max_positions + 1
    longer = section._replace(
        numbers=np.zeros((tokens, section.numbers.shape[1]), np.int32),
        levels=np.zeros((section.levels.shape[0], tokens, section.levels.shape[2]), np.uint8),
        biases={},
    )
    monkeypatch.setattr(wire, "prompt", lambda *_, **__: pytest.fail("its keys are made"))
    with pytest.raises(UserError, match=f"'qwen'.* {tokens:,} positions"):
        wire.read(cache_codec.pack([(wire.codings["qwen"], longer)], writer=wire.fingerprint), "qwen", QUESTION)


@pytest.mark.parametrize("ratio", [16, np.int64(16), np.array([16])])
def test_a_text_of_which_nothing_is_kept_is_refused(wire, ratio):
    with pytest.raises(UserError, match="at ratio=16 nothing is kept of a text of 1 tokens"):
        wire.write("a", ratio=ratio, readers=("qwen",))


@pytest.mark.parametrize("ratio", [0, 17, 2.5, "2"])
def test_a_ratio_that_no_message_has_is_refused(wire, ratio):
    for call in (lambda: wire.write(TEXT, ratio=ratio), lambda: wire.at(ratio)):
        with pytest.raises(UserError, match=f"ratio={ratio}.*1 to 16"):
            call()


def test_a_run_is_opened_with_all_of_its_readers(run):
    with pytest.raises(UserError, match="readers=.*export"):
        lw_jax.load_wire(run[0], readers=["llama"])


def test_one_message_serves_several_ratios(wire, message):
    several = wire.write(TEXT, ratio=(2, 4, 8))
    section = wire.section(several, "qwen")
    assert section.ratios == (2, 4, 8) and len(message) < len(several) < 1.3 * len(message)
    for place, ratio in enumerate(section.ratios):
        alone = wire.section(wire.write(TEXT, ratio=ratio), "qwen")
        np.testing.assert_array_equal(section.levels > place, alone.levels > 0)
    # Two programs round differently, and each number is chosen beside all others.
    off = np.abs(section.numbers - wire.section(message, "qwen").numbers)
    assert off.max() <= 3 and (off > 0).mean() < 0.3
    assert wire.at(2).read(several, "qwen", QUESTION) == wire.read(message, "qwen", QUESTION)
    held = [wire.at(r).prompt([section], [QUESTION], "qwen").packed.count for r in (2, 4, 8)]
    held = [int(count.sum()) for count in held]
    assert held[0] > 1.7 * held[1] > 2.5 * held[2]
    with pytest.raises(UserError, match=r"ratio=3.*\(2, 4, 8\)"):
        wire.at(3).read(several, "qwen", QUESTION)


def test_a_message_for_several_ratios_has_biases_where_one_is_fitted(wire, monkeypatch):
    fitted = wire.codes["qwen"] | {"fitted": (np.arange(16) >= 3).astype(np.float32)}
    monkeypatch.setitem(wire.codes, "qwen", fitted)
    section = wire.section(wire.write(TEXT, ratio=(2, 4), readers=("qwen",)), "qwen")
    assert list(section.biases) == [4] and section.biases[4].any()


def test_batches_are_of_texts_alike_in_length_and_as_wide(wire):
    encoded = wire.recipe.encode([Example("", f"a {n}", QUESTION, ("bell",)) for n in range(5)])
    own = batches.field([np.ones(n, np.int32) for n in (150, 20, 304, 10, 90)], 0, left=False)
    readers = {name: fields | {"own": own} for name, fields in encoded.readers.items()}
    found = list(cache_rows.batches_by_length(dataclasses.replace(encoded, readers=readers), range(5), 2))
    assert [batch["index"][batch["valid"]].tolist() for batch in found] == [[3, 1], [4, 0], [2]]
    assert [batch["readers"]["qwen"]["own"]["mask"].shape[1] for batch in found] == [64, 192, 304]
    assert [cache_rows.round_columns(n) for n in (1, 64, 65, 96, 97, 640)] == [64, 64, 96, 96, 128, 768]


def test_half_of_the_texts_weigh_at_all_positions_and_half_at_the_ratio():
    rng = np.random.default_rng(0)
    read = [cache_start._Text(*rng.uniform(0.5, 1.0, (2, 40, 2, 1)).astype(np.float32)) for _ in range(2)]
    tables = [np.full((2, 1), 1 / ratio) for ratio in range(1, 5)]
    weights = cache_start._weights(read, tables, 4)
    least, most = cache_code.IMPORTANCE
    assert [(part > least / most + 1e-6).mean() for part in (weights[:40], weights[40:])] == [1.0, 0.25]
    kept = weights[40:] > least / most + 1e-6
    for layer in range(2):
        scores, kept_here = read[1].scores[:, layer], kept[:, layer]
        assert scores[kept_here].min() > scores[~kept_here].max()


SOURCES = [Example("", f"source {n // 100}, text {n}", QUESTION, ("bell",)) for n in range(200)]


def test_held_out_texts_are_of_all_sources():
    _, held_out = cache_start._divide(SOURCES, 200, 12, seed=0)
    assert collections.Counter(example.context[:8] for example in held_out) == {"source 0": 6, "source 1": 6}


def test_another_seed_reads_other_texts_of_the_same_sources():
    first, second, far = (cache_start._divide(SOURCES, 20, 12, seed=seed)[0] for seed in (0, 1, 2**40 + 2))
    assert {len({text.context for text in texts}) for texts in (first, second, far)} == {18}
    assert not {text.context for text in first} & {text.context for text in second + far}
    assert {text.context[:8] for text in second} == {"source 0", "source 1"}


@pytest.mark.parametrize("count", [1, 2])
def test_a_start_from_one_text_says_that_nothing_is_held_out(root, monkeypatch, caplog, count):
    monkeypatch.setattr(cache_start, "_fit", lambda *_: ({}, 0))
    monkeypatch.setattr(cache_start, "HeldOut", lambda *_: None)
    monkeypatch.setattr(cache_start, "_settle", lambda *_: {})
    cfg = make_config(root, only="qwen")
    recipe = CacheWire(cfg, tiny.place(cfg))
    examples = [Example("", f"Card {n % count}: a bell.", f"What has card {n}?", ("bell",)) for n in range(3)]
    monkeypatch.setattr(recipe.curriculum, "examples", lambda split: examples)
    cache_start.start(recipe, {"qwen": {}})
    assert ("nothing is held out" in caplog.text) == (count == 1)


@pytest.mark.parametrize("overlong", [0, 7])  # of one in eight the eighth is held out
def test_a_start_goes_without_texts_that_are_too_long_or_refuses_them(root, monkeypatch, overlong):
    examples = [
        Example("", f"Card {n}: a bell.{' It rings.' * 2000 * (n == overlong)}", QUESTION, ("bell",)) for n in range(16)
    ]
    fitted, held_out = [], []
    monkeypatch.setattr(cache_start, "_fit", lambda *given: fitted.extend(given[-1]) or ({}, 0))
    monkeypatch.setattr(cache_start, "HeldOut", lambda *given: held_out.extend(given[-1]))
    monkeypatch.setattr(cache_start, "_settle", lambda *given: {})

    def start(**changes):
        cfg = make_config(root, only="qwen", encoder__texts=16, **changes)
        recipe = CacheWire(cfg, tiny.place(cfg))
        monkeypatch.setattr(recipe.curriculum, "examples", lambda split: examples)
        cache_start.start(recipe, {"qwen": {}})
        return recipe.tokenizers["qwen"]

    tokenizer = start(data__overlong="drop")
    (batch,) = held_out
    own = batch["readers"]["qwen"]["own"]
    read = [tokenizer.decode(ids[mask].tolist()).strip() for ids, mask in zip(own["ids"], own["mask"], strict=True)]
    used = [[tokenizer.decode(ids).strip() for ids in fitted], [read[n] for n in np.flatnonzero(batch["valid"])]]
    cards = [[n for n in range(16) if n % 8 != 7 and n != overlong], [n for n in (7, 15) if n != overlong]]
    assert used == [[f"Card {n}: a bell." for n in part] for part in cards]
    with pytest.raises(UserError, match="1 of .* examples have a context beyond the limit"):
        start(data__overlong="refuse")


def test_the_taught_row_is_that_of_the_text_in_one_piece(wire):
    recipe, name = wire.recipe, "qwen"
    found, params = recipe.curriculum.examples("validation")[:3], wire.frozen[name]
    vector = np.full((1, recipe.wire.readers[name].config.width), 0.1, np.float32)
    whole = batches.encode(found, layout=recipe.layout, rows=("context", "asked")).collate(range(3))["readers"][name]
    parts = recipe.encode(found).collate(range(3))["readers"][name]
    readers = recipe.functions, wire.frozen, recipe.tokenizers
    bench = cache_rows.CacheSession(*readers, wire.codes, 2, taught={name: vector})
    row = bench.prompts(parts, name, ["text_taught"])["text_taught"]
    joined = recipe.functions.prompt_from_taught_text(params, whole, vector)
    scores = [bench.score(parts, name, prompt)["nll"] for prompt in (row.prompt, joined)]
    np.testing.assert_allclose(*scores, atol=1e-4)
    bare = bench.prompts(parts, name, ["text"])["text"].prompt
    assert np.abs(bench.score(parts, name, bare)["nll"] - scores[0]).max() > 1e-3


def test_answers_are_compared_with_those_behind_the_text(wire):
    recipe, name = wire.recipe, "llama"
    encoded = recipe.encode(recipe.curriculum.examples("validation")[:2])
    alone = dataclasses.replace(encoded, readers={name: encoded.readers[name]})
    pair_of_texts = list(cache_rows.batches_by_length(alone, range(2), 2))
    texts = HeldOut(recipe.functions, wire.frozen[name], name, wire.codes[name], pair_of_texts)
    text, none = (texts.answers_of_prompt(row) for row in ("text", "none"))
    np.testing.assert_allclose(text.kl, 0.0, atol=1e-5)

    fields, wanted = pair_of_texts[0]["readers"][name], {}
    answers = {key: fields[key] for key in ANSWER}
    for row in ("text", "none"):
        prompt = recipe.functions.prompt_from_text(wire.frozen[name], fields[row])
        logits = recipe.functions.answer_logits(wire.frozen[name], prompt, answers, name)
        wanted[row] = np.asarray(jax.nn.log_softmax(logits), np.float64)
    divergence = (np.exp(wanted["text"]) * (wanted["text"] - wanted["none"])).sum(axis=2) * fields["weights"]
    np.testing.assert_allclose(none.kl, divergence.sum(axis=1), rtol=1e-3)
    assert none.divergence > 1e-3


ROWS = ("text", "text_taught", "latents", "shuffled", "zero", "none", "all", "half", "quarter", "eighth")
ROWS += ("swapped", "swapped_text", "swapped_taught")


class Killed(BaseException):
    """What no code catches."""


@pytest.mark.usefixtures("opened")
def test_evaluation_has_the_rows_of_the_kind_and_resumes(run, root, capsys, monkeypatch):
    folder, cfg = run[0], make_config(root, eval__rows=ROWS, eval__taught_steps=2)
    answer, answered = cache_rows.CacheSession.answer, []

    def killed(*given, **options):
        if len(answered) == 2:
            raise Killed
        answered.append(given)
        return answer(*given, **options)

    def ask(self, split, *, least=0):
        asked.append(least)
        return questions(self, split, least=least)

    asked, questions = [], CacheWire.questions
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(cache_rows.CacheSession, "answer", killed)
        patch.setattr(CacheWire, "questions", ask)
        tiny.call("eval", cfg, folder)
    assert asked == [cfg.eval.examples], "also more than a run validates on"
    kept = len((folder / evaluation_log.PARTIAL).read_text("utf-8").splitlines()) - 1
    assert kept == 2 * cfg.eval.batch
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        with pytest.raises(UserError, match=r"encoder\.kind.*by one process"):
            tiny.call("eval", cfg, folder)
    times = coded_evaluation.measure_times

    def timed(wire, measured, name):
        if name == "qwen":
            raise UserError("nothing is kept")
        return times(wire, measured, name)

    monkeypatch.setattr(coded_evaluation, "measure_times", timed)
    other_cards = make_config(root, eval__rows=ROWS, eval__taught_steps=2, mesh__memory_gb=16.0)
    assert tiny.call("eval", other_cards, folder) == 0
    told = capsys.readouterr().out
    assert f"resuming: {kept} records" in told and not (folder / evaluation_log.PARTIAL).exists()
    found = json.loads((folder / "eval.json").read_text("utf-8"))
    assert "left out: zero:" in told and "qwen: not timed: nothing is kept" in told
    for name in ("llama", "qwen"):
        rows = found["rows"][name]
        plain = ["text", "text_taught", "latents", "shuffled", "none", "all", "half", "quarter", "eighth"]
        assert list(rows) == [*plain, "swapped", "swapped_text", "swapped_taught"]
        assert rows["text_taught"]["positions"] == rows["text"]["positions"] + 1
        assert 0 <= rows["swapped"]["follows"] <= 1 and "recovered_nll_half" in found["readers"][name]
        assert (
            ("first_token_seconds" in rows["latents"])
            == ("write_seconds" in found["readers"][name])
            == (name == "llama")
        )
        assert rows["half"]["nll"] == rows["latents"]["nll"] and rows["none"]["positions"] == 0
        assert abs(rows["all"]["nll"] - rows["text"]["nll"]) < 0.02
        assert rows["all"]["positions"] > 1.5 * rows["half"]["positions"] > 2 * rows["quarter"]["positions"]
        assert 100 < found["readers"][name]["bytes_a_token"] < 160  # of 130
    shown = page.render(records.read(folder))
    assert "not evaluated" not in shown and "No byte curve" not in shown


def test_a_wire_that_reads_at_a_ratio_is_evaluated_at_it(wire):
    other, cfg = wire.at(8), wire.recipe.cfg
    other.recipe = copy.copy(wire.recipe)
    options = dataclasses.replace(cfg.eval, rows=("latents", "eighth"), examples=cfg.eval.batch)
    other.recipe.cfg = dataclasses.replace(cfg, eval=options)
    records = coded_evaluation.measure(other, batch=options.batch).records
    assert {record["row"] for record in records if "bytes" in record} == {"latents", "eighth"}
    for at_eight, eighth in zip(records[::2], records[1::2], strict=True):
        assert at_eight["row"] == "latents" and at_eight["nll"] == eighth["nll"]


def test_several_processes_evaluate_in_the_batch_of_the_configuration(wire, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(memory_limit, "local", lambda cfg: 1.0)
    assert evaluation._batch(wire.recipe).size == wire.recipe.cfg.eval.batch


@pytest.mark.parametrize(
    "asked, match",
    [
        ({"context": TEXT, "ratio": 17}, "--ratio=17.*16"),
        ({"context": TEXT, "bits": 4}, "--bits 4.*--ratio"),
        ({"context": TEXT, "write": "/"}, "--write /: a folder"),
        ({"message": b"LWJX and more"}, "not a cache message"),
    ],
)
def test_what_the_kind_does_not_have_is_refused(run, asked, match):
    with pytest.raises(UserError, match=match):
        tiny.ask(run[1], run[0], question=[QUESTION], **asked)


def test_a_message_does_not_replace_the_text_that_it_is_written_from(run, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text(TEXT)
    with pytest.raises(UserError, match=r"--write .*notes\.txt: what is read from there would be lost"):
        tiny.call("answer", run[1], run[0], context=str(file), write=f"{tmp_path}/../{tmp_path.name}/notes.txt")
    assert file.read_text() == TEXT


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wires") / "pair"
    assert tiny.call("export", run[1], run[0], wire=str(folder)) == 0
    return folder


def test_an_exported_wire_in_int8_is_the_code_of_the_run(run, wire, message, exported, capsys, monkeypatch):
    other = lw_jax.load_wire(exported)
    assert isinstance(other, CodedWire)
    jax.tree.map(np.testing.assert_array_equal, wire.trainable, other.trainable)
    assert other.write(TEXT) == message and other.fingerprint == wire.fingerprint
    monkeypatch.setattr(trained_wire, "open_wire", lambda cfg, path, readers: other)
    assert tiny.ask(run[1], exported, context=TEXT, question=[QUESTION]) == 0
    told = capsys.readouterr().out
    assert f"qwen from message: {wire.read(message, 'qwen', QUESTION)}" in told
    assert f"qwen from text:    {wire.read_text(TEXT, 'qwen', QUESTION)}" in told


def test_an_export_in_another_dtype_has_a_code_of_its_own(run, wire, tmp_path):
    assert tiny.call("export", run[1], run[0], wire=str(tmp_path / "bf16"), dtype="bf16") == 0
    other = lw_jax.load_wire(tmp_path / "bf16")
    assert isinstance(other, CodedWire)
    with pytest.raises(UserError, match=other.codings["qwen"].fingerprint):
        other.read(wire.write(TEXT), "qwen", QUESTION)


def test_an_exported_wire_has_a_card_with_hashes_and_what_it_weighs(exported):
    card, told = (exported / "README.md").read_text("utf-8"), json.loads((exported / "config.json").read_text("utf-8"))
    assert told["dtype"] == "int8" and set(told["models"]) == {"llms/llama", "llms/qwen"}
    for model in told["models"].values():
        assert all(value in card for value in model["sha256"].values())
    assert (
        "keys and values" in card and "in closed form from at most 24 texts" in card and "larger than its text" in card
    )
    assert "steps" not in card.partition("## Start")[2].partition("````")[0]


@pytest.mark.parametrize("width, fits", [(1024, True), (1223, True), (1224, False), (2048, False)])
def test_the_widths_whose_pair_is_below_32_mb(width, fits):
    cfg = config.build(pair.get_config())
    cfg = dataclasses.replace(cfg, encoder=dataclasses.replace(cfg.encoder, width=width))
    recipe = CacheWire(cfg, tiny.place(cfg), outline=True)
    size = sum(wire_tensors.part_bytes(recipe.abstract.trainable, "int8").values())
    assert (size <= MOST_CACHE_BYTES) == fits


@pytest.mark.usefixtures("opened")
def test_a_message_is_written_to_a_file_and_asked_several_questions(run, wire, tmp_path, capsys):
    file, questions = tmp_path / "m.lwjc", (QUESTION, "Where is the bell?")
    assert tiny.ask(run[1], run[0], context=TEXT, write=str(file), ratio=4) == 0
    message = file.read_bytes()
    assert message == wire.write(TEXT, ratio=4)
    capsys.readouterr()
    assert tiny.ask(run[1], run[0], message=message, question=list(questions)) == 0
    told = capsys.readouterr().out
    for reader in ("llama", "qwen"):
        for question, found in zip(questions, wire.read(message, reader, questions), strict=True):
            assert f"question: {question}" in told and f"{reader} from message: {found}" in told
    with pytest.raises(UserError, match=r"ratio=2.*\(4,\)"):
        tiny.ask(run[1], run[0], message=message, question=list(questions), ratio=2)


def test_a_started_run_is_not_started_again(run, capsys):
    assert train.main(run[1], run[0]) == 0
    assert "texts" not in capsys.readouterr().out


TRAINING = {"train__steps": 4, "stages__pretrain__share": 0.5, "stages__pretrain__reconstruct": 1.0}
TRAINING |= {"stages__pretrain__lengths": (16,)}
LATENTS = {"encoder__kind": "bytes", "encoder__texts": 400, "message__bytes": 256}


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"encoder__ratio": 0}, "encoder.ratio = 0"),
        ({"encoder__ratio": 17}, "encoder.ratio = 17"),
        ({"encoder__source": "models/x"}, "encoder.source = 'models/x'"),
        ({"encoder__run": "runs/x"}, "encoder.run = 'runs/x'"),
        (LATENTS | {"message__bytes": 130}, "message.bytes = 130"),
        (LATENTS | {"encoder__texts": 24}, "encoder.texts = 24"),
        (LATENTS, "train.steps = 0"),
        (LATENTS | {"train__steps": 6, "eval__rows": ("half",)}, "eval.rows"),
        (TRAINING | {"stages__align__share": 0.25}, "stages.align.share = 0.25"),
        (TRAINING | {"stages__pretrain__reconstruct": 0.3}, "stages.pretrain.reconstruct = 0.3"),
        (TRAINING | {"stages__answer__ratios": (2, 32)}, "stages.answer.ratios = 32"),
        (TRAINING | {"stages__answer__slots": (2,)}, r"stages.answer.slots = \(2,\)"),
        (TRAINING | {"loss__kl": 1.0}, "loss.kl = 1.0"),
        (TRAINING | {"data__packed_tokens": 256}, "data.packed_tokens = 256"),
    ],
)
def test_configurations_that_do_not_go_with_the_kind_are_refused(root, changes, match):
    with pytest.raises(UserError, match=rf"config\.{match}"):
        validation.validate(tiny.make_config(root, **tiny.CACHE | changes))


def test_the_tree_is_what_is_described(wire):
    wanted = wire.recipe.abstract.trainable
    assert jax.tree.map(lambda x: (x.shape, x.dtype), wanted) == jax.tree.map(
        lambda x: (x.shape, x.dtype), wire.trainable
    )
    code = wire.trainable["codes"]["llama"]
    np.testing.assert_allclose(np.asarray(code["tables"]).mean(axis=(1, 2)), 1 / np.arange(1, 17), atol=0.02)
    np.testing.assert_allclose(code["basis"] @ code["basis"].T, np.eye(len(code["basis"])), atol=0.02)
    assert cache_codec.bits(cache_message.statistics_of(code, 2), wire.section(wire.write(TEXT), "llama").numbers) > 0


@pytest.fixture(scope="module")
def other_readers(tmp_path_factory):
    """A wire whose readers have a sliding window, and LongRope, longer than a text that is read twice."""
    pytest.importorskip("torch", reason="tiny_models needs torch: pip install -r requirements-dev.txt")
    from examples import tiny_models

    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i / 7 for i in range(10)]}
    long |= {"long_factor": [2.0 + i for i in range(10)], "original_max_position_embeddings": LIMIT}
    folders = {name: tmp_path_factory.mktemp(name) for name in ("window", "long")}
    tiny_models.make(folders["window"], "phi3", sliding_window=LIMIT)
    tiny_models.make(folders["long"], "phi3", rope_parameters=long, original_max_position_embeddings=LIMIT)
    changes: dict[str, Any] = tiny.CACHE | {"encoder__width": 1000, "encoder__texts": 16}
    changes |= {"data__context_tokens": 96, "message__bytes": 180}
    return tiny.make_wire(folders["long"], models=folders, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("reader, rule", [("window", "attends to 512"), ("long", "LongRope.*512")])
def test_windows_and_long_rope_work_within_their_length_and_are_refused_beyond(other_readers, reader, rule):
    whole = other_readers.write(TEXT, ratio=1)
    coded, _ = next(other_readers._prompts([(whole, QUESTION)], reader))
    assert coded.packed is None, "their keys go by positions"
    read = other_readers.text_prompt(TEXT, reader, QUESTION)
    params, begin = other_readers.frozen[reader], other_readers.recipe.wire.begin
    found = [np.asarray(begin(params, reader, one, max_new_tokens=1)[0][0]) for one in (coded, read)]
    assert np.corrcoef(np.stack(found))[0, 1] > ALIKE
    assert other_readers.read(other_readers.write(TEXT), reader, QUESTION)
    with pytest.raises(UserError, match=f"encoder.kind='cache'.*{rule}.*shorten"):
        other_readers.write(" ".join([TEXT] * 20), readers=(reader,))


PRESSES = """
import json, sys
from pathlib import Path
case = json.loads(Path(sys.argv[1]).read_text())
print("a press says something of its own")
for press, ratio, nll in ("text", 1, 0.5), ("nothing", 1, 2.5), *((one, 2, 1.5) for one in case["presses"]):
    for number, ids in enumerate(case["questions"]):
        sizes = {"positions": len(ids["text"]), "kept_bytes": 8, "held_bytes": 8, "write_seconds": 0.1}
        row = {"press": press, "ratio": ratio, "question": number, "nll": nll, "tokens": 1, "ids": ids["answer"]}
        print(json.dumps(row | sizes))
sys.exit(len(case["presses"]) - 2)
"""


def test_a_reader_that_is_packed_has_no_peer(run, tmp_path):
    words = ["--workdir", str(run[0]), "--python", sys.executable, "--out", str(tmp_path / "rows.jsonl")]
    with pytest.raises(UserError, match=r"--reader qwen: its weights are packed \(int8\)"):
        peer_compaction.main([*words, "--reader", "qwen", "--config.llms.qwen.weights=int8"])


@pytest.mark.slow
def test_our_rows_stand_beside_those_of_a_child_with_presses(run, tmp_path, monkeypatch, capsys):
    child, file = tmp_path / "child.py", tmp_path / "rows.jsonl"
    child.write_text(PRESSES)
    monkeypatch.setattr(peer_compaction, "CHILD", child)
    words = ["--workdir", str(run[0]), "--reader", "llama", "--python", sys.executable, "--ratios", "2"]
    words += ["--questions", "2", "--out", str(file), "--presses"]
    assert peer_compaction.main([*words, "One,Two"]) == 0
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert collections.Counter(row["press"] for row in rows) == dict.fromkeys(
        ("ours", "text", "nothing", "One", "Two"), 2
    )
    assert all(row["f1"] == 1.0 for row in rows if row["press"] != "ours"), "the answers' own ids came back"
    for row in rows[:2]:
        assert row["message_bytes"] > 0 and row["tokens"] > 0 and np.isfinite(row["nll"])
        assert 0.3 < row["positions"] / rows[2 + row["question"]]["positions"] < 0.7
    lines = {line.split("|")[1].strip(): line for line in capsys.readouterr().out.splitlines() if line.count("|") > 2}
    assert "0.500" in lines["One"] and lines.keys() >= {"ours", "text", "nothing", "Two"}
    with pytest.raises(UserError, match=r"child\.py ended with 1"):
        peer_compaction.main([*words, "One,Two,Three"])
