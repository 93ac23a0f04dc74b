"""lw_jax/recipes/asked_words.py: literals that are like the training answers, chosen by a wire's own kernel."""

import dataclasses

import jax
import numpy as np
import pytest

import lw_jax
from lw_jax.commands import export, train
from lw_jax.core.errors import UserError
from lw_jax.core.types import Example
from lw_jax.data import question_cards
from lw_jax.models import codec
from lw_jax.recipes import asked_words, join
from lw_jax.recipes.asked_words import AskedWords
from lw_jax.recipes.token_scores import Surprisal
from lw_jax.training import run_folder
from sharding import mesh, placement
from tests import tiny

WINDOW, WORDS = 48, 4
KERNEL = 2e-3  # relative to its largest value: fp32 moments of a few hundred tokens


pytestmark = pytest.mark.usefixtures("module_cache")


def make(root, kind=AskedWords, devices=1):
    source = tiny.readers(root)["llama"]
    changes = {"encoder__kind": "lm", "encoder__source": str(source), "encoder__window": WINDOW}
    cfg = tiny.make_config(root, compute__dtype="fp32", **changes)
    learner = mesh.make(data=devices, devices=jax.devices()[:devices])
    return kind(cfg, source, placement.together(learner, ["llama"]))


def cards(count, split):
    return question_cards.make(count, facts=4, seed=0, split=split, every=True)


def herds(count, seed):
    """Texts that are asked for their number, which a random body can predict no better than another word."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        name, other = rng.choice(question_cards.FIRST_NAMES, 2, replace=False)
        animal = rng.choice(question_cards.ATTRIBUTES["pet"].values)
        herd = str(rng.integers(10, 1000))
        yield Example(str(number), f"{name} sold {herd} of the {animal} to {other}.", "How many?", (herd,))


def test_words_that_are_asked_for_are_found_in_other_texts(root):
    found = make(root)
    found.fit(list(herds(200, seed=0)))
    shares = {}
    for chooser in (found, make(root, Surprisal)):
        held_out = chooser.attach(list(herds(60, seed=1)), 1)
        shares[chooser.kind] = np.mean([one.answers == one.literals for one in held_out])
    assert shares["asked"] > 0.9 > shares["surprisal"] + 0.3, shares


def test_kernel_is_that_of_the_ridge_regression_on_any_devices(root, monkeypatch, tmp_path):
    asked = [
        Example("a", "Mira keeps a copper lantern in the old mill.", "What?", ("copper lantern",)),
        Example("b", "Mira keeps a copper lantern in the old mill.", "Who?", ("Mira",)),
        Example("c", "Tom has nine hens.", "How many?", ("nine",)),
        Example("d", "Ida sings at noon and at night, and sleeps.", "When?", ("noon",)),
        Example("e", "Ida sings at noon and at night, and sleeps.", "Why?", ("nobody knows",)),
    ]
    found, sums = make(root), []
    moments = found._moments
    found.__dict__["_moments"] = lambda *given: sums.append(moments(*given)) or sums[-1]
    kernel = found.fit(asked)
    assert np.abs(sums[-1]["x"]).max() < 1e-3 * np.abs(sums[0]["x"]).max(), "squares are summed around the mean"
    states, labels = [], []
    answers = {asked[0].context: ("copper lantern", "Mira"), asked[2].context: ("nine",), asked[3].context: ("noon",)}
    for text, words in answers.items():
        (tokens,) = found._tokenize([text])
        own = np.asarray(found._states(found._load(), found._collate([tokens.ids])))[0, : len(tokens.ids)]
        states.append(own.astype(np.float64))
        marked = np.zeros(len(text), bool)
        for word in words:
            marked[text.index(word) : text.index(word) + len(word)] = True
        labels.append(np.array([marked[start:end].any() for start, end in tokens.spans], np.float64))
    x, y = np.concatenate(states), np.concatenate(labels)
    size = x.std(axis=0) + 1e-3
    z = (x - x.mean(axis=0)) / size
    gram = z.T @ z / len(z) + asked_words.RIDGE * np.eye(z.shape[1])
    expected = np.linalg.solve(gram, z.T @ (y - y.mean()) / len(z)) / size
    np.testing.assert_allclose(kernel, expected, atol=KERNEL * np.abs(expected).max())
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path))
    np.testing.assert_allclose(make(root, devices=2).fit(asked), kernel, atol=KERNEL * np.abs(kernel).max())


def test_kernel_is_computed_once(root, monkeypatch):
    first = make(root).fit(cards(20, "train"))
    monkeypatch.setattr(AskedWords, "_solve", lambda self, answers: pytest.fail("computed again"))
    np.testing.assert_array_equal(make(root).fit(cards(20, "train")), first)


def test_answers_that_stand_in_no_text_are_refused(root):
    other = [dataclasses.replace(example, answers=("nowhere",)) for example in cards(5, "train")]
    with pytest.raises(UserError, match=r"config\.message\.choice = 'asked': 0 of 20 answers .* set 'surprisal'"):
        make(root).fit(other)


@pytest.fixture(scope="module")
def changes(root, module_cache):
    source = str(tiny.readers(root)["llama"])
    found = {"encoder__kind": "lm", "encoder__source": source, "message__literals": WORDS, "message__choice": "asked"}
    return found | {"data__packed_tokens": 96, "train__steps": 2, "train__checkpoint_every": 2}


@pytest.fixture(scope="module")
def trained(root, changes, tmp_path_factory):
    """(recipe before its training, folder)."""
    cfg, folder = tiny.make_config(root, mesh__placement="single", **changes), tmp_path_factory.mktemp("wire")
    run_folder.write_workdir(folder, cfg=cfg, base={}, command=["test"])
    assert train.main(cfg, resolved={}, workdir=folder) == 0
    return tiny.make_recipe(root, **changes), folder


def test_wire_chooses_as_its_training_data_were_chosen_without_them(root, trained, monkeypatch, tmp_path):
    recipe, folder = trained
    given = recipe.add_literals(recipe.curriculum.examples("train")[:4])
    exported = tmp_path / "wire"
    assert export.main(recipe.cfg, resolved={}, workdir=folder, folders={"wire": exported}, dtype="fp32") == 0
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(AskedWords, "fit", lambda self, examples: pytest.fail("a trained wire has its kernel"))
    for at in (folder, exported):
        wire = lw_jax.load_wire(at)
        # Two steps have trained everything else.
        np.testing.assert_array_equal(wire.recipe.chooser.kernel, recipe.chooser.kernel)
        assert codec.read_frame(wire.write(given[0].context)).literals == given[0].literals != ()
        assert len(codec.read_frame(wire.write(given[0].context, literals=1)).literals) == 1


def test_joined_readers_see_the_words_that_the_run_chose(root, trained, changes):
    recipe, folder = trained
    joined = tiny.make_recipe(root, encoder__run=str(folder), **changes)
    np.testing.assert_array_equal(joined.chooser.kernel, recipe.chooser.kernel)
    np.testing.assert_array_equal(joined.build().trainable["encoder"]["head"]["asked"], recipe.chooser.kernel)
    for key, value in (("message__choice", "surprisal"), ("message__literals", 2)):
        cfg = tiny.make_config(root, encoder__run=str(folder), **changes | {key: value})
        with pytest.raises(UserError, match=rf"config\.{key.replace('__', '.')} = .* use the same value"):
            join.read_config(cfg)
