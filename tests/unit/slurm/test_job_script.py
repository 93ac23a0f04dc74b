"""lw_jax/slurm/job_script.py: text of the sbatch file."""

import shlex
from pathlib import Path

import pytest

from lw_jax.core.config import Train
from lw_jax.core.errors import UserError
from lw_jax.slurm import cluster_profile, job_script
from lw_jax.slurm.cluster_profile import Site
from tests.unit.slurm.test_cluster_profile import SITE
from tests.unit.slurm.test_job import JOB, change


def directives(text: str) -> dict[str, str]:
    """Returns what sbatch would read, up to the first command."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            break
        for word in shlex.split(line.removeprefix("#SBATCH"), comments=True) if line.startswith("#SBATCH") else ():
            key, _, value = word.removeprefix("--").partition("=")
            assert key not in found, f"{key} twice"
            found[key] = value
    return found


def test_every_directive_of_a_described_site() -> None:
    text = job_script.script(JOB, SITE)
    assert "\nmodule load cuda/12.4 gcc/13.2.0+lto\n" in text
    assert directives(text) == {
        "job-name": "mine",
        "partition": "gpu,long",
        "account": "proj-7",
        "qos": "high",
        "constraint": "nvlink&[rack1|rack2]",
        "nodes": "1",
        "ntasks-per-node": "1",
        "gres": "gpu:h100:4",
        "cpus-per-task": "20",
        "mem": "48G",  # 32 GiB x 1.25 + 8
        "time": "0-04:30:00",  # 3.2 h x 1.3 + 0.25 h = 4.41 h
        "signal": "TERM@180",  # 120 s + two steps of 7 s, in whole minutes
        "requeue": "",
        "open-mode": "append",
        "output": "/runs/mine/logs/%x-%j.log",
    }


def test_run_without_steps_gets_no_signal_which_would_end_it_at_every_start() -> None:
    step, between = cluster_profile.pace(JOB.hours, Train(steps=0))
    start = change(step_seconds=step, checkpoint_seconds=between)
    assert "signal" not in directives(job_script.script(start, SITE))
    with pytest.raises(UserError, match="max_hours = 4: 3.20 h .* nothing is saved"):
        job_script.script(start, Site(max_hours=4.0))


def test_without_a_site_only_the_portable_minimum_is_asked_and_the_script_says_what_to_fill_in() -> None:
    text = job_script.script(JOB, Site())
    assert {"partition", "account", "qos", "constraint", "gres"}.isdisjoint(directives(text))
    assert directives(text)["gpus-per-node"] == "4"
    assert "module load" not in text
    assert [line for line in text.splitlines() if "partition and account" in line and line.startswith("# ")]


def test_compiled_programs_are_kept_in_the_projects_cache_when_there_is_no_scratch(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "a cache"))
    text = job_script.script(JOB, Site())
    assert f"export JAX_COMPILATION_CACHE_DIR='{tmp_path}/a cache/compiled'" in text


def test_several_nodes_run_one_task_each_that_drives_all_gpus_of_its_node() -> None:
    text = job_script.script(change(nodes=3, gpus=5), SITE)
    found = directives(text)
    assert (found["nodes"], found["ntasks-per-node"], found["gres"]) == ("3", "1", "gpu:h100:5")
    assert "export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4\n" in text
    assert "--kill-on-bad-exit=0" in text
    assert "JAX_LOCAL_DEVICE_IDS" not in job_script.script(JOB, SITE)
    assert "COMPILATION_CACHE" not in text, "several processes on GPUs have none"


def test_killed_tasks_of_a_long_run_do_not_use_up_the_requeues_at_its_limit() -> None:
    days = change(nodes=2, hours=400.0)
    requeues = cluster_profile.limit(days, SITE).requeues
    assert requeues > job_script.RESTARTS
    assert f'"${{SLURM_RESTART_COUNT:-0}}" -lt {requeues + job_script.RESTARTS} ]' in job_script.script(days, SITE)


def test_origin_cannot_leave_its_comment() -> None:
    text = job_script.script(change(origin="plan x\n#SBATCH --account=other\nrm -rf /"), SITE)
    assert directives(text)["account"] == "proj-7"
    assert "\nrm" not in text


@pytest.mark.parametrize("logs", ['/runs/a"b/logs', "/runs/a\\b/logs", "/runs/a\nb/logs"])
def test_log_path_that_slurm_would_misread_is_refused(logs: str) -> None:
    with pytest.raises(UserError, match="rename"):
        job_script.script(change(logs=Path(logs)), SITE)


def test_days_are_written_as_slurm_reads_them() -> None:
    assert directives(job_script.script(change(hours=40.0), Site()))["time"] == "2-04:15:00"
