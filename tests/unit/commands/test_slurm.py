"""lw_jax/commands/slurm.py: the verb, what it prints, writes and refuses."""

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import run
from lw_jax.commands import loading, parser, program, slurm
from lw_jax.core import config, config_file, environment
from lw_jax.core.errors import UserError
from lw_jax.planning import hardware, planner
from lw_jax.planning.plans import StepPlan
from lw_jax.slurm import size_comparison
from lw_jax.training import run_folder
from tests import tiny
from tests.commands import PROJECT
from tests.unit.slurm.test_job import PLAN, planned, resolve


@pytest.fixture
def call(tmp_path: Path, monkeypatch):
    """Runs the verb; returns the targets that were planned."""

    def run(
        plan: StepPlan = PLAN,
        others: tuple[StepPlan, ...] | None = (),
        changes: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> list[str]:
        targets = []
        cfg = resolve(**changes or {})

        def make(given: config.Config, target: str, *, estimate: bool) -> StepPlan:
            assert given is cfg and not estimate
            targets.append(target)
            return dataclasses.replace(plan, target=target)

        monkeypatch.setattr(planner, "make", make)
        if others is not None:
            monkeypatch.setattr(size_comparison, "other_sizes", lambda *_: list(others))
        tiny.call("slurm", cfg, tmp_path / "runs" / "mine", spec="configs/h100x4.py", **values)
        return targets

    return run


def test_verb_writes_the_file_and_the_logs_folder_and_tells_the_price(call, tmp_path: Path, capsys) -> None:
    others = (planned(target="h100x1", devices=1, hours=9.5), planned(None, devices=2, target="h100x2"))
    assert call(others=others) == ["h100x4"]
    file = tmp_path / "runs" / "mine" / "job.sbatch"
    assert (tmp_path / "runs" / "mine" / "logs").is_dir()
    lines = capsys.readouterr().out.splitlines()
    assert f"  sbatch {shlex.quote(str(file))}" in lines
    assert any("0-04:30:00" in line and "3.20 h" in line for line in lines)
    assert [line.split()[:4] for line in lines[-3:]] == [
        ["h100x1", "1", "9.50", "9.5"],
        ["h100x2", "2", "-", "-"],
        ["h100x4", "4", "3.20", "12.8"],
    ]
    call(hours=5.0, others=(PLAN,))
    assert capsys.readouterr().out.splitlines()[-1].split()[:4] == ["h100x4", "4", "5.00", "20.0"]


def test_a_data_file_that_is_not_there_is_told_and_refused_where_the_job_is_queued_at_once(call, capsys) -> None:
    missing = {"data.train": "no/rows.jsonl"}
    call(changes=missing)
    assert f"warning: data.train='no/rows.jsonl': no such file or folder, seen from {Path.cwd()}" in (
        capsys.readouterr().out
    )
    with pytest.raises(UserError, match=r"data\.train='no/rows\.jsonl'"):
        call(changes=missing, submit=True)


def test_a_folder_in_which_training_would_refuse_the_job_is_refused_before_it_is_written(call, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    run_folder.write_workdir(folder, cfg=resolve(), base={}, command=())
    (folder / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"runs/mine: the run there differs in optim\.learning_rate"):
        call(changes={"optim.learning_rate": 3e-5})
    assert not (folder / "job.sbatch").exists()
    call()  # which resumes the run
    assert (folder / "job.sbatch").exists()


def test_sizes_that_cannot_be_compared_cost_no_job(call, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(size_comparison, "SIZES", {"many": 16})  # more GPUs than the arithmetic places
    call(PLAN, others=None)
    assert (tmp_path / "runs" / "mine" / "job.sbatch").is_file()
    told = capsys.readouterr().out
    assert "other sizes are not compared: " in told and told.splitlines()[-1].startswith("h100x4")


def test_file_of_ours_is_written_anew_and_any_other_is_kept(call, tmp_path: Path) -> None:
    file = tmp_path / "own.sh"
    call(output=str(file))
    call(output=str(file), assignments={"seed": "13"})
    assert "--config.seed=13" in file.read_text(encoding="utf-8")
    file.write_text("echo mine\n", encoding="utf-8")
    for path in (file, file / "job.sbatch"):
        with pytest.raises(UserError, match=str(file)):
            call(output=str(path))
    assert file.read_text(encoding="utf-8") == "echo mine\n"


def test_a_submitted_job_gets_no_setting_of_the_planner(call, tmp_path: Path, monkeypatch, capsys) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho platforms=$JAX_PLATFORMS mine=$MINE\n", encoding="utf-8")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("MINE", "kept")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(environment, "_before", {"JAX_PLATFORMS": None})  # as `environment.prepare_compiler` leaves it
    call(submit=True)
    assert capsys.readouterr().out.splitlines()[-1] == "platforms= mine=kept"
    sbatch.write_text("#!/bin/bash\necho 'invalid partition' >&2\nexit 1\n", encoding="utf-8")
    with pytest.raises(UserError, match="invalid partition"):
        call(submit=True)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match="--submit"):
        call(submit=True)


def test_jobs_are_planned_for_other_machines_wherever_they_are_written(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(program.environment, "prepare_compiler", lambda *, everywhere: asked.append(everywhere))
    monkeypatch.setattr(program.environment, "reserve_memory", lambda: None)
    monkeypatch.setattr(program.importlib, "import_module", lambda name: SimpleNamespace(run=lambda *_: 0))
    for words in (["slurm"], ["plan"], ["plan", "--target", "h100x2"], ["plan", "--estimate"]):
        assert run.main([*words, "--config", "configs/h100x4.py"]) == 0
    assert asked == [True, False, True, True]


@pytest.mark.parametrize(
    ("file", "changes", "rule"),
    [
        ("squad", {}, "loss.teacher_k = 64.*2 nodes"),
        ("dpo/smollm2", {"dpo.reference": "cached"}, "dpo.reference = 'cached'.*2 nodes"),
    ],
)
def test_what_one_process_fills_is_refused_for_several_nodes(file, changes, rule) -> None:
    values = config_file.load(f"configs/{file}.py", root=PROJECT)
    config_file.override(values, changes)
    cfg = config.build(values)
    with pytest.raises(UserError, match=rule):
        planner.make(cfg, "2xh100x4", estimate=True)
    hardware.check_processes(cfg, 8, 1)


def test_a_list_names_the_run_whose_readers_cannot_lie_on_several_nodes(tmp_path: Path) -> None:
    """One line before anything is planned or written, with the way on."""
    cfg = resolve(**{"mesh.placement": "split"})
    task = loading.Loaded("configs/h100x4.py", cfg, tmp_path / "apart", {}, {}, {})
    args = parser.parse(["slurm", "--config", "some.list", "--target", "2xh100x4", "--workdir", str(tmp_path)])
    with pytest.raises(
        UserError, match=r"apart: mesh\.placement='split' over several processes.*or one node"
    ) as caught:
        slurm.run(args, task)
    assert "\n" not in str(caught.value) and not list(tmp_path.glob("*.sbatch"))
