"""docs/planning.md is computed from plans: every candidate is on it, and a changed plan changes it."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planning_page import __main__ as command
from benchmarks.planning_page import page, tables
from lw_jax.core import config, config_file
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.planning import gpus, planner

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parent.parent.parent
LIMITS = {"h100": 67_954_383_257, "a100_40": 33_864_810_496}


def candidate(strategy: str = "single", mesh: str = "1x1", **changes: Any) -> dict[str, Any]:
    """One measured candidate in the shape that `plan --json` prints."""
    row = {
        "strategy": strategy,
        "mesh": mesh,
        "devices_used": 1 if strategy == "single" else 2,
        "remat": "none",
        "fits": True,
        "obstacle": "",
        "micro_batch": 16,
        "accumulation": 8,
        "peak_bytes": 61_300_000_000,
        "weights_bytes": 31_200_000_000,
        "trainable_bytes": 1_500_000_000,
        "optimizer_bytes": 3_000_000_000,
        "activation_bytes": 25_600_000_000,
        "flops": 1.28e15,
        "collective_bytes": 2.5e9,
        "step_seconds": 4.0,
        "samples_per_second": 32.0,
        "hours": 20 / 9,
        "estimate": {"peak_bytes": 64_365_000_000, "flops": 1.152e15, "step_seconds": 3.0},
    }
    return row | changes


def refused(strategy: str, mesh: str, obstacle: str) -> dict[str, Any]:
    sizes = dict.fromkeys([key for key in candidate() if key.endswith("_bytes")], 0)
    rest = {"fits": False, "remat": "-", "flops": 0.0, "step_seconds": None, "samples_per_second": None, "hours": None}
    return candidate(strategy, mesh, obstacle=obstacle, estimate=None, micro_batch=0, accumulation=0, **rest, **sizes)


def planned(target: str, *rows: dict[str, Any], chosen: int | None = 0) -> dict[str, Any]:
    card = gpus.parse(target).card
    best = None if chosen is None else rows[chosen]
    return {
        "target": target,
        "devices": gpus.parse(target).devices,
        "compiled": True,
        "memory_bytes": card.memory_bytes,
        "limit_bytes": LIMITS[card.name],
        "steps": 2000,
        "global_batch": 128,
        "hours": best["hours"] if best else None,
        "plan_seconds": 17.0,
        "candidates": list(rows),
        "chosen": best,
    }


@pytest.fixture
def plans() -> dict[str, Any]:
    big = "weights and optimizer alone take 35.7 GB of 33.9 GB"
    uneven = (
        "llms/llama: layers/down (32, 4096, 14336): dim 1 (4096) does not divide mesh axis data=3 (sizes that do: 1, "
        "2, 4); row 4 '(.*/)?layers/(o|down)'; choose another size of the axis or another placement"
    )
    faster = candidate("replicate", "2x1", step_seconds=2.0, samples_per_second=64.0, accumulation=4, hours=10 / 9)
    too_large = candidate("tensor", "1x2", fits=False, obstacle="a micro-batch of 1 needs 70.1 GB of 68.0 GB")
    found = [
        planned("h100x1", candidate()),
        planned("h100x2", candidate(), faster, too_large, chosen=1),
        planned("h100x3", candidate(), refused("fsdp", "3x1", uneven)),
        planned("a100_40x1", refused("single", "1x1", big), chosen=None),
        planned("a100_40x2", refused("single", "1x1", big), candidate("split", "llama 1x1, qwen 1x1"), chosen=1),
    ]
    return json.loads(json.dumps({one["target"]: one for one in found}))


@pytest.fixture(scope="module")
def large() -> Config:
    return config.build(config_file.load("configs/large.py", root=PROJECT))


def lines_of(lines: list[str], *words: str) -> list[str]:
    return [line for line in lines if all(word in line for word in words)]


def test_page_of_a_real_plan_holds_every_candidate_and_marks_one():
    cfg = config.build(config_file.load("configs/smoke.py", root=PROJECT))
    cfg = dataclasses.replace(cfg, compute=dataclasses.replace(cfg.compute, remat="none"))
    found = planner.make(cfg, "h100x2", estimate=True)
    text = page.write(cfg, {"h100x2": found}, "configs/smoke.py")
    assert {row["strategy"] for row in found["candidates"]} >= {"single", "replicate", "fsdp", "tensor", "split"}
    for row in found["candidates"]:
        head = (
            [f" {row[key]} " for key in ("strategy", "mesh")] if row["fits"] else [tables.short(row), row["strategy"]]
        )
        assert lines_of(text.splitlines(), *head), row
    assert text.count("**chosen**") == 1
    assert "0 of the 1 plans were compiled" in text


def test_filled_batch_is_told_with_what_the_last_card_gains(plans):
    own = plans["h100x3"]["candidates"][0]
    own |= {"samples_per_second": 96.0, "filling": "1 of 129 rows are filling"}
    plans["h100x3"]["chosen"] = own
    (line,) = lines_of(page.chosen(plans), "1 of 129 rows")
    assert line == "- **h100x3**: 1 of 129 rows are filling. 1.50 times the samples/s of h100x2."


def test_candidates_stand_with_compiled_figures_and_their_distance_from_the_estimates(plans):
    (row,) = lines_of(page.candidates(plans), "| replicate", "**chosen**")
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:6] == ["2", "replicate", "2x1", "none", "16 x 4", "61.3"]
    assert cells[6:9] == ["64.4 (+5%)", "1280", "1152 (-10%)"]
    assert cells[9:] == ["2.5", "2.00", "3.00 (+50%)", "64.0", "**chosen**"]


def test_a_candidate_above_the_limit_says_by_how_much(plans):
    (row,) = lines_of(page.candidates(plans), "| tensor")
    assert "no: a micro-batch of 1 needs 70.1 GB of 68.0 GB" in row


def test_single_on_idle_cards_is_listed_once_and_one_that_differs_again(plans):
    assert len(lines_of(page.candidates(plans), "| single", "|    2 |")) == 0
    plans["h100x2"]["candidates"][0]["peak_bytes"] += 10**9
    assert len(lines_of(page.candidates(plans), "| single", "|    2 |")) == 1


def test_refused_candidates_stand_with_a_short_reason_and_no_remedy(plans):
    found = page.candidates(plans)
    assert "- 4096 of layers/down is not divisible by data=3: h100x3: fsdp." in found
    (line,) = lines_of(found, "- weights and optimizer alone take 35.7 GB of 33.9 GB")
    assert line.endswith("a100_40x1: single; a100_40x2: single.")
    assert not lines_of(found, "choose another size")


def test_a_card_that_nothing_fits_is_refused_with_cards_that_hold_it(plans):
    found = page.chosen(plans)
    assert lines_of(found, "| a100_40x1", "nothing fits")
    (note,) = lines_of(found, "- **a100_40x1** is refused")
    assert "single: weights and optimizer alone take 35.7 GB of 33.9 GB" in note
    assert "more cards (a100_40x2: split)" in note and "a larger card (h100x1)" in note
    assert "84% of its whole memory" in note  # 35.7 of 42.3


def test_more_cards_that_are_slower_than_fewer_are_named(plans):
    found = page.chosen(plans)
    assert lines_of(found, "- **h100x3** is slower than h100x2 (32.0 against 64.0 samples/s)")
    assert not lines_of(found, "**h100x2** is slower")


def test_missing_targets_are_told_and_none_when_all_are_there(plans, large):
    (told,) = lines_of(page.opening(large, plans, "configs/large.py"), "Not planned yet")
    assert "h100x4" in told and "2xh100x8" in told and "h100x2" not in told
    every = {target: planned("h100x1", candidate()) for target in tables.TARGETS}
    assert not lines_of(page.opening(large, every, "configs/large.py"), "Not planned yet")


def test_facts_are_one_line_a_target(plans):
    found = command.facts(plans)
    assert len(found) == len(plans)
    assert found[1] == (
        "h100x2: replicate 2x1, remat none, micro-batch 16 x 4, peak 61.3 of 68.0 GB, 1.11 h for 2000 steps"
    )
    assert found[3] == "a100_40x1: nothing fits: weights and optimizer alone take 35.7 GB of 33.9 GB"


def write(folder: Path, plans: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, one in plans.items():
        (folder / f"{name}.json").write_text(json.dumps(one), encoding="utf-8")
    return folder


def test_a_folder_is_read_in_the_pages_order_and_empty_files_are_told(plans, large, tmp_path, capsys):
    folder = write(tmp_path / "plans", plans)
    (folder / "h100x8.json").touch()
    assert list(command.load(folder, large)) == ["h100x1", "h100x2", "h100x3", "a100_40x1", "a100_40x2"]
    assert "h100x8.json: empty, left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{oops", "not JSON"),
        ("[1]", "no plan"),
        ('{"target": "h100x1"}', "a plan without candidates, chosen"),
        (json.dumps(planned("h100x1", candidate()) | {"global_batch": 96}), "train.global_batch=96"),
    ],
)
def test_a_file_that_is_no_plan_of_this_configuration_is_refused_with_its_path(content, word, large, tmp_path):
    (tmp_path / "h100x1.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"h100x1\.json: .*make it again") as refusal:
        command.load(tmp_path, large)
    assert word in str(refusal.value)


def test_a_folder_without_plans_is_refused(large, tmp_path):
    with pytest.raises(UserError, match="holds no plan"):
        command.load(tmp_path / "nowhere", large)


def start(*argv: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "benchmarks.planning_page", *argv]
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=PROJECT)


def test_the_command_prints_facts(plans, tmp_path, capsys):
    assert command.main(["--plans", str(write(tmp_path, plans)), "--facts"]) == 0
    assert capsys.readouterr().out.splitlines() == command.facts(plans)


def test_the_command_ends_with_2_and_one_line_where_a_file_is_broken(tmp_path):
    (tmp_path / "h100x1.json").write_text("{oops", encoding="utf-8")
    done = start("--plans", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "h100x1.json: not JSON" in line


def test_the_page_in_the_tree_stands_on_the_present_constants():
    """Where this fails, docs/planning.md is older than the constants: make it again with benchmarks/planning_page."""
    assert "\n".join(page.constants()) in (PROJECT / "docs" / "planning.md").read_text(encoding="utf-8")


CHOSEN = {
    line[0]: line
    for line in (
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in (PROJECT / "docs" / "planning.md").read_text(encoding="utf-8").splitlines()
        if row.startswith("| ")
    )
    if len(line) == len("target strategy mesh remat batch peak limit step samples hours took".split())
    and line[0] in tables.TARGETS
}


def test_h100x4_is_the_choice_of_the_planner_on_the_page_and_nothing_else():
    assert CHOSEN.keys() == set(tables.TARGETS)
    _, strategy, mesh, remat, batch, peak, _, _, samples, *_ = CHOSEN["h100x4"]
    file = PROJECT / "configs" / "h100x4.py"
    cfg, large = (config.build(config_file.load(f"configs/{name}.py", root=PROJECT)) for name in ("h100x4", "large"))
    changed = config.diff(config.to_dict(large), config.to_dict(cfg))
    assert {line.partition(":")[0] for line in changed} <= set(config.SEARCHED)
    assert (cfg.mesh.placement, cfg.compute.remat) == (strategy, remat)
    assert f"{max(cfg.mesh.data, 1)}x{cfg.mesh.model}" == mesh
    assert batch.startswith(f"{cfg.train.micro_batch} x ")
    stated = " ".join(file.read_text(encoding="utf-8").split())
    assert f" {peak} of " in stated and f"({samples} samples/s)" in stated
