"""docs/planning.md is computed from plans: every candidate is on it, and a changed plan changes it."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planning_page
from lw_jax.core import config, config_file
from lw_jax.planning import gpus

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parents[3]
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
    faster = candidate("replicate", "2x1", step_seconds=2.0, samples_per_second=64.0, accumulation=4, hours=10 / 9)
    too_large = candidate("tensor", "1x2", fits=False, obstacle="a micro-batch of 1 needs 70.1 GB of 68.0 GB")
    found = [
        planned("h100x1", candidate()),
        planned("h100x2", candidate(), faster, too_large, chosen=1),
        planned("h100x3", candidate(), refused("fsdp", "3x1", big)),
        planned("a100_40x1", refused("single", "1x1", big), chosen=None),
        planned("a100_40x2", refused("single", "1x1", big), candidate("split", "llama 1x1, qwen 1x1"), chosen=1),
    ]
    return json.loads(json.dumps({one["target"]: one for one in found}))


def lines_of(lines: list[str], *words: str) -> list[str]:
    return [line for line in lines if all(word in line for word in words)]


def test_candidates_stand_with_compiled_figures_and_their_distance_from_the_estimates(plans):
    (row,) = lines_of(planning_page.candidates(plans), "| replicate", "**chosen**")
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:6] == ["2", "replicate", "2x1", "none", "16 x 4", "61.3"]
    assert cells[6:9] == ["64.4 (+5%)", "1280", "1152 (-10%)"]
    assert cells[9:] == ["2.5", "2.00", "3.00 (+50%)", "64.0", "**chosen**"]


def write(folder: Path, plans: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, one in plans.items():
        (folder / f"{name}.json").write_text(json.dumps(one), encoding="utf-8")
    return folder


def test_the_command_prints_every_table_of_a_folder_in_the_pages_order(plans, tmp_path, capsys):
    assert planning_page.main(["--plans", str(write(tmp_path, plans))]) == 0
    told = capsys.readouterr().out
    order = [told.index(f"| {target} ") for target in ("h100x1", "h100x2", "h100x3", "a100_40x1", "a100_40x2")]
    assert order == sorted(order) and told.count("**chosen**") == 4 and "nothing fits" in told


CHOSEN = {
    line[0]: line
    for line in (
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in (PROJECT / "docs" / "planning.md").read_text(encoding="utf-8").splitlines()
        if row.startswith("| ")
    )
    if len(line) == len("target strategy mesh remat batch peak limit step samples hours took".split())
    and line[0] in planning_page.TARGETS
}


def test_h100x4_is_the_choice_of_the_planner_on_the_page_and_nothing_else():
    assert CHOSEN.keys() == set(planning_page.TARGETS)
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
