"""lw_jax/slurm/job_script.py: several configurations as one sbatch file, run with stand-ins for srun and scontrol."""

import dataclasses
import os
import shutil
import subprocess

import pytest

import run
from lw_jax.commands import loading, parser
from lw_jax.core import config_file
from lw_jax.core.errors import UserError
from lw_jax.core.runtime import REQUEUE
from lw_jax.planning import planner
from lw_jax.slurm import cluster_profile, job_script
from lw_jax.slurm.cluster_profile import Site
from tests.commands import PROJECT
from tests.unit.slurm.test_job import change, planned

SITE = Site(partition="gpu", modules=("cuda/12.4",), cpus_per_gpu=3)
NAMES = ("small one", "middle", "large")


def make_jobs(tmp_path, **changes):
    return [
        change(
            name=name,
            command=("train", name, "--config.x='quoted $HOME'"),
            folder=tmp_path,
            logs=tmp_path / "logs",
            host_memory_bytes=(8 + number) * 2**30,
            hours=0.5 * (number + 1),
            basis="predicted, validations included",
            **{"gpus": 1} | changes,
        )
        for number, name in enumerate(NAMES)
    ]


def write(tmp_path, kind, site=SITE, **changes):
    found = make_jobs(tmp_path, **changes)
    assert job_script.join(found, kind, name="my runs", logs=tmp_path).name == "my-runs", "a blank ends a directive"
    whole = job_script.join(found, kind, name="all", logs=tmp_path / "logs")
    assert whole.basis == "predicted"
    return job_script.list_script(found, whole, site, kind)


def play(tmp_path, text, codes, **environ):
    """Runs a script; training ends with the code of its name. Returns (code, lines started, requeued, output)."""
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    cases = "".join(f"'{name}') exit {code};;\n" for name, code in codes.items())
    stubs = {
        "srun": f'echo "$@" >> "{tmp_path}/started"\nfor word; do case "$word" in\n{cases}esac; done\nexit 0',
        "scontrol": f'echo "$@" >> "{tmp_path}/requeued"',
        "module": "exit 0",
    }
    for name, body in stubs.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    for name in ("started", "requeued"):
        (tmp_path / name).write_text("")
    path = f"{programs}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", text],
        env={"PATH": path, "HOME": str(tmp_path), "SLURM_JOB_ID": "7", **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    started, requeued = ((tmp_path / name).read_text().splitlines() for name in ("started", "requeued"))
    return done.returncode, started, requeued, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ("array", "sequence"))
def test_sbatch_is_asked_for_the_most_of_any_task(tmp_path, kind):
    text = write(tmp_path, kind)
    asked = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert ("#SBATCH --array=0-2" in asked) == (kind == "array")
    assert "#SBATCH --gpus-per-node=1" in asked and f"#SBATCH --mem={round(10 * 1.25 + 8 + 0.5)}G" in asked
    # 1.5 h x 1.3 + 0.25 = 2.2 h; of all three 3 h x 1.3 + three starts = 4.65 h
    assert f"#SBATCH --time=0-0{'2:15' if kind == 'array' else '4:45'}:00" in asked
    assert ("%x-%A_%a.log" in text) == (kind == "array")
    assert max(i for i, line in enumerate(text.splitlines()) if line.startswith("#SBATCH")) < text.splitlines().index(
        ""
    )


@pytest.mark.parametrize(("number", "code"), [(0, 0), (1, 3), (2, REQUEUE)])
def test_task_of_an_array_runs_its_own_words_and_passes_its_code_on(tmp_path, number, code):
    text, own = write(tmp_path, "array"), {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": str(number)}
    found = play(tmp_path, text, {NAMES[number]: code}, **own)
    assert found[0] == code
    (started,) = found[1]
    assert started == f"--cpus-per-task=3 train {NAMES[number]} --config.x='quoted $HOME'"
    assert found[2] == ([f"requeue 9_{number}"] if code == REQUEUE else [])


def test_sequence_goes_on_after_a_failure_and_tells_it_at_the_end(tmp_path):
    code, started, requeued, told = play(tmp_path, write(tmp_path, "sequence"), {"middle": 3})
    assert code == 3 and len(started) == 3 and not requeued
    assert "failed: middle(3)" in told


def test_sequence_that_is_stopped_goes_back_into_the_queue_without_starting_the_next(tmp_path):
    code, started, requeued, _ = play(tmp_path, write(tmp_path, "sequence"), {"middle": REQUEUE})
    assert code == REQUEUE and len(started) == 2 and requeued == ["requeue 7"]


@pytest.mark.parametrize("kind", ("array", "sequence"))
@pytest.mark.parametrize(
    ("nodes", "restarts", "requeued"), [(2, 0, True), (2, job_script.RESTARTS, False), (1, 0, False)]
)
def test_task_that_was_killed_on_one_of_several_nodes_goes_back_into_the_queue(
    tmp_path, kind, nodes, restarts, requeued
):
    own = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "1", "SLURM_RESTART_COUNT": str(restarts)}
    code, started, again, told = play(tmp_path, write(tmp_path, kind, nodes=nodes), {"middle": 137}, **own)
    assert code == (REQUEUE if requeued else 137)
    job = "9_1" if kind == "array" else "7"
    assert again == ([f"requeue {job}"] if requeued else [])
    back = f"job {job} goes back into the queue: it resumes from its last checkpoint, without one it begins anew\n"
    assert (back in told) == requeued and "saved" not in told, "a killed task saves nothing"
    if kind == "sequence":
        assert len(started) == (2 if requeued else 3)
        assert ("failed: middle(137)" in told) == (not requeued)


def test_tasks_on_different_machines_are_no_one_job(tmp_path):
    found = make_jobs(tmp_path)
    found[1] = dataclasses.replace(found[1], gpus=4)
    with pytest.raises(UserError, match="different machines"):
        job_script.join(found, "array", name="all", logs=tmp_path)


@pytest.mark.parametrize("kind", ("array", "sequence"))
def test_runs_with_and_without_steps_are_no_one_job(tmp_path, kind):
    """The signal of the ones would end the others, of which nothing is saved, at each requeue."""
    found = make_jobs(tmp_path)
    starts = [dataclasses.replace(job, step_seconds=0.0, checkpoint_seconds=0.0) for job in found]
    with pytest.raises(UserError, match=r"all\.list: train\.steps is 0 in middle: .*: write two lists"):
        job_script.join([found[0], starts[1], found[2]], kind, name="all", logs=tmp_path)
    assert job_script.join(starts, kind, name="all", logs=tmp_path).step_seconds == 0


@pytest.mark.parametrize(("name", "count"), [("all", 6), ("small", 2), ("medium", 3)])
def test_lists_of_the_project_name_configurations_that_exist(name, count):
    found = config_file.read_list(f"configs/dpo/{name}.list", root=PROJECT)
    assert len(found) == count and all((PROJECT / file).is_file() for file in found)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("# nothing\n", "one configuration a line"),
        ("a.py\na.py\n", "each once"),
        ("# \xe9", "UTF-8"),
        (None, "no such file"),
    ],
)
def test_unusable_lists_are_refused(tmp_path, text, told):
    if text is not None:
        (tmp_path / "x.list").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=told):
        config_file.read_list(str(tmp_path / "x.list"), root=PROJECT)


def test_configurations_that_would_share_a_folder_are_refused(tmp_path):
    for folder in ("a", "b"):
        shutil.copytree(PROJECT / "configs", tmp_path / folder / "configs", ignore=shutil.ignore_patterns("dpo", "ttt"))
    names = [str(tmp_path / folder / "configs" / "smoke.py") for folder in ("a", "b")]
    (tmp_path / "x.list").write_text("\n".join(names))
    args = parser.parse(["slurm", "--config", str(tmp_path / "x.list")])
    with pytest.raises(UserError, match=rf"{names[0]}, {names[1]} would share the folder smoke-latentwire"):
        loading.load(args)


@pytest.mark.parametrize("kind", ("array", "sequence"))
def test_limit_of_a_list_says_which_tasks_are_without_validations(tmp_path, kind):
    found = make_jobs(tmp_path)
    found[1:] = [dataclasses.replace(job, basis=f"predicted, {cluster_profile.ALL_HELD_OUT}") for job in found[1:]]
    whole = job_script.join(found, kind, name="all", logs=tmp_path)
    text = job_script.list_script(found, whole, SITE, kind)
    assert " h predicted, without validations (middle, large), x 1.3 " in text
    assert text.count(" h predicted, without validations: data.validation_limit and eval.examples are 0\n") == 2


@pytest.mark.parametrize("kind", ("array", "sequence"))
def test_one_command_writes_the_job_of_all_models(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planner, "make", lambda _, target, **__: planned(target=target, hours=0.3))
    words = ["slurm", "--config", "configs/dpo/all.list", "--target", "a100_80x1", "--jobs", kind]
    assert run.main([*words, "--config.data.train=mine.jsonl"]) == 0
    text = (tmp_path / "runs/all" / f"{kind}.sbatch").read_text()
    assert text.count("srun --") == 6 == text.count("--config.data.train=mine.jsonl")
    assert str(tmp_path / "runs/all/vicuna-dpo") in text and (tmp_path / "runs/all/logs").is_dir()
    told = capsys.readouterr().out
    assert "vicuna-dpo: 0.30 h predicted" in told
    assert "vicuna-dpo: data.train='mine.jsonl': no such file" in told


def test_what_a_plan_refuses_gets_no_job_alone_or_in_a_list(tmp_path, monkeypatch, capsys):
    """Of the issue: `llama3.py:seed` warms up for 100 of 60 steps, which `plan` refuses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planner, "make", lambda *_, **__: pytest.fail("it was planned"))
    (tmp_path / "two.list").write_text("configs/dpo/tinyllama.py\nconfigs/dpo/llama3.py:seed\n")
    for config in ("configs/dpo/llama3.py:seed", "two.list"):
        assert run.main(["slurm", "--config", config, "--target", "a100_80x1"]) == 2
        done = capsys.readouterr()
        assert done.out == ""
        assert "optim.warmup_steps=100 is longer than the run's 60 steps" in done.err
        assert ("llama3-dpo: optim" in done.err) == (config == "two.list")
    assert [path.name for path in tmp_path.iterdir()] == ["two.list"]
