"""lw_jax/commands/slurm.py: the site profile, the numbers asked of SLURM, the job's text."""

import dataclasses
import json
import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from configs import base
from lw_jax.commands import slurm
from lw_jax.core import config, config_file, validation
from lw_jax.core.errors import UserError
from lw_jax.planning import planner as plans
from tests.unit.test_cluster_profile import SITE

JOB = slurm.Job(
    name="mine",
    command=("python", "/project/run.py", "train", "--config", "configs/h100x4.py", "--workdir", "/runs/mine"),
    folder=Path("/project"),
    logs=Path("/runs/mine/logs"),
    nodes=1,
    gpus=4,
    host_memory_bytes=32 * 2**30,
    hours=3.2,
    step_seconds=7.0,
    checkpoint_seconds=700.0,
    memory_fraction=0.92,
    origin="plan h100x4 (compiled): tensor 2x2",
)
CHOSEN = {"strategy": "tensor", "mesh": "2x2", "micro_batch": 8, "accumulation": 3, "remat": "none", "devices_used": 4}
PLAN = {
    "target": "h100x4",
    "devices": 4,
    "per_host": 4,
    "hosts": 1,
    "compiled": True,
    "hours": 3.2,
    "host_memory_bytes": 20 * 2**30,
    "chosen": CHOSEN | {"step_seconds": 7.0, "samples_per_second": 12.5, "peak_bytes": 2**30},
    "remedies": [],
}


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


def change(**values: Any) -> slurm.Job:
    return dataclasses.replace(JOB, **values)


def check_syntax(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- the script ---


def test_every_directive_of_a_described_site() -> None:
    assert directives(slurm.script(JOB, SITE)) == {
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


def test_without_a_site_only_the_portable_minimum_is_asked_and_the_script_says_what_to_fill_in() -> None:
    text = slurm.script(JOB, slurm.Site())
    assert {"partition", "account", "qos", "constraint", "gres"}.isdisjoint(directives(text))
    assert directives(text)["gpus-per-node"] == "4"
    assert "module load" not in text
    assert [line for line in text.splitlines() if "partition and account" in line and line.startswith("# ")]


def test_body_prepares_then_trains_with_the_exact_words() -> None:
    lines = slurm.script(JOB, SITE).splitlines()
    order = [
        "cd /project",
        "module load cuda/12.4 gcc/13.2.0+lto",
        "source ~/venvs/lw/bin/activate",
        "export NOTE='two words'",
        "export JAX_COMPILATION_CACHE_DIR=/scratch/me/lw_jax/compiled",
        "export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92",
        "srun --cpus-per-task=20 \\",
        "    python /project/run.py train --config configs/h100x4.py --workdir /runs/mine || code=$?",
    ]
    assert [lines.index(line) for line in order] == sorted(lines.index(line) for line in order)
    assert not [line for line in lines if "git " in line or "pip install" in line]


def test_compiled_programs_are_kept_in_the_projects_cache_when_there_is_no_scratch(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "a cache"))
    text = slurm.script(JOB, slurm.Site())
    assert f"export JAX_COMPILATION_CACHE_DIR='{tmp_path}/a cache/compiled'" in text


def test_several_nodes_run_one_task_each_that_drives_all_gpus_of_its_node() -> None:
    text = slurm.script(change(nodes=3, gpus=5), SITE)
    found = directives(text)
    assert (found["nodes"], found["ntasks-per-node"], found["gres"]) == ("3", "1", "gpu:h100:5")
    assert "export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4\n" in text
    assert "--kill-on-bad-exit=0" in text
    assert "JAX_LOCAL_DEVICE_IDS" not in slurm.script(JOB, SITE)


@pytest.mark.parametrize("gpus", [1, 2, 4])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("site", [slurm.Site(), SITE, slurm.Site(max_hours=1.5)], ids=["none", "full", "short"])
def test_bash_accepts_every_variant(gpus: int, nodes: int, site: slurm.Site) -> None:
    check_syntax(slurm.script(change(gpus=gpus, nodes=nodes), site))


def test_words_reach_bash_as_they_are_and_none_becomes_code(tmp_path: Path) -> None:
    nasty = ("it's", 'a "b"', "$HOME `id` $(id)", "two\n#SBATCH --account=other\nlines", "a\\b", "*", "; exit 9", "")
    text = slurm.script(change(command=("printf", "%s\\0", *nasty), folder=tmp_path), slurm.Site(scratch=str(tmp_path)))
    check_syntax(text)
    assert "account" not in directives(text)
    (tmp_path / "srun").write_text('#!/bin/bash\nshift\nexec "$@"\n', encoding="utf-8")
    (tmp_path / "srun").chmod(0o755)
    path = f"{tmp_path}:{Path(shutil.which('bash') or '').parent}:/usr/bin:/bin"
    done = subprocess.run(["bash", "-c", text], capture_output=True, check=True, env={"PATH": path})
    assert tuple(done.stdout.decode().split("\0")[:-1]) == nasty


def test_origin_cannot_leave_its_comment() -> None:
    text = slurm.script(change(origin="plan x\n#SBATCH --account=other\nrm -rf /"), SITE)
    assert directives(text)["account"] == "proj-7"
    assert "\nrm" not in text


def test_log_path_is_quoted_and_its_percent_signs_are_escaped() -> None:
    text = slurm.script(change(logs=Path("/runs/100% # mine/logs")), SITE)
    assert directives(text)["output"] == "/runs/100%% # mine/logs/%x-%j.log"


@pytest.mark.parametrize("logs", ['/runs/a"b/logs', "/runs/a\\b/logs", "/runs/a\nb/logs"])
def test_log_path_that_slurm_would_misread_is_refused(logs: str) -> None:
    with pytest.raises(UserError, match="rename"):
        slurm.script(change(logs=Path(logs)), SITE)


# --- time ---


@pytest.mark.parametrize(
    ("hours", "max_hours", "minutes", "requeues"),
    [
        (3.2, math.inf, 270, 0),  # 4.41 h
        (0.01, math.inf, 30, 0),  # 0.263 h
        (1.0, math.inf, 105, 0),  # 1.55 h
        (3.2, 4.5, 270, 0),
        (3.2, 4.45, 267, 0),  # cut to the site's longest, which still is enough
        (3.2, 2.0, 120, 2),  # 4.16 h of training in runs of 1.7 h
        (100.0, 48.0, 2880, 2),  # 130 h in runs of 47.7 h
    ],
)
def test_time_is_the_predicted_with_margin_and_what_exceeds_the_site_is_requeued(hours, max_hours, minutes, requeues):
    assert slurm.limit(change(hours=hours), slurm.Site(max_hours=max_hours))[:2] == (minutes, requeues)


def test_script_says_how_often_it_requeues_itself() -> None:
    told = (
        "# 3.20 h predicted, x 1.3 + 0.25 h to start = 4.41 h, more than max_hours 2: it requeues itself 2 times or so,"
    )
    assert f"{told} with a checkpoint every 11.7 min.\n" in slurm.script(JOB, slurm.Site(max_hours=2.0))
    assert "it requeues itself" not in slurm.script(JOB, SITE)


@pytest.mark.parametrize(
    ("checkpoint_seconds", "held"),
    [(6119.0, True), (6121.0, False)],  # 2 h less 0.25 h to start and 180 s of notice are 6120 s
)
def test_limit_below_start_up_and_one_checkpoint_interval_is_refused_with_what_would_fit(checkpoint_seconds, held):
    job, site = change(checkpoint_seconds=checkpoint_seconds), slurm.Site(max_hours=2.0)
    if held:
        assert slurm.limit(job, site).requeues == 2
        return
    with pytest.raises(UserError, match=r"max_hours = 2:.*102\.0 min.*checkpoint_every to 874 at most.*longer jobs"):
        slurm.script(job, site)


def test_run_that_one_job_holds_needs_no_checkpoint_on_the_way() -> None:
    assert slurm.limit(change(checkpoint_seconds=3.2 * 3600), slurm.Site(max_hours=4.5)).requeues == 0


def test_days_are_written_as_slurm_reads_them() -> None:
    assert directives(slurm.script(change(hours=40.0), slurm.Site()))["time"] == "2-04:15:00"


def test_site_whose_longest_job_leaves_no_time_to_train_is_refused() -> None:
    with pytest.raises(UserError, match=r"max_hours = 0\.5.*longer jobs"):
        slurm.limit(change(step_seconds=500.0), slurm.Site(max_hours=0.5))


# --- from the plan to the job ---


@pytest.mark.parametrize(
    ("word", "file", "target"),
    [
        ("", "configs/h100x4.py", "h100x4"),
        ("single", "configs/h100x4.py", "h100x1"),
        ("dual", "configs/machines/a100_40x1.py:latentwire", "a100_40x2"),
        ("quad", "configs/machines/h100x2.py", "h100x4"),
        ("quad", "configs/2xh100x8.py", "h100x4"),
        ("", "configs/2xh100x8.py", "2xh100x8"),
        ("h200x8", "configs/machines/h100x2.py", "h200x8"),
        ("h200x8", "configs/default.py", "h200x8"),
    ],
)
def test_target_comes_from_the_word_and_the_configurations_name(word: str, file: str, target: str) -> None:
    assert slurm.resolve_target(word, config=file) == target


@pytest.mark.parametrize("word", ["", "dual"])
def test_target_without_a_card_is_refused(word: str) -> None:
    with pytest.raises(UserError, match="names no card"):
        slurm.resolve_target(word, config="configs/default.py")


def request(**values: Any) -> slurm.Request:
    return dataclasses.replace(
        slurm.Request(config="configs/h100x4.py", assignments={"seed": "7"}, project=Path("/project")), **values
    )


def resolve(**changes: Any) -> tuple[config.Config, dict[str, Any]]:
    values = base.get_config()
    values.llms.llama = base.llm("HuggingFaceTB/SmolLM2-135M")
    values.encoder.source = "HuggingFaceTB/SmolLM2-135M"
    values.update_from_flattened_dict(changes)
    cfg = config.build(values)
    return cfg, config.to_dict(cfg)


def make(plan: dict[str, Any] = PLAN, site: slurm.Site = SITE, **values: Any) -> slurm.Job:
    return slurm.make_job(plan, resolved=resolve()[1], workdir=Path("/runs/mine"), request=request(**values), site=site)


def test_job_runs_what_was_planned() -> None:
    job = make()
    train = resolve()[0].train
    pace = 3.2 * 3600 / train.steps
    assert job == dataclasses.replace(
        JOB,
        step_seconds=pace,
        checkpoint_seconds=pace * train.checkpoint_every,
        folder=Path.cwd(),
        host_memory_bytes=20 * 2**30,
        command=(
            *("python", "/project/run.py", "train", "--config", "configs/h100x4.py", "--config.seed=7"),
            *("--config.mesh.placement=tensor", "--config.mesh.data=2", "--config.mesh.model=2"),
            *("--config.train.micro_batch=8", "--config.compute.remat=none", "--workdir", "/runs/mine"),
        ),
        origin="plan h100x4 (compiled): tensor 2x2, micro-batch 8 x 3 accumulated, remat none",
    )


@pytest.mark.parametrize(
    ("strategy", "mesh", "axes"),
    [
        ("replicate", "3x1", {"mesh.data": 3}),
        ("fsdp", "3x1", {"mesh.data": 3}),
        ("tensor", "3x2", {"mesh.data": 3, "mesh.model": 2}),
        ("single", "1x1", {}),
        ("split", "llama 2x1, qwen 2x1", {}),
        ("hybrid3", "llama 1x2, qwen 1x1", {}),
        ("hybrid4", "llama 1x2, qwen 1x2", {}),
    ],
)
def test_a_job_of_every_strategy_is_accepted_whatever_its_file_sets(strategy, mesh, axes) -> None:
    words = make(PLAN | {"chosen": {**PLAN["chosen"], "strategy": strategy, "mesh": mesh}}).command
    found = config_file.take_assignments(words)[0]
    del found["seed"]
    assert found == {
        **{"mesh.placement": strategy, "mesh.data": "-1", "mesh.model": "1"},
        **{path: str(size) for path, size in axes.items()},
        **{"train.micro_batch": "8", "compute.remat": "none"},
    }
    values = base.get_config()
    values.mesh.update(placement="tensor", data=4, model=3)
    values.llms.llama = base.llm("folder/llama")
    values.encoder.source = "folder/encoder"
    values.train.global_batch = 48
    config_file.override(values, found)
    validation.validate(config.build(values))


def test_plan_goes_before_an_assignment_of_the_same_key() -> None:
    words = make(assignments={"train.micro_batch": "64", "seed": "7"}).command
    assert [word for word in words if "micro_batch" in word] == ["--config.train.micro_batch=8"]


def test_job_keeps_its_own_interpreter_unless_the_site_activates_one() -> None:
    assert make(site=slurm.Site(modules=("cuda",))).command[0] == sys.executable
    assert make(site=SITE).command[0] == "python"


def test_name_of_the_job_holds_no_letter_that_sbatch_reads() -> None:
    job = slurm.make_job(
        PLAN, resolved=resolve()[1], workdir=Path('/runs/my run "é#'), request=request(), site=slurm.Site()
    )
    assert job.name == "my-run-"


def test_memory_fraction_covers_the_utilisation_that_was_planned_for() -> None:
    resolved = resolve()[1]
    resolved["mesh"]["target_utilisation"] = 0.95
    job = slurm.make_job(PLAN, resolved=resolved, workdir=Path("/runs/mine"), request=request(), site=SITE)
    assert job.memory_fraction == 0.95
    resolved["mesh"]["target_utilisation"] = 0.8
    job = slurm.make_job(PLAN, resolved=resolved, workdir=Path("/runs/mine"), request=request(), site=SITE)
    assert job.memory_fraction == slurm.MEMORY_FRACTION


def test_hours_of_the_user_replace_the_predicted_and_give_the_pace() -> None:
    assert make(hours=11.0).step_seconds == 11.0 * 3600 / resolve()[0].train.steps
    assert make(hours=11.0).basis == "given by --hours"
    assert make(hours=11.0).hours == 11.0
    assert make(PLAN | {"hours": math.nan}, hours=11.0).hours == 11.0


@pytest.mark.parametrize("hours", [math.nan, math.inf, 0.0, -1.0])
def test_unusable_hours_are_refused(hours: float) -> None:
    with pytest.raises(UserError, match="hours = .*--hours"):
        make(PLAN | {"hours": hours})
    with pytest.raises(UserError, match="--hours = "):
        make(hours=hours)


def test_plan_in_which_nothing_fits_is_refused_with_advice() -> None:
    with pytest.raises(UserError, match=r"h100x4: no placement.*larger\s+cards.*run\.py plan"):
        make(PLAN | {"chosen": None})


def test_missing_configuration_file_is_refused() -> None:
    with pytest.raises(UserError, match="--config FILE"):
        make(config="")


# --- the verb ---


@pytest.fixture
def call(tmp_path: Path, monkeypatch):
    """Runs the verb without a site profile of this machine; returns the targets that were planned."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("LW_JAX_SITE", raising=False)

    def run(
        plan: dict[str, Any] = PLAN,
        others: tuple[dict[str, Any], ...] | None = (),
        changes: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> list[str]:
        targets = []
        cfg, resolved = resolve(**changes or {})

        def planner(given: config.Config, target: str) -> dict[str, Any]:
            assert given is cfg
            targets.append(target)
            return plan | {"target": target}

        asked = request(**values)
        workdir = tmp_path / "runs" / "mine"
        slurm.main(cfg, resolved=resolved, workdir=workdir, request=asked, planner=planner, others=others)
        return targets

    return run


def test_verb_writes_the_file_and_the_logs_folder_and_tells_the_price(call, tmp_path: Path, capsys) -> None:
    others = ({**PLAN, "target": "h100x1", "devices": 1, "hours": 9.5}, {**PLAN, "devices": 2, "target": "h100x2"})
    others[1]["chosen"] = None
    assert call(others=others) == ["h100x4"]
    file = tmp_path / "runs" / "mine" / "job.sbatch"
    check_syntax(file.read_text(encoding="utf-8"))
    assert (tmp_path / "runs" / "mine" / "logs").is_dir()
    lines = capsys.readouterr().out.splitlines()
    assert f"  sbatch {shlex.quote(str(file))}" in lines
    assert "time limit 0-04:30:00: 3.20 h predicted, x 1.3 + 0.25 h to start" in lines
    assert [line.split() for line in lines[-4:]] == [
        ["size", "GPUs", "hours", "GPU-hours", "plan"],
        ["h100x1", "1", "9.50", "9.5", "tensor"],
        ["h100x2", "2", "-", "-", "does", "not", "fit"],
        ["h100x4", "4", "3.20", "12.8", "tensor"],
    ]


def test_verb_tells_limit_requeues_and_checkpoints_in_one_line(call, tmp_path: Path, capsys) -> None:
    (tmp_path / "site.toml").write_text("max_hours = 2", encoding="utf-8")
    call(site=str(tmp_path / "site.toml"))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("time limit"))
    assert "0-02:00:00: 3.20 h predicted" in line and "max_hours 2: it requeues itself 2 times" in line
    assert "checkpoint every" in line


def test_price_follows_the_hours_of_the_user(call, capsys) -> None:
    call(hours=5.0, others=(PLAN,))
    assert capsys.readouterr().out.splitlines()[-1].split() == ["h100x4", "4", "5.00", "20.0", "tensor"]


# --- what would be void, and what is not there ---


def test_a_run_whose_result_would_be_void_gets_no_job(call, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"optim\.warmup_steps=100 is longer than .* 60 steps"):
        call(changes={"optim.warmup_steps": 100, "train.steps": 60})
    assert not (tmp_path / "runs").exists(), "it was refused before anything was planned or written"


def test_what_is_only_doubtful_is_told_with_the_job(call, capsys) -> None:
    call(changes={"optim.warmup_steps": 40, "train.steps": 60})
    assert "warning: optim.warmup_steps=40 is 67% of" in capsys.readouterr().out


def test_a_data_file_that_is_not_there_is_told_and_refused_where_the_job_is_queued_at_once(call, capsys) -> None:
    missing = {"data.train": "no/rows.jsonl"}
    call(changes=missing)
    assert f"warning: data.train='no/rows.jsonl': no such file or folder, seen from {Path.cwd()}" in (
        capsys.readouterr().out
    )
    with pytest.raises(UserError, match=r"data\.train='no/rows\.jsonl'"):
        call(changes=missing, submit=True)


@pytest.mark.parametrize("source", ["cards", "hub:rajpurkar/squad", __file__])
def test_data_that_is_made_fetched_or_there_is_not_missing(source: str, call, capsys) -> None:
    call(changes={"data.train": source})
    assert "data.train" not in capsys.readouterr().out


# --- like beside like ---


def sized(count: int, hours: float, *, compiled: bool = True) -> dict[str, Any]:
    return PLAN | {"target": f"h100x{count}", "devices": count, "hours": hours, "compiled": compiled}


def test_compiled_and_estimated_hours_never_share_a_column() -> None:
    """Of the issue: one H100 estimated at 0.93 h beside four compiled at 0.39 h said that four cost 1.75 times more."""
    rows = [
        sized(4, 0.39),
        sized(1, 1.57),
        *(sized(n, h, compiled=False) for n, h in ((1, 0.93), (2, 0.47), (4, 0.24))),
    ]
    head, one, two, four, note = slurm.compare(rows, hours=0.39)
    assert head.split() == ["size", "GPUs", "hours", "GPU-hours", "est.", "hours", "est.", "GPU-hours", "plan"]
    assert one.split() == ["h100x1", "1", "1.57", "1.6", "0.93", "0.9", "tensor"]
    assert two.split() == ["h100x2", "2", "-", "-", "0.47", "0.9", "tensor", "(estimate)"]
    assert four.split() == ["h100x4", "4", "0.39", "1.6", "0.24", "1.0", "tensor"]
    assert note.startswith("est.: arithmetic")


def test_hours_of_the_user_scale_every_size_alike() -> None:
    head, one, four, note = slurm.compare([sized(4, 0.4), sized(1, 1.6)], hours=0.8)
    assert "est." not in head
    assert (one.split()[2:4], four.split()[2:4]) == (["3.20", "3.2"], ["0.80", "3.2"])
    assert note == "every size x 2.00: the job's hours over the predicted ones"


def test_other_sizes_are_the_plans_that_are_kept_else_all_are_estimated(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path))
    cfg, _ = resolve()
    found = slurm.other_sizes(cfg, PLAN)
    assert [(one["target"], one["compiled"]) for one in found] == [(f"h100x{n}", False) for n in (1, 2, 4)]
    for count in (1, 2):
        file = plans._file(cfg, f"h100x{count}")
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(sized(count, 7.0)), "utf-8")
    found = slurm.other_sizes(cfg, PLAN)
    assert [(one["target"], one["compiled"], one["hours"]) for one in found] == [
        ("h100x1", True, 7.0),
        ("h100x2", True, 7.0),
    ]
    found = slurm.other_sizes(cfg, PLAN | {"compiled": False})
    assert [one["compiled"] for one in found] == [False, False], "an estimated job is compared with estimates alone"


def test_estimate_is_called_one(call, capsys) -> None:
    call(PLAN | {"compiled": False})
    assert "plan h100x4 (estimated, not compiled)" in capsys.readouterr().out


def test_idle_gpus_are_told(call, capsys) -> None:
    call()
    assert "costs less" not in capsys.readouterr().out
    call(PLAN | {"chosen": {**PLAN["chosen"], "strategy": "replicate", "mesh": "2x1", "devices_used": 2}})
    assert "2 of the 4 GPUs do the work: --target h100x2 costs less" in capsys.readouterr().out


def test_word_for_a_size_is_planned_on_the_configurations_card(call) -> None:
    assert call(target="dual") == ["h100x2"]


def test_file_of_ours_is_written_anew_and_any_other_is_kept(call, tmp_path: Path) -> None:
    file = tmp_path / "own.sh"
    call(output=str(file))
    call(output=str(file), assignments={"seed": "13"})
    assert "--config.seed=13" in file.read_text(encoding="utf-8")
    file.write_text("echo mine\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"own\.sh.*another name"):
        call(output=str(file))
    assert file.read_text(encoding="utf-8") == "echo mine\n"


def test_output_that_cannot_be_written_is_refused_with_its_path(call, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file"):
        call(output=str(tmp_path / "file" / "job.sbatch"))


def test_submitting_where_there_is_no_sbatch_is_refused(call, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no sbatch"):
        call(submit=True)
