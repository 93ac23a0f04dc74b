"""examples/with_transformers.py: transformers answers from a message what we answer, token by token."""

import json

import numpy as np
import pytest

from examples import tiny_models, with_transformers
from lw_jax.core.errors import UserError
from lw_jax.data import question_cards
from tests import tiny

torch = pytest.importorskip("torch", reason="the example needs torch: pip install -r requirements-dev.txt")

TEXTS = ["Mara Ellis lives in Lisbon.", "The mill is old and keeps a copper lantern in its upper room.", "A lamp.", "7"]
SIZES = ({"bits": 8}, {"bits": 16, "slots": 3}, {"bits": 4, "width": 11}, {"slots": 1})  # one for each text
ASKED = [card.question for card in question_cards.make(32, facts=1, seed=3, split="train")]
NEW = 8  # tokens
SWITCH = 83  # positions of LongRope
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i / 7 for i in range(10)]}
LONG |= {"long_factor": [2.0 + i for i in range(10)], "original_max_position_embeddings": SWITCH}
WINDOW = 17  # positions: less than a prompt has
HOSTILE = {"do_sample": True, "temperature": 3.0, "repetition_penalty": 1.7, "max_length": 3, "bos_token_id": 1}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Torch's threads wait for each other longer than a tiny model computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(own_models, tmp_path_factory):
    """Every family, and Phi-3 with LongRope and a short window in a folder that asks for another decoding."""
    folder = tmp_path_factory.mktemp("long")
    tiny_models.make(
        folder, "phi3", sliding_window=WINDOW, rope_parameters=LONG, original_max_position_embeddings=SWITCH
    )
    (folder / "generation_config.json").write_text(json.dumps(HOSTILE), "utf-8")
    return own_models | {"long": folder}


@pytest.fixture(scope="module", params=["embeddings", pytest.param("kv", marks=pytest.mark.slow)])
def wire(request, models):
    return tiny.make_wire(
        models["llama"],
        models=models,
        adapter__kind=request.param,
        compute__dtype="fp32",
        eval__max_new_tokens=NEW,
        eval__batch=len(ASKED),
    )


@pytest.fixture(scope="module")
def messages(wire):
    """A message for each question, of several texts, sizes and codes."""
    made = [wire.write(text, **size) for text, size in zip(TEXTS, SIZES, strict=True)]
    return [made[number % len(made)] for number in range(len(ASKED))]


def our_ids(wire, messages, reader):
    """Returns the ids that `read` makes text of."""
    ((prompt, count),) = wire._prompts(list(zip(messages, ASKED, strict=True)), reader)
    rows = np.asarray(wire.functions.generate(wire.frozen[reader], prompt, reader, NEW))[:count]
    return [[int(token) for token in row if token >= 0] for row in rows]


@pytest.mark.parametrize("reader", [*tiny_models.MODELS, "long"])
def test_thirty_two_greedy_answers_equal_token_by_token(wire, messages, reader):
    model, tokenizer = with_transformers.load_model(wire, reader)
    ours, theirs = our_ids(wire, messages, reader), with_transformers.generate(model, wire, messages, reader, ASKED)
    assert theirs == ours
    assert len({tuple(ids) for ids in ours}) > 16, "the answers hang on nothing"
    some, asked = messages[: len(TEXTS)], ASKED[: len(TEXTS)]
    said = with_transformers.answer_with_transformers(model, tokenizer, wire, some, reader, asked)
    assert said == wire.read(some, reader, asked)


def test_an_answer_across_the_change_of_frequencies_is_refused(wire, messages):
    model, _ = with_transformers.load_model(wire, "long")
    with pytest.raises(UserError, match=str(SWITCH)):
        with_transformers.generate(model, wire, messages[0], "long", [f"{question}{'?' * 29}" for question in ASKED])


@pytest.fixture(scope="module")
def cached(own_models):
    """A wire of kind "cache" of all its numbers, in fp32."""
    changes = {"encoder__kind": "cache", "encoder__ratio": 2, "encoder__width": 100, "encoder__texts": 16}
    changes |= {"train__steps": 0, "message__bytes": 150, "compute__dtype": "fp32", "eval__max_new_tokens": NEW}
    return tiny.make_wire(own_models["llama"], models={"qwen2": own_models["qwen2"]}, **changes)


@pytest.mark.slow
def test_a_cache_message_of_all_positions_is_a_dynamic_cache(cached):
    reader = "qwen2"
    model, tokenizer = with_transformers.load_model(cached, reader)
    message, questions = cached.write(TEXTS[1], ratio=1), ASKED[:4]
    for question, prompt in zip(questions, cached.prefix_kv(message, reader, questions), strict=True):
        inputs = with_transformers.to_inputs(model, prompt)
        x = torch.tensor(prompt.embeddings[None])
        with torch.no_grad():
            theirs = model(inputs_embeds=x, cache=inputs["cache"]).logits[0, -1].numpy()
        own, _ = next(cached._prompts([(message, question)], reader))
        ours, *_ = cached.recipe.wire.begin(cached.frozen[reader], reader, own, max_new_tokens=1)
        np.testing.assert_allclose(theirs, np.asarray(ours)[0], atol=1e-3)
    said = with_transformers.answer_with_transformers(model, tokenizer, cached, message, reader, questions)
    assert said == cached.read(message, reader, questions)
    with pytest.raises(UserError, match=r"ratio=2.*ratio=1"):
        cached.prefix_kv(cached.write(TEXTS[1]), reader, questions)
