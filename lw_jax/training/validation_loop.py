"""Validation during training: loss and metrics of held-out examples, in batches that fit into memory."""

import functools
from collections.abc import Callable, Sequence

from lw_jax.core import processes
from lw_jax.core import rng as rngs
from lw_jax.core.progress import phase
from lw_jax.core.types import Tree
from lw_jax.data.batches import weigh
from lw_jax.data.data_schedule import Stream
from lw_jax.data.loader import eval_batches
from lw_jax.training import out_of_memory, run_folder
from lw_jax.training.step_spec import StepSpec
from sharding import place


class ValidationLoop:
    """Validation of one run."""

    def __init__(self, step_spec: StepSpec, *, say: Callable[[str], None]):
        self._step_spec = step_spec
        self.batch = out_of_memory.HalvingBatch(step_spec.cfg, step_spec.placement, say=say)

    def measure(
        self, trainable: Tree, frozen: Tree, stop_requested: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Returns the loss of the first data set and the token-weighted mean metrics of each.

        None where it was stopped: `stop_requested` is called before each batch.

        Raises:
          OutOfMemory: not even the smallest batch fits.
        """
        return self.batch.run(lambda size: self._measure(trainable, frozen, size, stop_requested))

    def describe_data(self) -> list[str]:
        """Reads the held-out data; returns lines about each task's. Raises UserError where it cannot be used."""
        limit, lines = run_folder.validation_examples(self._step_spec.cfg), []
        for encoded in (encoded for prefix, encoded in self._data if not prefix):
            measured = [f"  {limit:,} of them are measured"] if 0 < limit < len(encoded) else []
            lines.append("held-out data: " + "\n".join([*encoded.describe(), *measured]))
        return lines

    def describe(self, values: dict[str, float]) -> str:
        """Returns the metrics for the progress line: of further data sets the NLL only, the log files have the rest."""
        prefixes = ("detail/", *(prefix for prefix, _ in self._data if prefix))
        shown = {name: value for name, value in values.items() if "nll/" in name or not name.startswith(prefixes)}
        return "  ".join(f"{name} {value:.4g}" for name, value in shown.items())

    def _measure(
        self, trainable: Tree, frozen: Tree, size: int, stop_requested: Callable[[], bool]
    ) -> dict[str, float] | None:
        cfg, placement = self._step_spec.cfg, self._step_spec.placement
        key, limit = rngs.stream(cfg.seed, "validation"), run_folder.validation_examples(cfg)
        sizes = [min(limit or len(encoded), len(encoded)) for _, encoded in self._data]
        metrics: dict[str, float] = {}
        with phase("validation", sum(-(-count // size) for count in sizes), "batches") as done:
            for number, (prefix, encoded) in enumerate(self._data):
                sums: dict[str, list[float]] = {}
                for batch in eval_batches(encoded, size, limit, share=processes.share()):
                    if stop_requested():
                        return None
                    valid = batch.pop("valid")
                    placed = place.put_parts(weigh(batch, valid), placement, place.put_eval)
                    terms = self._step_spec.step.evaluate(trainable, frozen, placed, key)
                    loss = {} if number else {"loss": (terms.sum, terms.weight)}
                    for name, pair in (terms.terms | loss).items():
                        total = sums.setdefault(prefix + name, [0.0, 0.0])
                        total[0] += float(pair[0])
                        total[1] += float(pair[1])
                    done.advance()
                metrics |= {name: total / weight for name, (total, weight) in sums.items()}
        return metrics

    @functools.cached_property
    def _data(self) -> Sequence[tuple[str, Stream]]:
        with phase("reading and tokenising the validation data"):
            return self._step_spec.recipe.validation()
