"""Self-made readers: two tokenizers, folders that their sizes name, and a refusal before they are made."""

import concurrent.futures
import dataclasses
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.data import examples, question_cards
from lw_jax.data.tokens import load_tokenizer
from lw_jax.recipes import selfmade
from lw_jax.training.trainer import Run
from tests import tiny

FP32 = 1e-5  # relative; a sum of some hundred weights
TEXT = "Zoë's lantern costs 1,024 crowns — or so.\nQuestion: why?"


@pytest.fixture(scope="module")
def cfg(root):
    return tiny.make_config(root)


@pytest.mark.parametrize("family", selfmade.FAMILIES)
def test_any_text_survives_the_tokenizer(family, tmp_path):
    texts = [example.context for example in question_cards.make(64, facts=3, seed=0, split="train")]
    selfmade.write_tokenizer(tmp_path, selfmade.FAMILIES[family], texts)
    one = load_tokenizer(tmp_path)
    ids = one.encode(TEXT)
    assert one.decode(ids) == TEXT
    assert max(ids) < one.vocab <= selfmade.FAMILIES[family].vocab
    marks = [selfmade.FAMILIES[family].end, selfmade.FAMILIES[family].pad]
    assert [one.eos, one.pad] == one.backend.convert_tokens_to_ids(marks) and one.eos != one.pad


def test_folder_is_named_by_what_the_reader_is_made_of(cfg):
    named = {selfmade.folder(cfg, "selfmade:llama"), selfmade.folder(cfg, "selfmade:qwen")}
    for changes in (
        {"selfmade": dataclasses.replace(cfg.selfmade, batch=66)},
        {"selfmade": dataclasses.replace(cfg.selfmade, steps=7)},
        {"prompt": dataclasses.replace(cfg.prompt, anchor="\nReply:")},
        {"data": dataclasses.replace(cfg.data, facts=3)},
    ):
        named.add(selfmade.folder(dataclasses.replace(cfg, **changes), "selfmade:llama"))
    assert len(named) == 6
    wire_only = dataclasses.replace(cfg, encoder=dataclasses.replace(cfg.encoder, slots=3))
    assert selfmade.folder(wire_only, "selfmade:llama") == selfmade.folder(cfg, "selfmade:llama")


def test_finished_reader_is_found_by_the_file_written_last(cfg, tmp_path, monkeypatch):
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path))
    path = selfmade.folder(cfg, "selfmade:qwen")
    path.mkdir(parents=True)
    with pytest.raises(UserError, match=f"'selfmade:qwen': .*{path}"):
        selfmade.finished_folder(cfg, "selfmade:qwen")
    with pytest.raises(UserError, match="'selfmade:gemma'"):
        selfmade.family("selfmade:gemma")
    (path / "config.json").touch()
    assert selfmade.finished_folder(cfg, "selfmade:qwen") == path
    assert path.is_relative_to(tmp_path)


class Slow:
    """Stands for a reader in training, and for its run."""

    def __init__(self, cfg, *_, source="selfmade:qwen", quiet=False):
        self.folder, self.state = selfmade.folder(cfg, source), {"trainable": {}}

    def train(self, _):
        self.reporter = types.SimpleNamespace(last={"accuracy/answer": 1.0})
        time.sleep(0.2)  # the other job comes meanwhile

    def save(self, _):
        self.folder.mkdir()
        (self.folder / "config.json").touch()


def test_of_two_jobs_one_makes_a_reader_and_the_other_waits(cfg, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path))
    both = threading.Barrier(2)  # behind the first look at the cache
    monkeypatch.setattr(selfmade.examples, "load", lambda *_, **__: both.wait(timeout=60))
    monkeypatch.setattr(selfmade, "SelfmadeReader", Slow)
    monkeypatch.setattr(selfmade, "Run", Slow)
    cfg = dataclasses.replace(cfg, encoder=dataclasses.replace(cfg.encoder, source="selfmade:qwen"))
    with concurrent.futures.ThreadPoolExecutor(2) as jobs:
        for job in [jobs.submit(selfmade.make_readers, cfg) for _ in range(2)]:
            job.result()
    told = capsys.readouterr().out
    assert told.count("trained here once") == told.count("waiting for another job") == told.count("last steps") == 1
    assert selfmade.finished_folder(cfg, "selfmade:qwen")


def test_several_processes_are_told_to_make_the_readers_in_one(cfg, tmp_path, monkeypatch):
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    cfg = dataclasses.replace(cfg, encoder=dataclasses.replace(cfg.encoder, source="selfmade:qwen"))
    with pytest.raises(UserError, match=rf"'selfmade:qwen': .*{tmp_path}.* 2 processes .*once in one process"):
        selfmade.make_readers(cfg)


@pytest.fixture(scope="module")
def made(root, tmp_path_factory):
    """style -> (recipe, its validation data as one batch)."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LW_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(selfmade, "CARDS", 101)
        for style in question_cards.STYLES:
            cfg = tiny.make_config(root, data__train=style, data__validation=style, data__facts=3)
            recipe = selfmade.SelfmadeReader(cfg, source="selfmade:llama")
            data = recipe.encode(examples.load(recipe.cfg.data, "validation", seed=recipe.cfg.seed))
            found[style] = (recipe, data, data.collate(range(len(data)))["readers"]["reader"])
    return found


def test_a_reader_is_said_to_answer_as_it_does_at_the_end(made, root):
    recipe, steps = made["pairs"][0], 100
    run = Run(selfmade._training_config(tiny.make_config(root, selfmade__steps=steps)), recipe, None, None, quiet=True)
    for step in range(1, steps + 1):
        run.reporter.report(step, {"accuracy/answer": step / steps}, flush=step == steps)
    assert run.reporter.last["accuracy/answer"] > 0.9


def test_what_the_folder_does_not_name_makes_no_other_reader(made, root, monkeypatch):
    changes = {"data__packed_tokens": 128, "data__question_tokens": 12, "data__answer_tokens": 4, "seed": 7}
    changes |= {"data__context_tokens": 40, "data__overlong": "drop", "compute__dtype": "bf16"}
    one, data, _ = made["pairs"]
    monkeypatch.setenv("LW_JAX_CACHE", str(one.folder.parent.parent))
    monkeypatch.setattr(selfmade, "CARDS", 101)
    given = {"data__train": "pairs", "data__validation": "pairs", "data__facts": 3} | changes
    cfg = tiny.make_config(root, **given)
    other = selfmade.SelfmadeReader(cfg, source="selfmade:llama")
    assert other.folder == one.folder
    assert other.examples == one.examples and other.encode(data.examples).digest() == data.digest()
    assert other.wire.readers == one.wire.readers
    jax.tree.map(np.testing.assert_array_equal, other.build().trainable, one.build().trainable)


def spans(recipe, fields, row):
    """The decoded runs of scored tokens of one card, each up to its EOS, and the text of the others."""
    ids = fields["targets"][row][fields["weights"][row] > 0].tolist()
    scored = fields["scored"]["ids"][row][fields["scored"]["mask"][row]].tolist()
    assert len(scored) == len(ids)
    answers, rest, current = [], [], []
    for token, counted in zip(ids, scored, strict=True):
        (current if counted else rest).append(token)
        if counted and token == recipe.tokenizer.eos:
            answers.append(recipe.tokenizer.decode(current))
            current = []
    assert not current, "every answer ends with EOS"
    return answers, recipe.tokenizer.decode(rest)


@pytest.mark.parametrize("style, questions", [("cards", 1), ("pairs", 3)])
def test_a_card_is_asked_its_questions_and_exactly_their_answers_are_scored(made, style, questions):
    recipe, data, fields = made[style]
    for row, example in enumerate(data.examples):
        answers, rest = spans(recipe, fields, row)
        every = question_cards.questions(example) if style == "pairs" else []
        asked = [(example.question, example.answers[0]), *(pair for pair in every if pair[0] != example.question)]
        assert answers == [f" {value}" for _, value in asked] and len(asked) == questions
        assert [rest.count(f"Question: {question}\nAnswer:") for question, _ in asked] == [1] * questions
        assert rest.count("Question:") == questions and example.context in rest


def test_answers_count_fully_and_the_other_tokens_little(made):
    recipe, _, fields = made["pairs"]
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[:5]), {key: fields[key] for key in fields if key != "task"})
    terms = recipe.loss(recipe.build().trainable, {}, {"readers": {"reader": rows}}, jax.random.key(0))
    scored = float((rows["scored"]["ids"] * rows["weights"].astype(jnp.int32)).sum())
    total = float(rows["weights"].sum())
    assert float(terms.weight) == pytest.approx(scored + selfmade.TEXT_WEIGHT * (total - scored), rel=FP32)
    assert float(terms.terms["nll/answer"][1]) == scored
    nll, answers = (float(pair) for pair in (terms.sum, terms.terms["nll/answer"][0]))
    assert 0 < answers < nll
