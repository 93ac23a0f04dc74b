"""The campaign: `make chaos MINUTES=10 SEED=0`, or a part of it by hand.

python -m tests.chaos --minutes 10 --seed 0
python -m tests.chaos --parts inputs --only wire,message --count 1000
python -m tests.chaos --replay chaos-failures/wire-drawn-12
"""

import argparse
import atexit
import collections
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

PARTS = {"inputs": 0.5, "disk": 0.0, "kills": 0.0}  # share of the time; kills take what is left
KILLS, INPUTS = 100, 7000  # some 5,000 are left of the inputs where those with the same bytes are one
RATE = 10.0  # inputs a second that are drawn and that two processes read: no more are drawn than there is time for
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
    parser.add_argument("--only", default="", help="kinds of inputs")
    parser.add_argument("--count", type=int, default=INPUTS, help="of inputs, where there is time for so many")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--failures", type=Path, default=Path("chaos-failures"), help="folder of what failed")
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help="reads one saved failure again")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="lw_jax-chaos-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)  # after multiprocessing has removed its own in it
    prepare(scratch)
    return _replay(args.replay) if args.replay else _campaign(args)


def _replay(folder: Path) -> int:
    from tests.chaos import inputs, worker

    outcome = inputs.replay(folder)
    print(f"{outcome.word}: {outcome.detail} {outcome.place}")
    return int(outcome.word in worker.BAD)


def _campaign(args: argparse.Namespace) -> int:
    until = time.monotonic() + 60 * args.minutes - RESERVE
    parts, failed = args.parts.split(","), 0
    if "inputs" in parts:
        share = PARTS["inputs"] if "kills" in parts else 1.0
        failed += _inputs(args, seconds=share * (until - time.monotonic()))
    for part in ("disk", "kills"):
        if part in parts:
            folder = (args.failures / part).absolute()
            shutil.rmtree(folder, ignore_errors=True)
            found = _part(part, args, folder, seconds=until - time.monotonic())
            failed += found
            if not found:
                shutil.rmtree(folder, ignore_errors=True)
    return int(failed > 0)


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


def _inputs(args: argparse.Namespace, *, seconds: float) -> int:
    from tests.chaos import inputs

    began, only = time.monotonic(), tuple(filter(None, args.only.split(",")))
    count = min(args.count, int(RATE * seconds))
    tally = inputs.run(seed=args.seed, count=count, seconds=seconds, folder=args.failures, only=only)
    print(inputs.table(tally))
    left = f"; {tally.left} were not tried for want of time" if tally.left else ""
    print(f"\n{tally.tried} mutated inputs, seed {args.seed}, {time.monotonic() - began:.0f} s{left}", flush=True)
    groups: dict[tuple[str, ...], list[inputs.Failure]] = collections.defaultdict(list)
    for one in tally.failures:
        groups[one.outcome.word, one.case.kind, one.outcome.place, one.outcome.detail[:100]].append(one)
    for key, found in sorted(groups.items()):
        words = " | ".join(key).encode(errors="backslashreplace").decode()
        print(f"{len(found)} x {words}\n    python -m tests.chaos --replay {str(found[0].folder)!r}")
    return len(tally.failures)


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
