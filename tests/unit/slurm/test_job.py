"""lw_jax/slurm/job.py: size, command line, memory and time limit of a job, from its plan."""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from configs import base
from lw_jax.core import command_line, config, config_file, environment, validation
from lw_jax.core.errors import UserError
from lw_jax.planning import placement_search, plans
from lw_jax.planning.plans import StepCandidate, StepPlan
from lw_jax.slurm import size_comparison
from lw_jax.slurm.cluster_profile import Site, limit
from lw_jax.slurm.job import Job, Request, make_job
from lw_jax.slurm.past_runs import Record
from lw_jax.training.hardware_record import HardwareRecord
from sharding import placement as placements
from tests.unit.slurm.test_cluster_profile import SITE

JOB = Job(
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
CHOSEN = StepCandidate(
    **{"strategy": "tensor", "mesh": "2x2", "data": 2, "model": 2, "devices_used": 4, "peak_bytes": 2**30},
    **{"remat": "none", "micro_batch": 8, "accumulation": 3, "step_seconds": 7.0, "samples_per_second": 12.5},
)
HARDWARE = HardwareRecord(kind="H100", card="h100", devices=4, hosts=1, strategy="tensor", remat="none", data=2)
PLAN = StepPlan(
    target="h100x4", devices=4, per_host=4, compiled=True, hours=3.2, host_memory_bytes=20 * 2**30, chosen=CHOSEN
)


def planned(chosen: StepCandidate | None = CHOSEN, **values: Any) -> StepPlan:
    return dataclasses.replace(PLAN, chosen=chosen, **values)


def change(**values: Any) -> Job:
    return dataclasses.replace(JOB, **values)


def request(**values: Any) -> Request:
    return dataclasses.replace(
        Request(config="configs/h100x4.py", assignments={"seed": "7"}, program=("/project/run.py",)), **values
    )


def resolve(**changes: Any) -> config.Config:
    values = base.get_config()
    values.llms.llama = base.llm("HuggingFaceTB/SmolLM2-135M")
    values.encoder.source = "HuggingFaceTB/SmolLM2-135M"
    values.update_from_flattened_dict(changes)
    return config.build(values)


@pytest.mark.parametrize(
    ("changes", "max_hours", "minutes", "requeues"),
    [
        ({}, math.inf, 270, 0),  # of 3.2 h: 4.41 h
        ({"hours": 0.01}, math.inf, 30, 0),  # 0.263 h
        ({"hours": 1.0}, math.inf, 105, 0),  # 1.55 h
        ({"checkpoint_seconds": 3.2 * 3600}, 4.5, 270, 0),  # one job holds the run: it needs no checkpoint on the way
        ({}, 4.45, 267, 0),  # cut to the site's longest, which still is enough
        ({}, 2.0, 120, 2),  # 4.16 h of training in runs of 1.7 h
        ({"hours": 100.0}, 48.0, 2880, 2),  # 130 h in runs of 47.7 h
        ({"checkpoint_seconds": 6119.0}, 2.0, 120, 2),  # 2 h less 0.25 h to start and 180 s of notice are 6120 s
    ],
)
def test_time_is_the_predicted_with_margin_and_what_exceeds_the_site_is_requeued(changes, max_hours, minutes, requeues):
    assert limit(change(**changes), Site(max_hours=max_hours))[:2] == (minutes, requeues)


@pytest.mark.parametrize(
    ("changes", "max_hours", "told"),
    [
        ({"checkpoint_seconds": 6121.0}, 2.0, r"max_hours = 2:.*102\.0 min.*checkpoint_every to 874"),
        ({"step_seconds": 500.0}, 0.5, r"max_hours = 0\.5"),
    ],
)
def test_limit_that_leaves_no_time_to_train_or_to_a_checkpoint_is_refused(changes, max_hours, told):
    with pytest.raises(UserError, match=told):
        limit(change(**changes), Site(max_hours=max_hours))


def make(plan: StepPlan = PLAN, site: Site = SITE, workdir: str = "/runs/mine", **values: Any) -> Job:
    return make_job(plan, resolve(), workdir=Path(workdir), request=request(**values), site=site)


def test_job_runs_what_was_planned_whatever_the_command_line_says_of_the_same_key() -> None:
    job = make(assignments={"seed": "7", "train.micro_batch": "64"})
    train = resolve().train
    pace = 3.2 * 3600 / train.steps
    assert job == dataclasses.replace(
        JOB,
        step_seconds=pace,
        checkpoint_seconds=pace * train.checkpoint_every,
        folder=Path.cwd(),
        host_memory_bytes=20 * 2**30,
        command=(
            *("python", "/project/run.py", "train", "--config", "configs/h100x4.py", "--config.seed=7"),
            *("--config.train.micro_batch=8", "--config.mesh.placement=tensor", "--config.mesh.data=2"),
            *("--config.mesh.model=2", "--config.compute.remat=none", "--workdir", "/runs/mine"),
        ),
        origin="plan h100x4 (compiled): tensor 2x2, micro-batch 8 x 3 accumulated, remat none",
        basis="predicted, without validations: data.validation_limit and eval.examples are 0",
    )


@pytest.mark.parametrize(
    ("strategy", "count", "model"),
    [
        *(("replicate", 3, 1), ("fsdp", 3, 1), ("tensor", 6, 2), ("single", 1, 1)),
        *(("split", 4, 1), ("hybrid3", 3, 1), ("hybrid4", 4, 1)),
    ],
)
def test_a_job_of_every_strategy_runs_where_it_was_planned_whatever_its_file_sets(strategy, count, model) -> None:
    readers, devices = {"llama": 3, "qwen": 2}, jax.devices()[:count]
    placed = placements.place(strategy, readers, model=model, devices=devices)
    words = make(planned(dataclasses.replace(CHOSEN, strategy=strategy, **plans.layout(placed)))).command
    found = command_line.take_assignments(words)[0]
    del found["seed"]
    data = {"replicate": 3, "fsdp": 3, "tensor": 3, "split": 2}.get(strategy, -1)
    assert found == {
        **{"mesh.placement": strategy, "mesh.data": str(data), "mesh.model": str(model)},
        **{"train.micro_batch": "8", "compute.remat": "none"},
    }
    values = base.get_config()
    values.mesh.update(placement="tensor", data=4, model=3)
    values.llms.llama = base.llm("folder/llama")
    values.encoder.source = "folder/encoder"
    values.train.global_batch = 48
    config_file.override(values, found)
    cfg = config.build(values)
    validation.validate(cfg)
    ((named, *axes),) = placement_search.strategies(cfg, readers, count)
    assert placements.place(named, readers, data=axes[0], model=axes[1], devices=devices) == placed


def test_job_keeps_its_own_interpreter_unless_the_site_activates_one() -> None:
    assert make(site=Site(modules=("cuda",))).command[0] == sys.executable
    assert make(site=SITE).command[0] == "python"


def test_name_of_the_job_holds_no_letter_that_sbatch_reads() -> None:
    assert make(workdir='/runs/my run "é#').name == "my-run-"


@pytest.mark.parametrize(("utilisation", "fraction"), [(0.95, 0.95), (0.8, environment.FRACTION)])
def test_memory_fraction_covers_the_utilisation_that_was_planned_for(utilisation, fraction) -> None:
    cfg = resolve(**{"mesh.target_utilisation": utilisation})
    assert make_job(PLAN, cfg, workdir=Path("/runs/mine"), request=request(), site=SITE).memory_fraction == fraction


def test_hours_of_the_user_replace_the_predicted_and_give_the_pace() -> None:
    assert make(hours=11.0).step_seconds == 11.0 * 3600 / resolve().train.steps
    assert make(hours=11.0).basis == "given by --hours"
    assert make(hours=11.0).hours == 11.0
    assert make(planned(hours=math.nan), hours=11.0).hours == 11.0


def test_validations_are_in_the_hours_and_not_in_the_pace_of_steps() -> None:
    job = make(planned(validation_hours=0.8))
    assert job.hours == pytest.approx(4.0) and job.basis == "predicted, validations included"
    assert job.step_seconds == make().step_seconds
    assert make(planned(validation_hours=0.8), hours=11.0).hours == 11.0
    uncounted = planned(validation_hours=0.0, caching_key="dpo.reference")
    assert make(uncounted).basis == "predicted, validations included, without filling the cache of dpo.reference"
    assert make(uncounted, hours=11.0).basis == "given by --hours"


@pytest.mark.parametrize(("done", "left"), [(1500, 0.25), (2000, 0.0)])
def test_a_run_that_resumes_needs_the_hours_that_are_left(tmp_path, done, left) -> None:
    for step in ("200", str(done)):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "checkpoints" / step / "record.json").touch()
    (tmp_path / "checkpoints" / "1900.removed").mkdir()
    plan, cfg = planned(validation_hours=0.8, start_hours=0.5), resolve(**{"train.steps": 2000})
    new, job = (make_job(plan, cfg, workdir=at, request=request(), site=SITE) for at in (tmp_path / "a", tmp_path))
    assert (new.hours, new.start_hours) == (pytest.approx(4.5), 0.5)
    assert (job.hours, job.start_hours, job.step_seconds) == (pytest.approx(4.0 * left), 0.0, new.step_seconds)
    assert f"{2000 - done} of 2,000 steps left" in job.basis
    assert size_comparison.compare([planned(hours=None)], hours=job.hours)


def test_hours_without_validations_say_so() -> None:
    """Of `eval.examples=0` and `data.validation_limit=0`: how many examples are held out is not known."""
    assert make().basis == "predicted, without validations: data.validation_limit and eval.examples are 0"
    assert make(hours=11.0).basis == "given by --hours"
    record = Record(Path("/runs/old"), HARDWARE, step_seconds=3.0, peak_bytes=None, differences=())
    untimed = planned(hours=None, untimed="not understood")
    job = make_job(untimed, resolve(), workdir=Path("/runs/mine"), request=request(), site=SITE, record=record)
    assert job.basis.endswith("s/step, without validations: the plan has no time of theirs")
    start = resolve(**{"train.steps": 0})
    assert make_job(PLAN, start, workdir=Path("/runs/mine"), request=request(), site=SITE).basis == "predicted"


@pytest.mark.parametrize("hours", [math.nan, math.inf, 0.0, -1.0])
def test_unusable_hours_are_refused(hours: float) -> None:
    with pytest.raises(UserError, match="hours = .*--hours"):
        make(planned(hours=hours))
    with pytest.raises(UserError, match="--hours = "):
        make(hours=hours)


def test_plan_in_which_nothing_fits_is_refused_with_advice() -> None:
    with pytest.raises(UserError, match=r"h100x4: .*run\.py plan"):
        make(planned(None))


def test_plan_without_a_time_needs_hours_and_says_why() -> None:
    plan = planned(hours=None, untimed="not understood")
    with pytest.raises(UserError, match=r"not understood.*--hours"):
        make(plan)
    assert make(plan, hours=3.0).hours == 3.0
