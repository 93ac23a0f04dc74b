"""docs/planning.md is computed from plans; what it says of configs/h100x4.py is what that file sets."""

import dataclasses
import json

import pytest

from benchmarks import planning_page
from lw_jax.core import config, config_file
from lw_jax.planning import planner
from tests.commands import PROJECT

pytestmark = pytest.mark.slow


def test_the_command_prints_the_candidates_of_a_folder_of_plans_in_the_pages_order(tmp_path, capsys):
    large = config.build(config_file.load("configs/large.py", root=PROJECT))
    plans = [dataclasses.asdict(planner.make(large, target, estimate=True)) for target in ("h100x2", "h100x1")]
    for one in plans:
        (tmp_path / f"{one['target']}.json").write_text(json.dumps(one), encoding="utf-8")
    assert planning_page.main(["--plans", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert told.index("| h100x1 ") < told.index("| h100x2 ") and told.count("**chosen**") == 2
    for one in plans:
        best = one["chosen"]
        (line,) = [line for line in told.splitlines() if line.startswith(f"| {one['target']} ")]
        assert f"{best['peak_bytes'] / 1e9:.1f}" in line and f"{best['samples_per_second']:.1f}" in line


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
