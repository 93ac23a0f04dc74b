"""Messages with literals: written, read, measured in rows of their own, and counted in bytes and positions."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import lw_jax
from lw_jax.commands import train
from lw_jax.core import config, eval_rows, validation
from lw_jax.core.errors import UserError
from lw_jax.data import prompt_tokens
from lw_jax.evals import comparison, control_rows, joint, quality_curve, verdict
from lw_jax.inference import evaluation
from lw_jax.models import codec
from lw_jax.training import run_folder
from tests import tiny

WORDS = 3
TEXT = "Mira keeps a copper lantern in the old mill."
ROWS = ("text", "latents", "shuffled", "none", *eval_rows.OF_LITERALS)
EMBEDDINGS = 2e-5  # fp32 of unit size


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LW_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def wire(root, cache, tmp_path_factory):
    source = str(tiny.readers(root)["llama"])
    changes = {"encoder__kind": "lm", "encoder__source": source, "message__literals": WORDS}
    changes |= {"train__steps": 2, "train__checkpoint_every": 2, "mesh__placement": "single"}
    cfg, folder = tiny.make_config(root, **changes), tmp_path_factory.mktemp("wire")
    run_folder.write_workdir(folder, cfg=cfg, base={}, command=["test"])
    assert train.main(cfg, folder) == 0
    return lw_jax.load_wire(folder)


def prompt_of(wire, monkeypatch, ask):
    """Embeddings of the prompt's real positions that a call hands to its reader."""
    caught = []
    monkeypatch.setattr(wire, "_answer", lambda reader, prompt, count: caught.append(prompt) or [""])
    ask()
    monkeypatch.undo()
    return np.asarray(caught[0].embeddings)[np.asarray(caught[0].mask)]


def test_message_carries_the_words_that_its_data_set_would_have(wire):
    message = wire.write(f" {TEXT}\n")
    frame = codec.read_frame(message)
    assert frame.literals == wire.recipe.surprisal.choose(TEXT, WORDS) != ()
    assert sum(len(phrase.split()) for phrase in frame.literals) == WORDS
    bare = wire.write(TEXT, literals=0)
    assert codec.read_frame(bare).literals == () and len(bare) < len(message)
    np.testing.assert_array_equal(*(codec.unpack(one, encoder=wire.encoder_fingerprint) for one in (bare, message)))
    assert len(codec.read_frame(wire.write(TEXT, literals=1)).literals) == 1


@pytest.mark.parametrize("words", [-1, WORDS + 1])
def test_more_words_than_the_readers_know_are_refused_both_ways(wire, words):
    with pytest.raises(UserError, match=rf"literals={words}: .*message\.literals={WORDS}"):
        wire.write(TEXT, literals=words)
    latents = codec.unpack(wire.write(TEXT), encoder=wire.encoder_fingerprint)
    sent = codec.pack(latents, bits=8, encoder=wire.encoder_fingerprint, literals=("a b", "c", "d"))
    with pytest.raises(UserError, match=rf"literals=4: .*message\.literals={WORDS}"):
        wire.read(sent, "qwen", "Who?")


@pytest.mark.parametrize("name", ["llama", "qwen"])
@pytest.mark.parametrize("words", [WORDS, 0])
def test_reader_has_the_message_s_literals_between_task_and_question(wire, name, words, monkeypatch):
    message = wire.write(TEXT, literals=words)
    found = prompt_of(wire, monkeypatch, lambda: wire.read(message, name, "Who keeps it?"))
    latents = codec.unpack(message, encoder=wire.encoder_fingerprint)
    prefix = wire.recipe.wire.prefix(wire.trainable["adapters"][name], name, jnp.asarray(latents)[None], "answer")
    table, one = np.asarray(wire.frozen[name]["embed"]), wire.recipe.tokenizers[name]
    said = one.encode(prompt_tokens.JOINED.join(codec.read_frame(message).literals))
    parts = [table[[*one.begin, *one.encode("Context:\n")]], prefix[0], table[said]]
    expected = np.concatenate([*parts, table[one.encode("\nQuestion: Who keeps it?\nAnswer:")]])
    np.testing.assert_allclose(found, expected, atol=EMBEDDINGS)
    assert bool(said) == bool(words)


@pytest.fixture(scope="module")
def measured(wire):
    bench = tiny.make_bench(wire.recipe, built(wire))
    fields = eval_rows.fields_of(ROWS)
    options = dataclasses.replace(wire.recipe.cfg.eval, rows=ROWS, curve_examples=5)
    return bench, control_rows.measure(bench, wire.recipe.data("validation", rows=fields), options=options), options


def built(wire):
    from lw_jax.training.recipe import Weights

    return Weights(wire.trainable, wire.frozen)


def test_rows_are_each_part_alone_and_both_and_positions_count_the_literals(measured):
    _, found, _ = measured
    for name in ("llama", "qwen"):
        nll = {row: np.array([record["nll"] for record in found.of(name, row)]) for row in ROWS}
        for row in ("message", "message_shuffled", "literals"):
            assert all(np.abs(nll[row] - nll[other]).max() > 1e-3 for other in ROWS if other != row), row
        field = found.encoded.readers[name]["literals"]
        for row, slots, words in (("latents", 5, 0), ("message", 5, 1), ("message_shuffled", 5, 1), ("literals", 0, 1)):
            for record in found.of(name, row):
                assert record["positions"] == slots + 1 + words * len(field.ids[record["index"]])


def test_what_latents_add_is_the_message_against_the_same_literals_with_other_latents(measured):
    _, found, _ = measured
    figures = comparison.compare(found.records, seed=0)["llama"]
    nll = {row: sum(record["nll"] for record in found.of("llama", row)) for row in ROWS}
    tokens = sum(record["tokens"] for record in found.of("llama", "text"))
    assert figures["adds_nll"] == pytest.approx((nll["message_shuffled"] - nll["message"]) / tokens)
    assert figures["gap_nll"] == pytest.approx((nll["shuffled"] - nll["latents"]) / tokens)
    assert figures["fewer_positions"] == pytest.approx(
        sum(record["positions"] for record in found.of("llama", "text"))
        / sum(record["positions"] for record in found.of("llama", "message"))
    )
    clear = {"adds_f1": 0.1, "adds_f1_interval": [0.01, 0.2], "adds_nll": 1.0, "adds_nll_interval": [0.5, 1.5]}
    assert not verdict.adds_nothing(clear) and not verdict.adds_nothing({})
    for key, changed in (("literals", "adds_nll_interval"), ("likelier", "adds_f1_interval")):
        assert verdict.judge(clear | {changed: [-0.1, 0.3]}) == key != verdict.judge(clear)


def test_curve_and_joint_answers_are_of_whole_messages(wire, measured):
    bench, found, options = measured
    encoder = wire.encoder_fingerprint
    curve = quality_curve.sweep(
        bench, found, options=options, sent=wire.recipe.cfg.stages.answer, encoder=encoder, seed=0
    )
    examples = [found.encoded.examples[i] for i in found.indices]
    chosen = [examples[i * len(examples) // 5] for i in range(5)]
    latents = np.ones((5, 24), np.float32)
    sizes = [len(codec.pack(latents, bits=4, encoder=encoder, literals=one.literals)) for one in chosen]
    four = next(point for point in curve.points if point["bits"] == 4)
    assert four["framed_bytes"] == pytest.approx(np.mean(sizes)) and four["framed_bytes"] > codec.framed_bytes(5, 24, 4)
    taken = [found.of("llama", "message")[i * len(examples) // 5]["positions"] for i in range(5)]
    (llama,) = {point["positions"] for point in curve.points if point["reader"] == "llama"}
    assert llama == pytest.approx(np.mean(taken)) and llama > 5 + 1, "slots, the task's vector, and literals"
    told = joint.pick(bench, found, wire.recipe.layout, options=options, seed=0)
    assert told is not None and "joint_nll" in found.of("llama", "message")[0]
    assert "joint_nll" not in found.of("llama", "latents")[0]


def test_rows_of_literals_are_measured_unless_some_are_named(wire):
    default = config.Eval().rows
    assert eval_rows.measured(default, literals=True) == (*default, *eval_rows.OF_LITERALS)
    assert eval_rows.measured(default, literals=False) == default
    assert eval_rows.measured(("text", "message"), literals=True) == ("text", "message")
    assert {record["row"] for record in evaluation.measure(wire).records} == {*default, *eval_rows.OF_LITERALS}


def test_row_of_literals_alone_needs_some(root):
    with pytest.raises(UserError, match=r"config\.eval\.rows"):
        validation.validate(tiny.make_config(root, eval__rows=("literals",)))
