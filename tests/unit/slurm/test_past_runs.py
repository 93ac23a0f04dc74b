"""lw_jax/slurm/past_runs.py: what an earlier run's folder tells of the time and memory of a job."""

import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import run
from lw_jax.commands import loading, parser
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.planning import planner
from lw_jax.slurm import cluster_profile, past_runs, size_comparison
from lw_jax.training import hardware_record, run_folder
from tests import tiny
from tests.unit.slurm import test_job

KIND = "NVIDIA H100 80GB HBM3"
HARDWARE = {"kind": KIND, "card": "h100", "devices": 3, "hosts": 1, "strategy": "fsdp", "remat": "full", "data": 3}
HARDWARE |= {"micro_batch": 8}
DEVICE = {"device": "gpu0", "samples": 10, "seconds": 10.0}
CHOSEN = dataclasses.replace(
    test_job.CHOSEN,
    strategy="fsdp",
    mesh="3x1",
    data=3,
    model=1,
    devices_used=3,
    remat="full",
    peak_bytes=44_200_000_000,
)
PLAN = test_job.planned(CHOSEN, target="h100x3", devices=3, per_host=3, hours=9.0)
LAPS = (2.0, 11.0, 3.0, 5.0, 4.0)  # median 4
STEPS = 1700


def resolve(**changes: Any) -> Config:
    return test_job.resolve(**{"train.steps": STEPS} | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An earlier, shorter run on three cards."""
    return write(tmp_path / "earlier", resolve(**{"train.steps": 60}))


def write(folder: Path, cfg: Config, *, hardware: dict[str, Any] = HARDWARE, laps=LAPS, **since: float) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(run_folder.config_text(cfg))
    (folder / hardware_record.FILE).write_text(json.dumps(hardware | {"since_step": 0, "since_time": 0.0} | since))
    rows = [{"step": 1, "train/loss": 3.0}, {"step": 5, "validation/loss": 2.0}]
    rows += [{"step": 10 * (i + 1), "train/seconds_per_step": lap} for i, lap in enumerate(laps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, peaks in (("devices.jsonl", (31.5e9, 41.2e9)), ("devices-1.jsonl", (38.0e9,))):
        lines = [DEVICE | {"time": 100.0 + i, "peak_bytes": peak} for i, peak in enumerate(peaks)]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_time_is_the_median_of_the_laps_and_memory_the_most_of_any_device(folder) -> None:
    found = past_runs.read(folder, resolve(), PLAN)
    assert (found.step_seconds, found.peak_bytes) == (statistics.median(LAPS), 41.2e9)
    assert found.describe() == f"measured in {folder} on 3 x {KIND}: 4 s/step"
    assert found.describe_memory(44.2e9) == "memory of a card: 41.2 GB measured at most, 44.2 GB planned"
    assert found.describe_differences() == []  # of a shorter run


def test_each_stage_counts_with_its_own_pace(tmp_path) -> None:
    staged = resolve(**{"train.steps": 50, "stages.pretrain.share": 0.6, "data.passages": "p.txt"})
    laps = (2.0, 2.0, 2.0, 7.0, 7.0)
    found = past_runs.read(write(tmp_path / "staged", staged, laps=laps), staged, PLAN)
    assert found.step_seconds == pytest.approx(0.6 * 2.0 + 0.4 * 7.0)
    often = {"train.steps": 50, "stages.pretrain.share": 0.4, "data.passages": "p.txt", "train.log_every": 100}
    often = resolve(**often)  # checkpoints end rows at every tenth step
    found = past_runs.read(write(tmp_path / "often", often, laps=(2.0, 2.0, 7.0, 7.0, 7.0)), often, PLAN)
    assert found.step_seconds == pytest.approx(0.4 * 2.0 + 0.6 * 7.0)
    short = resolve(**{"train.steps": 50, "stages.pretrain.share": 0.1, "data.passages": "p.txt"})
    found = past_runs.read(write(tmp_path / "short", short, laps=laps), short, PLAN)
    assert found.step_seconds == pytest.approx(2.0), "no lap ends in a stage of five steps"
    with pytest.raises(UserError, match="no seconds a step of stage 'answer'"):
        past_runs.read(write(tmp_path / "begun", staged, laps=laps[:3]), staged, PLAN)


def test_what_was_logged_before_the_run_moved_to_these_devices_does_not_count(tmp_path) -> None:
    moved = write(tmp_path / "moved", resolve(), since_step=30, since_time=100.5)
    found = past_runs.read(moved, resolve(), PLAN)
    assert (found.step_seconds, found.peak_bytes) == (4.5, 41.2e9)


def test_laps_that_are_no_numbers_are_left_out(tmp_path) -> None:
    odd = write(tmp_path / "odd", resolve(), laps=(2.0, "nan", 6.0))
    assert past_runs.read(odd, resolve(), PLAN).step_seconds == 4.0


def test_record_without_memory_says_so(folder) -> None:
    for file in folder.glob("devices*.jsonl"):
        file.unlink()
    assert "no peak in the record, 44.2 GB planned" in past_runs.read(folder, resolve(), PLAN).describe_memory(44.2e9)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("train.global_batch", 24, r"train\.global_batch is 24 there, \d+ here"),
        ("recipe", "dpo", "recipe is 'dpo' there, 'latentwire' here"),
        (
            "llms.llama.source",
            "other/llama",
            r"llms\.llama\.source is 'other/llama' there, 'HuggingFaceTB/SmolLM2-135M' here",
        ),
        ("llms.llama.weights", "nf4", r"llms\.llama\.weights is 'nf4' there"),
        ("encoder.window", 4096, r"encoder\.window is 4096 there, \d+ here"),
        ("ttt.layers", 24, r"ttt\.layers is 24 there, \d+ here"),
        ("dpo.max_length", 256, r"dpo\.max_length is 256 there, \d+ here"),
    ],
)
def test_run_of_other_steps_is_refused_with_both_values(tmp_path, path, value, told) -> None:
    other = write(tmp_path / "other", resolve(**{path: value}))
    with pytest.raises(UserError, match=told):
        past_runs.read(other, resolve(), PLAN)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"card": "a100_80"}, r"on 3 x a100_80 of 1 node.*--target h100x3 uses 3 x h100.*name --target a100_80x3"),
        ({"devices": 2}, r"on 2 x h100 .*uses 3 x h100.*name --target h100x2"),
        ({"hosts": 3}, r"on 3 x h100 of 3 node.*uses 3 x h100 of 1 node.*name --target 3xh100x1"),
        ({"card": "", "kind": "cpu", "devices": 1}, r"on 1 x cpu .*; measure there"),
    ],
)
def test_other_machine_than_the_target_is_refused_with_both_and_the_remedy(tmp_path, changes, told) -> None:
    other = write(tmp_path / "other", resolve(), hardware=HARDWARE | changes)
    with pytest.raises(UserError, match=told):
        past_runs.read(other, resolve(), PLAN)


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("metrics.jsonl", "", r"no seconds a step.*train\.log_every = 10"),
        ("metrics.jsonl", None, "no seconds a step"),
        (hardware_record.FILE, None, r"hardware\.json: missing"),
        (hardware_record.FILE, '{"kind": "x"}', r"hardware\.json: .*as training wrote it"),
        ("devices.jsonl", json.dumps(DEVICE | {"time": "x", "peak_bytes": 3}), r"devices\.jsonl: row 1.*time"),
        ("devices-1.jsonl", json.dumps(DEVICE | {"time": 7, "peak_bytes": None}), r"devices-1\.jsonl: row 1.*peak_b"),
        ("config.json", None, "no run was started there"),
    ],
)
def test_folder_that_measured_nothing_is_refused_with_the_file(folder, file, text, told) -> None:
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(UserError, match=told):
        past_runs.read(folder, resolve(), PLAN)


def test_what_else_differs_is_told(tmp_path) -> None:
    changed = resolve(**{"data.context_tokens": 97, "optim.learning_rate": 0.5, "data.cards": 7, "data.facts": 2})
    other = write(tmp_path / "other", changed, hardware=HARDWARE | {"strategy": "replicate"})
    (line,) = past_runs.read(other, resolve(), PLAN).describe_differences()
    assert "placement: replicate -> fsdp; data.context_tokens: 97 -> " in line
    axes = dataclasses.replace(PLAN, chosen=dataclasses.replace(PLAN.chosen, strategy="tensor", data=1, model=3))
    other = write(tmp_path / "axes", resolve(), hardware=HARDWARE | {"strategy": "tensor", "data": 3})
    (line,) = past_runs.read(other, resolve(), axes).describe_differences()
    assert "data axis: 3 -> 1" in line


@pytest.mark.parametrize(
    ("taken", "configured", "told"),
    [
        (1, 0, ["micro-batch: 1 -> 8"]),
        (2, 8, ["micro-batch: 2 -> 8"]),  # halved on the way: out of memory
        (8, 5, []),
    ],
)
def test_another_micro_batch_is_told(tmp_path, taken, configured, told) -> None:
    cfg = resolve(**{"train.micro_batch": configured, "train.global_batch": 32})
    other = write(tmp_path / "other", cfg, hardware=HARDWARE | {"micro_batch": taken})
    assert list(past_runs.read(other, resolve(**{"train.global_batch": 32}), PLAN).differences) == told


# --- the verb ---


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setattr(planner, "make", lambda *_, **__: PLAN)
    monkeypatch.setattr(size_comparison, "other_sizes", lambda *_: [PLAN])

    def write_job(folder: Path, workdir: Path, **flags: Any) -> str:
        tiny.call("slurm", resolve(), workdir, spec="configs/machines/h100x3.py", measured=str(folder), **flags)
        return (workdir / "job.sbatch").read_text()

    return write_job


def test_job_asks_for_the_measured_time_and_says_where_it_was_measured(call, folder, tmp_path, capsys) -> None:
    text = call(folder, tmp_path / "job")
    hours = 4.0 * STEPS / 3600  # 1.89 h; x 1.3 + 0.25 h = 2.7 h
    pace = f"measured in {folder} on 3 x {KIND}: 4 s/step"
    basis = f"{hours:.2f} h {pace}, {cluster_profile.ALL_HELD_OUT}, x 1.3 + 0.25 h to start"
    assert f"# {basis}.\n#SBATCH --time=0-02:45:00\n" in text
    assert "41.2 GB measured at most, 44.2 GB planned" in text and "predicted" not in text
    assert "#SBATCH --mem=33G" in text  # 20 GiB planned x 1.25 + 8
    out = capsys.readouterr().out
    assert f"time limit 0-02:45:00: {basis}" in out and "1.89" in out.splitlines()[-1]


def test_two_sources_of_time_are_refused(call, folder, tmp_path) -> None:
    with pytest.raises(UserError, match="--hours 5 and --measured"):
        call(folder, tmp_path / "job", hours=5.0)


def test_every_job_of_a_list_takes_its_own_record(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = dataclasses.replace(CHOSEN, devices_used=1)
    plan = dataclasses.replace(PLAN, target="a100_80x1", devices=1, per_host=1, chosen=chosen)
    monkeypatch.setattr(planner, "make", lambda *_, **__: plan)
    one = HARDWARE | {"card": "a100_80", "devices": 1}
    words = ["slurm", "--config", "configs/dpo/small.list", "--target", "a100_80x1", "--measured", "before"]
    tasks = loading.load(parser.parse(words), search=True)
    for number, task in enumerate(tasks):
        write(tmp_path / "before" / task.workdir.name, task.cfg, hardware=one, laps=(3.0 + number,))
    assert run.main(words) == 0
    text, out = (tmp_path / "runs/small/array.sbatch").read_text(), capsys.readouterr().out
    for number, name in enumerate(task.workdir.name for task in tasks):
        assert f"measured in {tmp_path}/before/{name} on 1 x {KIND}: {3 + number} s/step" in text
        assert f"{name}: " in out
    (tmp_path / "before" / name / hardware_record.FILE).unlink()
    assert run.main(words) == 2
    assert f"{name}/hardware.json: missing" in capsys.readouterr().err
