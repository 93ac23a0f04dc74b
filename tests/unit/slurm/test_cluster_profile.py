"""lw_jax/slurm/cluster_profile.py: the site profile, and what its longest job means for a run."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from configs import base
from lw_jax.core import config, schema
from lw_jax.core.errors import UserError
from lw_jax.planning.plans import StepPlan
from lw_jax.slurm import cluster_profile

SITE = cluster_profile.Site(
    partition="gpu,long",
    account="proj-7",
    qos="high",
    constraint="nvlink&[rack1|rack2]",
    gpus="--gres=gpu:h100:{count}",
    modules=("cuda/12.4", "gcc/13.2.0+lto"),
    setup=("source ~/venvs/lw/bin/activate", "export NOTE='two words'"),
    max_hours=24.0,
    cpus_per_gpu=5,
    scratch="/scratch/me",
)


# Words that could leave their directive.
WORDS = ["gpu\n#SBATCH --account=other", "gpu\n", "a b", 'g"pu', "g'pu", "g#pu", "g\\pu", "$(id)"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, word) for key in ("partition", "account", "qos", "constraint") for word in WORDS),
        ("gpus", "--gpus-per-node=4"),
        ("gpus", "--gpus-per-node={count} --exclusive"),
        ("gpus", "--gres=gpu:h100:{count}\n"),
        ("gpus", "--gpus-per-task={count}"),
        ("modules", ("cuda; id",)),
        ("modules", ("--purge",)),
        ("setup", ("echo 'open",)),
        ("setup", ("echo a\necho b",)),
        ("setup", ("echo a \\",)),
        ("setup", ("",)),
        ("max_hours", 0.25),
        ("max_hours", math.nan),
        ("cpus_per_gpu", 0),
        ("scratch", "relative/folder"),
        ("scratch", "/scratch/$NO_SUCH_VARIABLE"),
        ("scratch", "/scratch\nrm -rf /"),
    ],
)
def test_wrong_value_is_refused_with_its_key(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=key):
        schema.convert({key: value}, cluster_profile.Site, where="site.toml", remedy="")


def test_file_gives_the_profile(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LW_TEST_USER", "me")
    file = tmp_path / "site.toml"
    file.write_text(
        """partition = "gpu,long"
account = "proj-7"
qos = "high"
constraint = "nvlink&[rack1|rack2]"
gpus = "--gres=gpu:h100:{count}"
modules = ["cuda/12.4", "gcc/13.2.0+lto"]
setup = ["source ~/venvs/lw/bin/activate", "export NOTE='two words'"]
max_hours = 24
cpus_per_gpu = 5
scratch = "/scratch/$LW_TEST_USER"
""",
        encoding="utf-8",
    )
    assert cluster_profile.read_site(file) == SITE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('partion = "gpu"', "unknown field partion (did you mean partition?)"),
        ("partition = 7", "partition=7: "),
        ("setup = [1]", "setup[0]=1: "),
        ("scratch = 1", "scratch=1: "),
        ("partition = ", "TOML"),
    ],
)
def test_wrong_file_is_refused_with_its_path_and_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "site.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        cluster_profile.read_site(file)
    assert str(file) in str(caught.value) and message in str(caught.value)


def test_profile_is_looked_for_in_order(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert cluster_profile.find_site("") == (cluster_profile.Site(), "")
    files = {name: tmp_path / name for name in ("lw_jax/site.toml", "environment.toml", "named.toml")}
    (tmp_path / "lw_jax").mkdir()
    for name, file in files.items():
        file.write_text(f'partition = "{Path(name).stem}"', encoding="utf-8")
    assert cluster_profile.find_site("")[0].partition == "site"
    monkeypatch.setenv("LW_JAX_SITE", str(files["environment.toml"]))
    assert cluster_profile.find_site("")[0].partition == "environment"
    assert cluster_profile.find_site(str(files["named.toml"]))[0].partition == "named"
    with pytest.raises(UserError, match=r"absent\.toml"):
        cluster_profile.find_site(str(tmp_path / "absent.toml"))


# --- the longest job ---


PLAN = StepPlan(target="h100x4", devices=4, per_host=4, compiled=True, hours=1600 * 7 / 3600, chosen=None)


@pytest.mark.parametrize(
    ("max_hours", "train", "plan", "severity", "told"),
    [
        ("inf", {}, {}, "", ""),
        ("5", {}, {}, "", ""),
        ("2", {}, {"hours": None}, "", ""),
        ("2", {}, {}, "warning", "max_hours 2: it requeues itself 2 times or so, with a checkpoint every 35.0 min"),
        ("2", {"checkpoint_every": 1000}, {}, "error", "checkpoint_every to 874 at most"),
        ("2", {"checkpoint_every": 1000, "eval_every": 20}, {}, "warning", "with a checkpoint every 2.3 min"),
        ("5", {}, {"validation_hours": 0.8}, "warning", "predicted, validations included, x 1.3"),
        ("5", {}, {"start_hours": 0.8}, "warning", "3.91 h predicted"),
        ("2", {}, {"start_hours": 1.5}, "error", "start-up (2.20 h)"),
        ("2", {}, {}, "warning", "predicted, without validations: data.validation_limit and eval.examples are 0, x"),
        ("2", {"steps": 0}, {}, "error", "h predicted, x 1.3"),
    ],
)
def test_plan_tells_what_the_longest_job_means_for_the_run(
    tmp_path, monkeypatch, max_hours, train, plan, severity, told
) -> None:
    (tmp_path / "site.toml").write_text(f"max_hours = {max_hours}", encoding="utf-8")
    monkeypatch.setenv("LW_JAX_SITE", str(tmp_path / "site.toml"))
    values = base.get_config()
    values.train.update(**{"steps": 1600, "checkpoint_every": 300} | train)
    found = cluster_profile.inspect(dataclasses.replace(PLAN, **plan), config.build(values).train)
    assert [finding.severity for finding in found] == ([severity] if severity else [])
    assert not found or (told in found[0].text and str(tmp_path / "site.toml") in found[0].text)
