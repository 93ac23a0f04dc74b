"""The campaign: `make chaos MINUTES=10 SEED=0`, or a part of it by hand.

python -m tests.chaos --minutes 10 --seed 0
python -m tests.chaos --parts inputs --seed 2
"""

import argparse
import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PARTS = ("inputs", "disk", "kills")  # kills take the time that is left
KILLS, INPUTS = 100, 15  # inputs of each kind a minute: they take half of the time
RESERVE = 30.0  # seconds left for what was begun to end


def prepare(scratch: Path) -> None:
    """Sets what every process inherits: no device, no network, caches of its own."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": os.getcwd()}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "TF_CPP_MIN_LOG_LEVEL": "3"}
    os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(scratch / "jax"), "LW_JAX_CACHE": str(scratch / "lw_jax")}
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)  # what a killed process leaves goes with it
    os.environ |= {"HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis")}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", default=",".join(PARTS), help="of %(default)s")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--failures", type=Path, default=Path("chaos-failures"), help="folder of what failed")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="lw_jax-chaos-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)  # after multiprocessing has removed its own in it
    prepare(scratch)
    return _campaign(args)


def _campaign(args: argparse.Namespace) -> int:
    until = time.monotonic() + 60 * args.minutes - RESERVE
    parts, failed = args.parts.split(","), 0
    if "inputs" in parts:
        failed += _inputs(args.seed, int(INPUTS * args.minutes))
    for part in ("disk", "kills"):
        if part in parts:
            folder = (args.failures / part).absolute()
            shutil.rmtree(folder, ignore_errors=True)
            found = _part(part, args, folder, seconds=until - time.monotonic())
            failed += found
            if not found:
                shutil.rmtree(folder, ignore_errors=True)
    return int(failed > 0)


def _inputs(seed: int, count: int) -> int:
    """Draws so many inputs of each kind; pytest tells those that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/unit/chaos", "--numprocesses", "2"]
    env = os.environ | {"CHAOS_SEED": str(seed), "CHAOS_INPUTS": str(count)}
    return subprocess.run(command, env=env, check=False).returncode


def _part(part: str, args: argparse.Namespace, folder: Path, *, seconds: float) -> int:
    from tests.chaos import disk, kills

    if part == "disk":
        return _tell(disk.run(folder))
    began = time.monotonic()
    tally = kills.run(seed=args.seed, goal=args.kills, seconds=seconds, folder=folder)
    print(
        f"{tally.equal} of {tally.kills} kills ended bit-equal ({tally.at_random} at random moments, "
        f"{tally.in_checkpoints} in checkpoints, {tally.runs} runs, {time.monotonic() - began:.0f} s)"
    )
    for fault in tally.faults:
        print(f"    {fault}")
    return len(tally.faults)


def _tell(checks: list) -> int:
    for check in checks:
        word = "skipped" if check.holds is None else "ok" if check.holds else "FAILED"
        print(
            f"{word:<8}{check.name}: {check.detail}" + (f" ({check.reproduce})" if check.holds is False else ""),
            flush=True,
        )
    return sum(check.holds is False for check in checks)


if __name__ == "__main__":
    sys.exit(main())
