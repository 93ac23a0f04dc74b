"""lw_jax/core/launcher.py: the step goes before the job; what is missing or malformed is one line."""

import os

import pytest

from lw_jax.core import launcher
from lw_jax.core.errors import UserError

SALLOC = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4"}
BATCH = SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = BATCH | {"SLURM_STEP_NODELIST": "n[03-04],m1"}


@pytest.fixture
def read(monkeypatch):
    """Reads an environment without what this machine's launcher says."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "JAX_COORDINATOR", "JAX_LOCAL_DEVICE")):
            monkeypatch.delenv(name)

    def call(environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return launcher.read()

    return call


@pytest.mark.parametrize(
    "environment",
    [
        {},
        SALLOC,
        BATCH,
        BATCH | {"SLURM_NTASKS": "abc"},
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"},  # salloc's interactive step
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "abc", "SLURM_PROCID": "x"},
        {"SLURM_STEP_NODELIST": "n1", "SLURM_JOB_ID": "4711"},
        STEP | {"SLURM_NTASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    ],
)
def test_what_is_no_step_of_several_tasks_runs_alone(environment, read):
    assert read(environment) is None


def test_tasks_of_a_step_go_before_those_of_the_job(read):
    found = read(STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "3"})
    assert found == launcher.Step(0, 2, "n03", 61440 + (4711 + 3) % 4096, (0,), "4711.3")


def test_steps_of_one_job_meet_at_different_places(read):
    ports = {read(STEP | {"SLURM_STEP_ID": str(number)}).port for number in range(3)}
    assert len(ports) == 3


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("n1,m[2-3]", "n1"), ("n[5]", "n5"), ("r[1-2]n[03,7]-ib", "r1n03-ib"), ("127.0.0.1", "127.0.0.1")],
)
def test_first_node_of_a_list_is_where_the_processes_meet(nodes, host, read):
    assert read(STEP | {"SLURM_STEP_NODELIST": nodes}).host == host


def test_address_and_devices_of_jax_take_precedence(read):
    own = {"JAX_COORDINATOR_ADDRESS": "[fe80::1]:1234", "JAX_LOCAL_DEVICE_IDS": "0,1", "SLURM_LOCALID": ""}
    found = read(STEP | own)
    assert (found.host, found.port, found.devices) == ("fe80::1", 1234, (0, 1))
    assert read({"JAX_COORDINATOR_ADDRESS": "", "JAX_COORDINATOR_PORT": "77"}).port == 77


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_NTASKS", "abc"),
        ("SLURM_STEP_NUM_TASKS", "-2"),
        ("SLURM_STEP_NUM_TASKS", "٣"),
        *(("SLURM_PROCID", value) for value in ("", "one", "4")),
        ("SLURM_JOB_ID", ""),
        ("SLURM_LOCALID", ""),
        ("SLURM_LOCALID", "a"),
        ("SLURM_STEP_ID", "x"),
        ("SLURM_STEP_NODELIST", "["),
        ("JAX_COORDINATOR_ADDRESS", "host"),
        ("JAX_COORDINATOR_ADDRESS", "host:0"),
        ("JAX_COORDINATOR_PORT", "70000"),
        ("JAX_LOCAL_DEVICE_IDS", "0,,1"),
    ],
)
def test_variable_that_is_missing_or_malformed_is_refused_by_name(name, value, read):
    with pytest.raises(UserError, match=rf"^{name}.*{launcher.ALONE}"):
        read(STEP | {name: value})


def test_step_without_its_nodes_is_refused(read):
    with pytest.raises(UserError, match=r"^SLURM_STEP_NODELIST is missing"):
        read(BATCH | {"SLURM_STEP_NUM_TASKS": "4"})


def test_task_that_is_not_the_first_is_not_taken_for_a_batch_script(read):
    with pytest.raises(UserError, match=r"^SLURM_STEP_NODELIST is missing"):
        read(BATCH | {"SLURM_PROCID": "3"})


def test_processes_of_mpirun_are_refused(read):
    with pytest.raises(UserError, match=r"^OMPI_COMM_WORLD_SIZE='4'"):
        read(STEP | {"OMPI_COMM_WORLD_SIZE": "4"})
