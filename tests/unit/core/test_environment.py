import os

import pytest

from lw_jax.core import environment
from lw_jax.core.errors import UserError


def test_programs_elsewhere_get_the_user_s_own_environment(monkeypatch):
    monkeypatch.setattr(environment, "_before", {})
    monkeypatch.setattr(environment, "_start_quietly", lambda: None)
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "TF_CPP_MIN_LOG_LEVEL", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {"XLA_CLIENT_MEM_FRACTION": "", "JAX_PLATFORMS": "cuda", "JAX_NUM_CPU_DEVICES": "3"}.items():
        monkeypatch.setenv(name, value)
    before = {name: value for name, value in os.environ.items() if not name.startswith(environment._LAUNCHERS)}
    for name in ("SLURM_MEM_PER_CPU", "SLURM_CPU_BIND_TYPE", "SBATCH_TIMELIMIT", "SRUN_DEBUG", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")  # of an allocation around the command
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    environment.reserve_memory()
    environment.prepare_compiler(everywhere=True)
    assert (os.environ["JAX_PLATFORMS"], os.environ["JAX_NUM_CPU_DEVICES"]) == ("cpu", "3")
    assert environment.of_job() == before | {"SLURM_CONF": "/etc/slurm.conf"}


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ({}, 0.92),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}, 0.6),
        # With both JAX's CUDA plugin refuses to start: the older name gives way.
        ({"XLA_CLIENT_MEM_FRACTION": "0.5", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}, 0.5),
    ],
)
def test_memory_is_reserved_unless_the_user_said_how_much(given, share, monkeypatch):
    monkeypatch.setattr(environment, "_before", {})
    for name in environment._FRACTIONS:
        monkeypatch.delenv(name, raising=False)
    assert environment.memory_fraction() == environment.JAX_FRACTION
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment.reserve_memory()
    assert environment.memory_fraction() == share
    assert sum(name in os.environ for name in environment._FRACTIONS) == 1
    assert given.items() <= environment.of_job().items()


@pytest.mark.parametrize("name", environment._FRACTIONS)
@pytest.mark.parametrize("value", ["abc", "0", "nan"])
def test_fraction_that_is_no_share_is_refused_by_name(name, value, tmp_path, monkeypatch):
    for other in environment._FRACTIONS:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    environment.reserve_memory()  # nobody reads it without a card
    monkeypatch.setattr(environment, "DRIVER_FILES", (str(tmp_path),))
    with pytest.raises(UserError, match=f"^{name}='{value}'"):
        environment.reserve_memory()
