"""What SLURM says of this process: its number, how many there are, and where the first one is found. Light at import.

JAX's own detection is not asked: it takes the job's number of tasks for the step's, and asks other launchers first.
"""

import dataclasses
import os
import re

from lw_jax.core.errors import UserError

ALONE = "SLURM_STEP_NUM_TASKS=1"  # what lets a process run alone, whatever else is set
_PORTS = 4096  # the last ones, of which the numbers of job and step pick one
STRIDE = 61  # ports between two jobs that follow each other, as they may share a node: for the steps of the first


@dataclasses.dataclass(frozen=True)
class Step:
    """One process of a SLURM step of several."""

    rank: int
    count: int
    host: str  # of the first process
    port: int
    devices: tuple[int, ...]  # of those that this process sees; none: it takes all
    name: str  # the same in all processes of the step, and in no other step

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def read() -> Step | None:
    """Returns this process's place in its step; None where it is alone: no step, or a step of one task.

    The step's own number of tasks goes before SLURM_NTASKS, which in salloc's interactive step is the job's. A batch
    script and salloc's shell are no step: one process drives all devices of its node.

    Raises:
      UserError: there are several processes, and a variable that tells them apart is missing or malformed.
    """
    if (size := os.environ.get("OMPI_COMM_WORLD_SIZE", "")) not in ("", "1"):
        rule = "processes that mpirun starts do not find each other; start them with srun, or one alone"
        raise UserError(f"OMPI_COMM_WORLD_SIZE={size!r}: {rule}")
    tasks, nodes = os.environ.get("SLURM_STEP_NUM_TASKS"), os.environ.get("SLURM_STEP_NODELIST")
    first = os.environ.get("SLURM_PROCID") in (None, "", "0")  # as a batch script is
    if first and not tasks and not nodes:
        return None
    count = _number("SLURM_STEP_NUM_TASKS" if tasks else "SLURM_NTASKS", "1" if first else "")
    if count < 2:
        return None
    rank, job = _number("SLURM_PROCID"), _number("SLURM_JOB_ID")
    if rank >= count:
        raise _refusal("SLURM_PROCID", f"a number below {count}, the tasks of the step, is needed")
    number = _number("SLURM_STEP_ID", "0")
    host, port = _address(job * STRIDE + number)
    return Step(rank, count, host, port, _devices(count), f"{job}.{number}")


def _address(number: int) -> tuple[str, int]:
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address:
        match = re.fullmatch(r"\[?([\w.:-]+?)\]?:(\d+)", address, re.ASCII)
        if match is None:
            raise _refusal("JAX_COORDINATOR_ADDRESS", "HOST:PORT is needed")
        return match[1], _port("JAX_COORDINATOR_ADDRESS", match[2])
    # "n[01-03,7],m2" and "r[1-2]n[3-4]": each bracket's first number.
    first = re.match(r"(?:[^,[]|\[[^]]*\])*", os.environ.get("SLURM_STEP_NODELIST", ""))
    host = re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0] if first else "")
    if not re.fullmatch(r"[\w.:-]+", host, re.ASCII):
        raise _refusal("SLURM_STEP_NODELIST", "a list of nodes is needed, as n1 or n[01-04]")
    port = os.environ.get("JAX_COORDINATOR_PORT") or str(65535 - _PORTS + 1 + number % _PORTS)
    return host, _port("JAX_COORDINATOR_PORT", port)


def _port(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**16):
        raise _refusal(name, "a port is needed, 1 to 65535")
    return int(text)


def _devices(count: int) -> tuple[int, ...]:
    """A task alone on its node takes all, one with GPUs of its own (--gpus-per-task) these, another one GPU.

    The only GPU that a task sees is its own (--gpu-bind=single:1, closest).
    """
    ids = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    if not ids:
        alone = os.environ.get("SLURM_STEP_NUM_NODES") == str(count)
        asked, seen = os.environ.get("SLURM_GPUS_PER_TASK", ""), os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if not asked:  # srun --tres-per-task: "cpu=4,gres/gpu:h100:2"
            entries = os.environ.get("SLURM_TRES_PER_TASK", "").split(",")
            asked = next((entry for entry in entries if entry.startswith("gres/gpu")), "")
        # "2", "h100:2"; --gpu-bind=none shows all
        own = (seen and "," not in seen) or re.split("[:=]", asked)[-1] == str(len(seen.split(",")))
        return () if alone or own else (_number("SLURM_LOCALID"),)
    if not re.fullmatch(r"\d+(,\d+)*", ids, re.ASCII):
        raise _refusal("JAX_LOCAL_DEVICE_IDS", "numbers of this node's devices are needed, as 0,1,2,3")
    return tuple(map(int, ids.split(",")))


def _number(name: str, default: str = "") -> int:
    text = os.environ.get(name) or default
    if not re.fullmatch(r"\d{1,10}", text, re.ASCII):
        raise _refusal(name, "a whole number is needed")
    return int(text)


def _refusal(name: str, rule: str) -> UserError:
    entry = f"{name}={os.environ[name]!r}" if os.environ.get(name) else f"{name} is missing"
    return UserError(
        f"{entry}: {rule}; this process is one of several of a SLURM step. Pass on all of srun's variables, or run it "
        f"alone with {ALONE}"
    )
