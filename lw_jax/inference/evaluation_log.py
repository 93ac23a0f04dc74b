"""Records of an evaluation under way, in the folder of its results: one that was cut short resumes, of any wire."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np

from lw_jax.core import precision
from lw_jax.core.files import content_hash
from lw_jax.core.progress import say
from lw_jax.data import examples
from lw_jax.data.batches import Encoded
from lw_jax.evals.record_log import RecordLog
from lw_jax.planning import plan_cache
from lw_jax.recipes.wire_readers import WireReaders

PARTIAL = "eval.partial.jsonl"  # an evaluation's records, until its results are written


def open_log(
    recipe: WireReaders,
    weights: Callable[[], str],
    encoded: Encoded,
    folder: Path | None,
    *,
    taught: Mapping[str, jax.Array],
) -> RecordLog:
    """Returns the records of the same evaluation in the folder: of the same `weights`, program, data and options.

    Rows, batch, layers and curve may differ. `weights` identifies what was trained, `taught` are the readers' vectors.
    Without a folder, and of several processes, which make a part each, records are in memory alone.
    """
    vectors = {name: content_hash(np.asarray(vector).tolist()) for name, vector in taught.items()}
    if folder is None or jax.process_count() > 1:
        return RecordLog(vectors=vectors)
    log = RecordLog(folder / PARTIAL, _key(recipe, weights(), encoded), vectors=vectors)
    if len(log):
        say(f"resuming: {len(log):,} records are in {folder}/{PARTIAL}")
    elif log.dropped:
        say(f"{folder}/{PARTIAL}: {log.dropped:,} records of another wire, program, data or options are replaced")
    return log


def _key(recipe: WireReaders, weights: str, encoded: Encoded) -> str:
    """Returns a hash of what the records of all rows depend on; mesh and layers change them by rounding alone.

    `eval.layers=auto` follows from the memory that is free when the program starts.
    """
    options = dataclasses.asdict(recipe.cfg)
    for name in ("rows", "batch", "layers", "curve", "curve_examples"):
        del options["eval"][name]
    del options["mesh"]
    options["compute"]["dtype"] = precision.resolve(recipe.cfg.compute.dtype, recipe.placement.platform)
    asked = [[example.id for example in encoded.examples], examples.digest(encoded.examples)]
    return content_hash([weights, options, asked, plan_cache.code()])
