"""lw_jax/planning/simulation.py: the tables of 1, 2, 4 cards, from plans by arithmetic."""

import dataclasses
import functools
import json

import pytest

from lw_jax.core.config import Config
from lw_jax.planning import planner, simulation
from tests import tiny

ESTIMATE = functools.partial(planner.make, estimate=True)


@pytest.fixture(scope="module")
def cfg(tmp_path_factory) -> Config:
    return tiny.make_config(
        tmp_path_factory.mktemp("readers"), only="qwen", train__steps=600, mesh__placement="replicate"
    )


@pytest.fixture(scope="module")
def plans(cfg):
    return [ESTIMATE(cfg, f"h100x{count}") for count in (1, 3)]


@pytest.fixture(scope="module")
def blocks(cfg, plans) -> list[list[str]]:
    told = simulation.text(cfg, plans, own={"train.micro_batch": 2}, estimate=ESTIMATE)
    return [block.splitlines() for block in told.split("\n\n")]


def test_job_is_told_in_samples_epochs_and_latents(blocks):
    assert blocks[0] == ["600 steps x 8 = 4,800 samples = 75.0 epochs of 64; 5 latents x 24 a text"]


def test_steps_that_read_passages_are_no_epochs_of_the_questions(cfg, plans):
    staged = tiny.change(cfg, stages__align__share=0.25, stages__pretrain__share=0.25)
    told = simulation.text(staged, plans, own={}, estimate=ESTIMATE)
    assert told.startswith("600 steps x 8 = 4,800 samples = 37.5 epochs of 64;")


def test_costs_are_those_of_the_plans(blocks, plans):
    _, *rows = blocks[1]
    assert len(rows) == 2
    for row, found in zip(rows, plans, strict=True):
        best, count = found.chosen, found.devices
        words = row.split()
        assert words[0] == str(count)
        share = best.peak_bytes / found.memory_bytes
        assert words[1:6] == [f"{best.peak_bytes / 1e9:.1f}", "of", "84.9", "GB", f"({share:.0%})"]
        minutes = f"{64 / best.samples_per_second / 60:.1f}"
        assert words[6:10] == [
            *(f"{best.samples_per_second:.1f}", minutes),
            *(f"{found.hours:.2f}", f"{count * found.hours:.2f}"),
        ]


def test_batches_make_the_global_batch(blocks, plans):
    _, *rows = blocks[2]
    for row, found in zip(rows, plans, strict=True):
        count, micro, data, accumulated, filling, whole = (int(word) for word in row.split()[:6])
        assert count == found.devices and micro * data * accumulated - filling == whole == 8
        assert filling == (1 if count == 3 else 0)


def test_changes_stand_before_and_after_on_the_same_cards(cfg, plans, blocks):
    best = plans[0].chosen
    found = simulation.changes(cfg, plans[0].target, best, own={"train.micro_batch": 2}, estimate=ESTIMATE)
    micro = best.micro_batch
    assert [one.what for one in found] == [
        *(f"batch a GPU 2 -> {micro}", "latents 5 -> 10", "steps 600 -> 1200 (epochs)"),
    ]
    batch, latents, steps = found
    assert (batch.before.micro_batch, batch.after.micro_batch) == (2, micro)
    assert batch.before.peak_bytes < batch.after.peak_bytes == latents.before.peak_bytes
    assert latents.after.flops > latents.before.flops
    assert steps.after.hours == pytest.approx(2 * steps.before.hours)
    assert {one.after.strategy for one in found} == {best.strategy}
    assert "(2.00 x)" in next(row for row in blocks[3] if "epochs" in row)


def test_epoch_is_what_is_on_this_machine(cfg, tmp_path):
    def of(source: str, **changes) -> int | None:
        return simulation.epoch(tiny.change(cfg, data__train=source, **changes))

    rows = [{"context": f"{i} is here", "question": "who?", "answers": [str(i)]} for i in range(7)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert (of("cards"), of("cards", data__cards=9), of(str(tmp_path / "rows.jsonl"))) == (64, 9, 7)
    both = [row | {"question": question} for row in rows for question in ("who?", "where?")]
    (tmp_path / "both.jsonl").write_text("\n".join(map(json.dumps, both)))
    assert of(str(tmp_path / "both.jsonl")) == 14
    assert of(str(tmp_path / "both.jsonl"), data__packed_tokens=64) == 7, "a text's questions are one sample"
    pairs = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    of_pairs = {"recipe": "dpo", "data__held_out": 0.5, "data__validation": ""}
    trained = of(str(tmp_path / "pairs.jsonl"), **of_pairs)
    assert trained is not None and 10 < trained < 30, "half are held out"
    assert of(str(tmp_path / "pairs.jsonl"), **of_pairs | {"data__validation": "held.jsonl"}) == 40
    assert of("hub:rajpurkar/squad") is None and of("nowhere.jsonl") is None


def test_where_nothing_fits_there_are_no_tables(cfg, plans):
    assert simulation.text(cfg, [dataclasses.replace(plans[0], chosen=None)], own={}, estimate=ESTIMATE) == ""
