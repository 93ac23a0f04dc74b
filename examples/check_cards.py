"""What a user with several cards runs first: devices, an all-reduce, every placement's curve, a kill and a resume.

    make check-cards                                     # on the cards of this machine, minutes
    python examples/check_cards.py --virtual 4           # the same on 4 virtual CPU devices: a rehearsal

Every run is `python run.py` on tiny readers in a process of its own, ten steps of the smoke configuration in fp32.
Placements that do not go with that many cards are left out. Ends with code 1 where a curve leaves that of one card by
more than 1e-4 of its value, or where a run that was stopped and started again ends elsewhere. Prints a table to send
back with a report: github issues take it as it is.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples import elastic_demo
from examples.elastic_demo import Placed
from lw_jax.core.command_line import take_assignments
from lw_jax.core.errors import UserError, leave
from lw_jax.core.process_start import REQUEUE
from lw_jax.training import run_folder

TOLERANCE = 1e-4  # relative, fp32 sums of cards in another order, after some steps of Adam
STEPS_STOPPED = 300  # of the run that is stopped: a card takes ten before a signal arrives
MEGABYTES = 256  # of an all-reduce's array on each card
PATIENCE = 600  # seconds of a run

# In a process of its own: a process that has started its devices keeps their memory.
ALL_REDUCE = """
import json, sys, time, jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from lw_jax.core import runtime
runtime.start_devices()
count, size = jax.device_count(), int(sys.argv[1]) * 2**18
mesh = Mesh(jax.devices(), ("data",))
rows = jax.device_put(jnp.ones((count, size)), NamedSharding(mesh, P("data")))
total = jax.jit(lambda x: x.sum(axis=0), out_shardings=NamedSharding(mesh, P()))
assert float(jax.block_until_ready(total(rows))[0]) == count
times = []
for _ in range(5):
    begun = time.perf_counter()
    jax.block_until_ready(total(rows))
    times.append(time.perf_counter() - begun)
seconds = sorted(times)[2]
moved = 2 * (count - 1) / count * 4 * size
print(json.dumps({"line": runtime.device_line(), "devices": count, "gb_per_second": moved / seconds / 1e9}))
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--virtual", type=int, default=0, help="CPU devices in the place of cards")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of every run (default: 10)")
    assignments, words = take_assignments(argv)
    args = parser.parse_args(words)
    begun, environ = time.monotonic(), environment(args.virtual)
    found = measure_all_reduce(environ)
    rows = [("devices", found["line"].removeprefix("device: "), "")]
    if found["devices"] > 1:
        rows.append(("all-reduce", f"{MEGABYTES} MB a card", f"{found['gb_per_second']:.1f} GB/s"))
    overrides = {"compute.dtype": "fp32"} | assignments
    with tempfile.TemporaryDirectory() as folder:
        worst, curves = 0.0, {}
        possible = placements(found["devices"])
        for name, placed in possible.items():
            where, curves[name] = elastic_demo.train(placed, Path(folder) / name, args.steps, overrides, environ)
            apart = elastic_demo.largest_difference({key: curves[key] for key in ("single", name)})
            worst = max(worst, apart)
            rows.append((name, where, f"last loss {curves[name][-1]:.6f}, {apart:.1e} from single"))
        name, placed = list(possible.items())[-1]
        apart = stop_and_resume(placed, Path(folder), overrides, environ)
        worst = max(worst, apart)
        rows.append(("kill, resume", f"{name}, {STEPS_STOPPED} steps", f"{apart:.1e} from a whole run"))
    rows.append(("seconds", f"Python {platform.python_version()}", f"{time.monotonic() - begun:.0f}"))
    print("\n".join(f"| {' | '.join(row)} |" for row in [("what", "where", "found"), ("---",) * 3, *rows]))
    print("all alike" if worst <= TOLERANCE else f"NOT ALIKE: {worst:.1e}, at most {TOLERANCE:.0e} is rounding")
    return int(worst > TOLERANCE)


def environment(virtual: int) -> dict[str, str]:
    """Returns the environment of the runs; on cards products are whole fp32 ones and sums have one order."""
    if virtual:
        return elastic_demo.cpu_environment(virtual)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
    return {**os.environ, "JAX_DEFAULT_MATMUL_PRECISION": "highest", "XLA_FLAGS": flags}


def placements(devices: int) -> dict[str, Placed]:
    """Returns what so many devices allow, one device first; every run sees all of them."""
    half, found = devices // 2, {"single": Placed(1, "single")}
    if devices > 1:
        found["replicate"] = Placed(devices, "replicate")
        even = 1 << devices.bit_length() - 1  # divides the readers' widths
        found["fsdp"] = Placed(even, "fsdp", data=even)
        found["split"] = Placed(2 * half, "split", data=half)
        if devices % 2 == 0:
            found["tensor"] = Placed(devices, "tensor", model=2)
    if devices > 2:
        found["hybrid3"] = Placed(3, "hybrid3")
    if devices > 1 and devices % 4 == 0:
        found["hybrid4"] = Placed(devices, "hybrid4")
    return found


def measure_all_reduce(environ: Mapping[str, str]) -> dict:
    command = [sys.executable, "-c", ALL_REDUCE, str(MEGABYTES)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environ, cwd=elastic_demo.ROOT, check=False, timeout=PATIENCE
    )
    if done.returncode:
        raise UserError(f"the all-reduce ended with code {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def stop_and_resume(placed: Placed, folder: Path, overrides: Mapping[str, object], environ: Mapping[str, str]) -> float:
    """Returns how far a run that is stopped by SIGTERM, as a queue does, and started again goes from a whole one.

    Raises:
        UserError: it did not end with the code that asks for a requeue.
    """
    workdir, settings = folder / "stopped", (STEPS_STOPPED, overrides, environ)
    whole = elastic_demo.train(placed, folder / "whole", *settings)[1]
    with (folder / "stopped.log").open("w+") as log:
        words = elastic_demo.command(placed, workdir, STEPS_STOPPED, overrides)
        process = subprocess.Popen(words, env=environ, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for_step(workdir, process)
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=PATIENCE)
        finally:
            process.kill()
        if code != REQUEUE:
            log.seek(0)
            raise UserError(f"{placed.strategy}: stopped, it ended with code {code}: {log.read()[-2000:]}")
    resumed = elastic_demo.train(placed, workdir, *settings)[1]
    return elastic_demo.largest_difference({"whole": whole, "resumed": resumed})


def wait_for_step(workdir: Path, process: subprocess.Popen) -> None:
    """Returns when the run has logged a step, or has ended."""
    log, deadline = workdir / "metrics.jsonl", time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        if log.exists() and run_folder.read_metrics(log):
            return
        time.sleep(0.02)


if __name__ == "__main__":
    leave(main)
