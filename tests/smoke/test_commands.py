"""Commands as a user runs them: real processes, XLA's usual optimizations, readers made on the way."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lw_jax.core import runtime
from tests import tiny

PROJECT = Path(__file__).resolve().parent.parent.parent


def start(*argv: str, cwd: Path, **kwargs) -> subprocess.CompletedProcess[str]:
    """Runs run.py as a user would."""
    command = [sys.executable, str(PROJECT / "run.py"), *argv]
    environ = environment(1)
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environ, check=False, **kwargs)


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


def quick_environment(devices: int) -> dict[str, str]:
    """The settings of conftest.py, for tiny models whose compilation takes the time."""
    return os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(PROJECT)}


QUESTION = ["--question", "Where does Mara Ellis live?"]
TEXT = "Mara Ellis lives in Lisbon."


TINY = (
    "--config.llms.llama.source=selfmade:llama --config.llms.qwen.source=selfmade:qwen "
    "--config.llms.llama.weights=fp32 --config.llms.qwen.weights=fp32 "
    "--config.llms.llama.template=plain --config.llms.qwen.template=plain "
    "--config.encoder.kind=bytes --config.encoder.source= --config.encoder.width=32 --config.encoder.slots=8 "
    "--config.encoder.layers=1 --config.encoder.window=256 --config.adapter.hidden=64 --config.adapter.start=random "
    "--config.data.train=cards --config.data.validation=cards --config.data.cards=128 --config.data.facts=1 "
    "--config.selfmade.steps=2 --config.optim.warmup_steps=1 --config.train.steps=4 --config.train.global_batch=32 "
    "--config.train.micro_batch=8 --config.train.log_every=1 --config.compute.dtype=fp32 --config.eval.examples=16"
).split()


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_resumes(tmp_path: Path) -> None:
    argv = ["--config", str(PROJECT / "configs" / "smoke.py"), *TINY, "--config.train.steps=60", "--workdir"]
    command = [sys.executable, "-u", str(PROJECT / "run.py"), *argv, "w"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=quick_environment(1)
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 3/60"):
                process.send_signal(signal.SIGTERM)
        assert process.wait() == runtime.REQUEUE
    saved = max(int(path.name) for path in (tmp_path / "w" / "checkpoints").iterdir())
    both = {"resumed": [*argv, "w"], "unbroken": [*argv, "u"]}
    done = start_several(both, cwd=tmp_path, environ=quick_environment(1))
    assert [code for code, _, _ in done.values()] == [0, 0]
    assert f"from step {saved}" in done["resumed"][1] and "from step" not in done["unbroken"][1]
    np.testing.assert_allclose(tiny.logged_losses(tmp_path / "w"), tiny.logged_losses(tmp_path / "u"), rtol=1e-5)
