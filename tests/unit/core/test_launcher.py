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
        if name.startswith(("SLURM_", "OMPI_", "JAX_COORDINATOR", "JAX_LOCAL_DEVICE", "CUDA_")):
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
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"},  # salloc's interactive step
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "abc", "SLURM_PROCID": "x"},
        STEP | {"SLURM_NTASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"},
    ],
)
def test_what_is_no_step_of_several_tasks_runs_alone(environment, read):
    assert read(environment) is None


@pytest.mark.parametrize("number", [3, 4])
def test_tasks_of_a_step_go_before_those_of_the_job_and_each_step_has_a_port(number, read):
    found = read(STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": str(number)})
    assert found == launcher.Step(0, 2, "n03", 61440 + (4711 * 61 + number) % 4096, (0,), f"4711.{number}")


def test_two_jobs_on_a_node_have_ports_of_their_own(read):
    jobs = [{"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "4712", "SLURM_STEP_ID": "0"}]
    assert len({read(STEP | job).port for job in jobs}) == 2


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
    ("environment", "devices"),
    [
        ({}, (3,)),
        ({"SLURM_STEP_NUM_NODES": "2"}, (3,)),
        ({"SLURM_STEP_NUM_NODES": "4"}, ()),  # one task a node
        ({"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}, ()),  # which sees its own as number 0
        ({"SLURM_GPUS_PER_TASK": "h100:2", "CUDA_VISIBLE_DEVICES": "2,3"}, ()),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu:1", "CUDA_VISIBLE_DEVICES": "0"}, ()),  # --tres-per-task alone
        ({"SLURM_TRES_PER_TASK": "gres/gpu:h100=2,cpu=9", "CUDA_VISIBLE_DEVICES": "2,3"}, ()),
        ({"SLURM_TRES_PER_TASK": "cpu=4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (3,)),
        ({"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (3,)),  # with --gpu-bind=none
        ({"CUDA_VISIBLE_DEVICES": "0"}, ()),  # of --gpu-bind=single:1: each sees its own as number 0
        ({"CUDA_VISIBLE_DEVICES": "3"}, ()),  # of a wrapper
        ({"CUDA_VISIBLE_DEVICES": ""}, (3,)),
        ({"SLURM_STEP_NUM_NODES": "4", "JAX_LOCAL_DEVICE_IDS": "1"}, (1,)),
    ],
)
def test_task_takes_all_devices_that_are_its_alone_and_else_the_one_of_its_number(environment, devices, read):
    assert read(STEP | {"SLURM_LOCALID": "3"} | environment).devices == devices


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        (STEP | {"SLURM_NTASKS": "abc"}, "SLURM_NTASKS"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "\u0663"}, "SLURM_STEP_NUM_TASKS"),
        *((STEP | {"SLURM_PROCID": value}, "SLURM_PROCID") for value in ("", "one", "4")),
        (STEP | {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID"),
        (STEP | {"SLURM_LOCALID": "a"}, "SLURM_LOCALID"),
        (STEP | {"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID"),
        (STEP | {"SLURM_STEP_NODELIST": "["}, "SLURM_STEP_NODELIST"),
        (BATCH | {"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NODELIST"),
        (BATCH | {"SLURM_PROCID": "3"}, "SLURM_STEP_NODELIST"),  # not the first: no batch script
        (STEP | {"JAX_COORDINATOR_ADDRESS": "host:0"}, "JAX_COORDINATOR_ADDRESS"),
        (STEP | {"JAX_COORDINATOR_PORT": "70000"}, "JAX_COORDINATOR_PORT"),
        (STEP | {"JAX_LOCAL_DEVICE_IDS": "0,,1"}, "JAX_LOCAL_DEVICE_IDS"),
        (STEP | {"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_variable_that_is_missing_or_malformed_is_refused_by_name(environment, name, read):
    with pytest.raises(UserError, match=f"^{name}"):
        read(environment)
