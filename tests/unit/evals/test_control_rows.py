"""The control table of a random wire: rows that really differ, and sums that are what they say."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from lw_jax.core import compiling, eval_rows
from lw_jax.core.types import Example
from lw_jax.data import batches
from lw_jax.data.examples import spread
from lw_jax.evals import comparison, control_rows, message_latents, swaps, verdict
from tests import tiny

ROWS = ("text", "latents", "shuffled", "random", "zero", "none", "truncated", "ceiling")
SWAPPED = ("swapped", "swapped_text")
COUNT, BATCH = 7, 4  # the last batch is filled up
DIFFERENT = 1e-3  # nats; the losses of one example may come that near by chance


@pytest.fixture(scope="module")
def measured(root):
    """(recipe, functions, weights, what was measured, its records) of one reader."""
    recipe = tiny.make_recipe(root, only="qwen")
    built = recipe.build()
    encoded = recipe.data("validation", rows=eval_rows.fields_of(ROWS))
    encoded = control_rows.attach_ceiling(encoded, spread(len(encoded), COUNT))
    options = dataclasses.replace(
        recipe.cfg.eval, examples=COUNT, batch=BATCH, rows=(*ROWS, *SWAPPED), max_new_tokens=3
    )
    bench = tiny.make_bench(recipe, built)
    changed = swaps.make(encoded, spread(len(encoded), COUNT), layout=recipe.layout, fields=("text",))
    found = control_rows.measure(bench, encoded, options=options, seed=5, swaps=changed)
    plain = [record for record in found.records if record["row"] in ROWS]
    return recipe, bench.functions, built, found, plain


def of_row(records, row, key="nll"):
    return np.asarray([record[key] for record in records if record["row"] == row])


def test_every_example_is_measured_once_in_each_row(measured):
    *_, found, records = measured
    encoded = found.encoded
    assert len(records) == COUNT * len(ROWS)
    ids = [record["id"] for record in records if record["row"] == "text"]
    assert len(set(ids)) == COUNT
    by_id = {example.id: example for example in encoded.examples}
    for record in records:
        assert record["question"] == by_id[record["id"]].question
        assert record["answers"] == list(by_id[record["id"]].answers)
        assert record["tokens"] >= 2 and 0 <= record["hits"] <= record["tokens"] and record["first"] in (0, 1)
        assert encoded.examples[record["index"]].id == record["id"]


def test_measured_questions_and_answers_longer_than_what_is_generated_are_counted(measured):
    recipe, *_, found, _ = measured
    lengths = [len(found.encoded.readers["qwen"]["answer"].ids[index]) - 1 for index in found.indices]
    told = [
        control_rows.describe_measured(
            found.encoded, dataclasses.replace(recipe.cfg.eval, examples=examples, max_new_tokens=most)
        )
        for examples, most in ((0, 99), (COUNT, max(lengths)), (COUNT, max(lengths) - 1))
    ]
    assert told[0] == [] and told[1] == told[2][:-1] == [f"  {COUNT} of them are measured"]
    assert f"answers of {lengths.count(max(lengths))} of {COUNT} " in told[2][-1]


def test_rows_find_their_programs_compiled(measured, compiled, monkeypatch):
    recipe, _, built, found, _ = measured

    def compile_together(programs):
        compiling.compile_together(programs)
        assert compiled.count("jit(_answer)") == 2, "text; latents and shuffled"
        compiled.clear()

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    # JAX describes a lowered Prompt's fields in a Prompt.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setattr(control_rows, "compile_together", compile_together)
    rows = ("text", "latents", "shuffled")
    options = dataclasses.replace(recipe.cfg.eval, examples=COUNT, batch=BATCH, rows=rows, max_new_tokens=3)
    control_rows.measure(tiny.make_bench(recipe, built), found.encoded, options=options)
    assert "jit(_answer)" not in compiled


def test_gold_first_token_among_the_five_likeliest_is_counted(measured):
    recipe, functions, built, found, records = measured
    batch = jax.tree.map(jnp.asarray, found.encoded.collate(found.indices))["readers"]["qwen"]
    prompt = functions.prompt_from_text(built.frozen["qwen"], batch["text"])
    logits = recipe.wire.answer_logits(built.frozen["qwen"], "qwen", prompt, batch)[:, 0]
    likeliest = np.argsort(-np.asarray(logits), axis=1)
    gold = np.asarray(batch["targets"])[:, :1]
    expected = (likeliest[:, :5] == gold).any(axis=1)
    np.testing.assert_array_equal(of_row(records, "text", "first5"), expected)
    # A random reader has few hits: the same count over targets that it does find likely.
    for rank in (0, 4, 5, 150):
        fields = {key: batch[key] for key in ("answer_inputs", "weights")}
        fields["targets"] = batch["targets"].at[:, 0].set(likeliest[:, rank])
        scores = functions.score(built.frozen["qwen"], prompt, fields, "qwen")
        np.testing.assert_array_equal(scores["first5"], np.full(COUNT, float(rank < 5)), err_msg=str(rank))
        np.testing.assert_array_equal(scores["first"], np.full(COUNT, float(rank == 0)), err_msg=str(rank))


def test_rows_of_a_random_wire_really_differ(measured):
    *_, records = measured
    for one, other in itertools.combinations(ROWS, 2):
        difference = np.abs(of_row(records, one) - of_row(records, other))
        assert (difference > DIFFERENT).sum() >= COUNT - 1, (one, other, difference)


def test_random_latents_have_the_moments_and_sizes_of_the_real_ones():
    real = np.random.default_rng(1).normal(0.5, 2.0, (400, 3, 8)).astype(np.float32)
    real /= np.sqrt((real**2).mean(axis=2, keepdims=True))
    drawn = message_latents.draw(real, np.full(400, 3), seed=0)
    np.testing.assert_allclose((drawn**2).mean(axis=2), 1.0, rtol=1e-5)
    np.testing.assert_allclose(drawn.std(axis=0), real.std(axis=0), rtol=0.15)
    assert np.abs(np.corrcoef(drawn[:, 0, 0], real[:, 0, 0])[0, 1]) < 0.2
    short = np.where(np.arange(400) < 200, 3, 1)
    real[:200, 1:] += 3.0 * np.sqrt((real[:200, 1:] ** 2).mean(axis=2, keepdims=True))
    real[200:, 1:] = 0.0
    drawn = message_latents.draw(real, short, seed=0)
    assert not drawn[200:, 1:].any() and drawn[200:, 0].any()
    np.testing.assert_allclose(drawn[:200].mean(axis=0), real[:200].mean(axis=0), atol=0.3)


def test_a_text_of_several_questions_is_encoded_once(measured):
    *_, found, _ = measured
    double = dataclasses.replace(
        found.encoded,
        source=dataclasses.replace(found.encoded.source, ids=[found.encoded.source.ids[i // 3] for i in range(9)]),
        examples=tuple(found.encoded.examples[i // 3] for i in range(9)),
    )
    seen = []

    def encode(source):
        seen.append(source["ids"])
        return source["ids"][:, :4, None].astype(np.float32)

    made = message_latents.make(encode, double, range(9), kinds={"own", "other"}, batch=2, seed=0)
    assert sum(len(ids) for ids in seen) == 4, "three texts in batches of two"
    expected = np.stack([double.source.ids[i][:4] for i in range(9)])
    np.testing.assert_array_equal(made["own"].values[..., 0], expected)
    np.testing.assert_array_equal(made["other"].values[..., 0], expected[[3, 3, 3, 6, 6, 6, 0, 0, 0]])


def test_positions_are_those_that_hold_the_context(measured):
    recipe, *_, found, records = measured
    tokenizer, frame = recipe.tokenizers["qwen"], found.encoded.readers["qwen"]
    slots = recipe.cfg.encoder.slots
    of = {row: of_row(records, row, "positions") for row in ROWS}
    for row in ("latents", "shuffled", "random", "zero"):
        assert set(of[row]) == {slots + 1}, row
    assert set(of["ceiling"]) == {slots + 1}
    assert set(of["none"]) == {0} and set(of["truncated"]) == {slots}
    for position, index in enumerate(found.indices):
        alone = len(tokenizer.encode_batch([found.encoded.examples[index].context])[0])
        assert abs(of["text"][position] - alone) <= 2 and of["text"][position] < len(frame["text"].ids[index])


def test_swapped_rows_read_the_changed_text(measured):
    recipe, functions, built, found, _ = measured
    told, read = found.of("qwen", "swapped"), found.of("qwen", "swapped_text")
    assert len(told) == len(read) == COUNT
    own = {record["index"]: record for record in found.of("qwen", "text")}
    latents = {record["index"]: record for record in found.of("qwen", "latents")}
    for record in (*told, *read):
        original = own[record["index"]]
        assert record["id"] == original["id"] and record["question"] == original["question"]
        assert record["answers"] != original["answers"] and len(record["answers"]) == 1
        assert record["follows"] in (0.0, 1.0)
    assert np.mean([abs(one["nll"] - latents[one["index"]]["nll"]) for one in told]) > DIFFERENT
    assert np.mean([abs(one["nll"] - own[one["index"]]["nll"]) for one in read]) > DIFFERENT


def swapped(context, answer, *others):
    one, *rest = (Example(str(i), context, "?", (word,)) for i, word in enumerate((answer, *others)))
    found = swaps.swap(one, rest)
    return found and (found.context, found.answers)


def test_text_that_still_holds_another_reference_is_not_exchanged():
    one, other = Example("0", "He came in May, the 5th of May 1999.", "?", ("May 1999", "May")), ("June 2001",)
    assert swaps.swap(one, [dataclasses.replace(one, answers=other)]) is None
    assert swaps.swap(dataclasses.replace(one, answers=one.answers[:1]), [dataclasses.replace(one, answers=other)])


def test_texts_are_searched_for_the_answers_that_may_be_taken_not_for_all(monkeypatch):
    asked = [Example(str(i), f"Key {1000 + i} opens.", "?", (str(1000 + i),)) for i in range(50)]
    searched, contains = [], swaps.contains
    monkeypatch.setattr(swaps, "contains", lambda *texts: searched.append(texts) or contains(*texts))
    found = [swaps.swap(one, asked[i + 1 :] + asked[:i]) for i, one in enumerate(asked)]
    assert [one and one.answers[0] for one in found] == [str(1000 + (i + 1) % 50) for i in range(50)]
    assert len(searched) < 4 * len(asked), "for each of a thousand questions a thousand took minutes without a word"


def test_swap_replaces_every_occurrence_by_an_answer_of_the_same_kind():
    assert swapped("In 1999 he came; 1999, not 19990.", "1999", "Paul", "7 May") == (
        "In 7 May he came; 7 May, not 19990.",
        ("7 May",),
    )
    assert swapped("In May he may go.", "May", "June") is None, (
        "an own answer stands there still, as a word of the text"
    )
    assert swapped("7 of 1.7, 7.5 and 1,7, at 7.", "7", "8") == ("8 of 1.7, 7.5 and 1,7, at 8.", ("8",))
    assert swapped("Anna met Anna Lee.", "Anna", "a dog", "Rome", "Mary Ann") == ("Rome met Rome Lee.", ("Rome",))
    assert swapped("Anna met Ben.", "Anna", "Ben", "a cat") == ("a cat met Ben.", ("a cat",)), "another kind is left"
    assert swapped("Anna met Ben.", "Carl", "Dora") is None, "the answer is not in the text"
    assert swapped("Anna met Ben.", "Anna", "Ben", "anna") is None
    assert swapped("He came in 1999.", "1999", "4 July 1999") is None
    held = swapped("He came in 1999.", "1999", "4 July 1999", "2001")
    assert held == ("He came in 2001.", ("2001",)), "a new answer that holds the old one could not be told from it"
    assert swapped(r"a \1 b", r"\1", r"\2") == (r"a \2 b", (r"\2",))


@pytest.mark.parametrize("limits", [{"data__context_tokens": 120, "encoder__windows": 4}, {"encoder__window": 64}])
def test_an_answer_that_is_cut_away_is_not_exchanged(root, limits):
    recipe = tiny.make_recipe(root, only="qwen", data__overlong="cut", **limits)
    rest = "It rains and it snows here. " * 12
    texts = [(f"Ann is in {city}. {rest}", f"{rest} Ann is in {city}.") for city in ("Rome", "Oslo", "Bonn")]
    asked = [
        Example(str(n), text, "Where?", (city,))
        for n, (text, city) in enumerate((text, text.partition("Ann is in ")[2][:4]) for both in texts for text in both)
    ]
    for rows in (("text", "swapped_text"), ("swapped",), ("latents", "swapped")):  # records of each serve the others
        fields = eval_rows.fields_of(rows)
        encoded = batches.encode(asked, layout=recipe.layout, rows=fields)
        found = swaps.make(encoded, range(len(asked)), layout=recipe.layout, fields=fields)
        assert found.origins == [0, 2, 4] and found.replaced == ["Rome", "Oslo", "Bonn"]


SEED = {"seed": 0}


def record(row, index=0, **values):
    base = {"reader": "r", "row": row, "index": index, "text": index, "prediction": "x", "em": 0.0, "f1": 0.0}
    return base | {"nll": 1.0, "hits": 1.0, "first": 0.0, "first5": 0.0, "tokens": 2.0, "positions": 6.0} | values


def test_rows_of_the_same_texts_share_their_resamples(monkeypatch):
    drawn = []

    class Counted(comparison.Bootstrap):
        def __init__(self, texts, **settings):
            drawn.append(texts)
            super().__init__(texts, **settings)

    monkeypatch.setattr(comparison, "Bootstrap", Counted)
    made = [record(row, i, reader=name) for row in ("text", "latents", "none") for i in range(4) for name in "ab"]
    made += [record("swapped", i, follows=1.0) for i in range(2)]
    comparison.summarise(made, **SEED)
    assert sorted(drawn) == [(0, 1), (0, 1, 2, 3)]
    drawn.clear()
    comparison.compare(made, **SEED)
    assert drawn == [(0, 1, 2, 3)]


def test_summary_weighs_likelihood_by_tokens_and_scores_by_examples():
    found = comparison.summarise(
        [
            record("text", nll=9.0, tokens=3.0, hits=3.0, em=1.0, f1=1.0, first=1.0, first5=1.0, prediction="y"),
            record("text", 1, nll=1.0, tokens=7.0, hits=1.0, f1=0.5, first5=1.0),
            record("text", 2, nll=0.0, tokens=2.0, hits=0.0),
            record("none", nll=4.0, tokens=2.0),
        ],
        **SEED,
    )
    text = found["r"]["text"]
    assert text["nll"] == pytest.approx(10 / 12)
    assert text["accuracy"] == pytest.approx(4 / 12)
    assert (text["em"], text["f1"], text["first_token"]) == pytest.approx((1 / 3, 0.5, 1 / 3))
    assert text["first_5"] == pytest.approx(2 / 3)
    assert text["distinct"] == pytest.approx(2 / 3)
    assert (text["examples"], text["tokens"]) == (3, 12)
    assert found["r"]["none"]["nll"] == 2.0
    for key in ("em", "f1", "nll", "first_token"):
        assert text[f"{key}_interval"][0] < text[key] < text[f"{key}_interval"][1], key
        assert found["r"]["none"][f"{key}_interval"] is None, "of one example"


def make_rows(count=11, *, noise=0.5, gap=2.0, text_f1=0.8):
    """Rows whose examples are hard together: paired differences are much surer than each row."""
    hard = np.random.default_rng(0).normal(0, 3.0, count)
    made = []
    for row, nll, f1 in (("text", 1.0, text_f1), ("latents", 2.0, 0.5), ("shuffled", 2.0 + gap, 0.1), ("none", 5, 0.2)):
        own = np.random.default_rng(len(row)).normal(0, noise, count)
        made += [record(row, i, nll=20 + 2 * nll + hard[i] + own[i], f1=f1) for i in range(count)]
    return made


def test_figures_between_rows_are_the_shares_and_gaps_of_their_means():
    made = make_rows()
    means, found = comparison.summarise(made, **SEED)["r"], comparison.compare(made, **SEED)["r"]
    nll = {row: values["nll"] for row, values in means.items()}
    assert found["normalised_f1"] == pytest.approx((0.5 - 0.2) / (0.8 - 0.2))
    assert found["recovered_nll"] == pytest.approx((nll["none"] - nll["latents"]) / (nll["none"] - nll["text"]))
    assert found["gap_nll"] == pytest.approx(nll["shuffled"] - nll["latents"])
    assert found["gap_f1"] == pytest.approx(0.4)
    assert found["own_nll"] == pytest.approx((nll["shuffled"] - nll["latents"]) / (nll["shuffled"] - nll["text"]))
    assert found["own_f1"] == pytest.approx((0.5 - 0.1) / (0.8 - 0.1))
    for key in ("recovered_nll", "gap_nll"):
        assert found[f"{key}_interval"][0] < found[key] < found[f"{key}_interval"][1]
    alone = [one | {"row": "eighth"} for one in made if one["row"] == "latents"]
    alone = comparison.compare([*alone, *(one for one in made if one["row"] in ("text", "none"))], **SEED)["r"]
    assert alone["normalised_f1_eighth"] == found["normalised_f1"] and "normalised_f1" not in alone


def test_intervals_and_verdict_count_texts_not_questions():
    apart = make_rows(32)
    together = [one | {"text": one["index"] // 8} for one in apart]
    wide, narrow = (comparison.compare(made, **SEED)["r"] for made in (together, apart))
    assert (wide["examples"], wide["texts"], narrow["texts"]) == (32, 4, 32)
    assert wide["gap_nll"] == narrow["gap_nll"] and wide["gap_nll_interval"] != narrow["gap_nll_interval"]
    assert verdict.judge(wide) == "unknown" != verdict.judge(narrow)
    assert comparison.summarise(together, **SEED)["r"]["latents"]["texts"] == 4


def test_share_is_unknown_with_its_reason_where_text_is_no_better_than_none():
    found = comparison.compare(make_rows(text_f1=0.2), **SEED)["r"]
    assert found["normalised_f1"] is None and found["normalised_f1_interval"] is None
    assert found["normalised_f1_reason"] and found["recovered_nll"] is not None
    assert found["normalised_f1_reason"] in comparison.format_comparison("r", found)
    beaten = comparison.compare(make_rows(text_f1=0.05), **SEED)["r"]
    assert beaten["own_f1"] is None and beaten["own_f1_reason"] and beaten["own_nll"] is not None
    timed = comparison.format_comparison("r", {"faster": 2.0, "timed_tokens": 9, "timed_ratio": 4})
    assert "a text of 9 tokens; the message has one of 4 positions" in timed
    nothing_kept = [one | {"positions": 0.0} if one["row"] == "latents" else one for one in make_rows()]
    assert "fewer_positions" not in comparison.compare(nothing_kept, **SEED)["r"]


def test_a_taught_text_is_the_upper_row():
    made = make_rows()
    taught = [one | {"row": "text_taught", "f1": 1.0, "positions": 30.0} for one in made if one["row"] == "text"]
    found = comparison.compare(made + taught, **SEED)["r"]
    assert found["upper"] == "text_taught" and found["fewer_positions"] == 5.0
    assert found["normalised_f1"] == pytest.approx((0.5 - 0.2) / (1.0 - 0.2))


def test_followed_messages_are_counted_among_followed_texts():
    text = [record("swapped_text", i, follows=float(i < 4)) for i in range(8)]
    message = [record("swapped", i, follows=float(i in (0, 1, 2, 7))) for i in range(8)]
    found = comparison.compare([*text, *message, record("latents", 0)], **SEED)["r"]
    assert found["follows"] == 0.75 and found["follows_interval"][0] < 0.75 < found["follows_interval"][1]
    assert comparison.summarise([*text, *message], **SEED)["r"]["swapped"]["follows"] == 0.5
    none = comparison.compare([*(one | {"follows": 0.0} for one in text), *message], **SEED)["r"]
    assert none["follows"] is None and "follows unknown" in comparison.format_comparison("r", none)


@pytest.mark.parametrize(
    ("answer", "prediction"),
    [("Mara", "Mara"), ("Mara\nLisbon", "Mara\nLisbon\nQuestion: and")],
)
def test_a_prediction_is_the_first_line_unless_a_reference_has_several(answer, prediction):
    example = Example("1", "text", "who?", (answer,))
    assert control_rows.judge(example, " Mara\nLisbon\nQuestion: and ")["prediction"] == prediction


def test_a_first_token_that_takes_minutes_stands_apart_from_its_neighbours():
    figures = dict.fromkeys(("em", "f1", "nll", "accuracy", "first_token", "first_5", "distinct"), 0.5)
    figures |= {"positions": 14_270.5, "first_token_seconds": 122.0, "f1_interval": None}
    line = comparison.table({"llama": {"text": figures}}).splitlines()[-1]
    assert line.split()[2:4] == ["14270.5", "122,000.0"]
