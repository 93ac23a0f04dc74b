"""Commands as a user runs them: real processes, XLA's usual optimizations, readers made on the way."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[1]


def run_code(code: str, *argv: str, cwd: Path = PROJECT, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a process of its own, which finds the project."""
    env = os.environ | {"PYTHONPATH": str(PROJECT)} | environ
    command = [sys.executable, "-c", code, *argv]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=300, check=False)
    print(done.stderr)  # shown when a test fails
    return done


def start(*argv: str, cwd: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs run.py as a user would."""
    command = [sys.executable, str(PROJECT / "run.py"), *argv]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environ, check=False)


# Runs each of several command lines in turn and prints, as JSON, [exit code, standard output, standard error] of each.
SEVERAL = """
import contextlib, io, json, os, sys
import run
from lw_jax.core import environment
environment.leave_out_torch()
wanted = json.loads(sys.argv.pop())
sys.argv[0] = "run.py"
found = []
for argv in wanted:
    sys.argv[1:] = argv
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run.main(argv)
        except SystemExit as end:  # argparse
            code = end.code
    found.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""
Done = tuple[int, str, str]


def start_several(commands: dict[str, list[str]], *, cwd: Path, environ: dict[str, str]) -> dict[str, Done]:
    """Runs command lines one after the other in one process, which imports JAX once; {name: (code, stdout, stderr)}.

    What C++ libraries write comes around Python's stderr and must be nothing.
    """
    command = [sys.executable, "-c", SEVERAL, json.dumps(list(commands.values()))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environ, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return dict(zip(commands, map(tuple, json.loads(done.stdout.splitlines()[-1])), strict=True))


def environment(devices: int) -> dict[str, str]:
    """XLA's usual optimizations, which the settings of conftest.py leave out."""
    quiet = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_NUM_CPU_DEVICES")
    kept = {key: value for key, value in os.environ.items() if key not in quiet}
    return kept | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}


def need_compiler() -> None:
    """Skips a test that compiles for GPUs where nothing can."""
    if not any(importlib.metadata.distributions(name="jax-cuda12-plugin")):
        pytest.skip("needs jax-cuda12-plugin and nvidia-cuda-nvcc-cu12 as a compiler")


def compile_for_absent_gpus(code: str, **environ: str) -> list[Any]:
    """Runs Python code in a process of its own; returns its lines of JSON."""
    need_compiler()
    done = run_code(code, **{"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"} | environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", "{"))]


QUESTION = ["--question", "Where does Mara Ellis live?"]
TEXT = "Mara Ellis lives in Lisbon."
