"""Seconds from the command to its end for each verb on a small run, by turns, each in a process of its own.

    python benchmarks/startup.py --workdir runs/smoke-latentwire --repeats 3

The run is one of configs/smoke.py. The first turn may compile; the later ones read the compile cache.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from lw_jax.core.errors import leave

TEXT = "Mara Ellis lives in Lisbon."


def main(argv: Sequence[str] | None = None) -> int:
    """Times and prints; the code of the first verb that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", required=True, metavar="DIR", help="a trained wire's folder")
    parser.add_argument("--repeats", type=int, default=2, help="turns (default: 2)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes.txt"
        notes.write_text(TEXT, "utf-8")
        verbs = commands(args.workdir, str(notes))
        seconds: dict[str, list[float]] = {name: [] for name in verbs}
        for _ in range(args.repeats):
            for name, words in verbs.items():
                begun = time.perf_counter()
                command = [sys.executable, str(common.ROOT / "run.py"), *words]
                if code := subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
                    return code
                seconds[name].append(time.perf_counter() - begun)
    print("| command | seconds, turn by turn |\n|---|---|")
    for name, found in seconds.items():
        print(f"| `{name}` | {', '.join(f'{one:.2f}' for one in found)} |")
    return 0


def commands(workdir: str, notes: str) -> dict[str, list[str]]:
    """Returns the words of each command by its name."""
    return {
        "--help": ["--help"],
        "answer --help": ["answer", "--help"],
        "show": ["show", "--config", "configs/large.py"],
        "report": ["report", "--workdir", workdir],
        "plan --estimate": ["plan", "--estimate", "--config", "configs/large.py", "--target", "h100x4"],
        "answer": ["answer", "--workdir", workdir, "--context", notes, "--question", "Where does Mara Ellis live?"],
        "eval": ["eval", "--workdir", workdir],
    }


if __name__ == "__main__":
    leave(main)
