"""The campaign: `make chaos MINUTES=10 SEED=0`, or a part of it by hand.

python -m tests.chaos --minutes 10 --seed 0
python -m tests.chaos --parts inputs --only gguf,message --count 1000
python -m tests.chaos --replay chaos-failures/gguf-drawn-12
"""

import argparse
import os
import sys
from pathlib import Path

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def main() -> int:
    """Returns 1 where anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", default="inputs")
    parser.add_argument("--only", default="")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--failures", type=Path, default=Path("chaos-failures"))
    parser.add_argument("--replay", type=Path)
    args = parser.parse_args()
    from tests.chaos import inputs

    if args.replay:
        outcome = inputs.replay(args.replay)
        print(f"{outcome.word}: {outcome.detail} {outcome.place}")
        return 0 if outcome.word in ("refused", "accepted") else 1
    only = tuple(filter(None, args.only.split(",")))
    tally = inputs.run(seed=args.seed, count=args.count, seconds=60 * args.minutes, folder=args.failures, only=only)
    print(inputs.table(tally))
    groups: dict = {}
    for failure in tally.failures:
        key = (failure.outcome.word, failure.case.kind, failure.outcome.place, failure.outcome.detail[:60])
        groups.setdefault(key, []).append(failure)
    for key, found in sorted(groups.items()):
        print(len(found), *key, found[0].folder, sep=" | ")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
