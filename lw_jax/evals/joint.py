"""Joint answer of several readers of one message: the candidate with the lowest mean NLL over all readers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from lw_jax.core import config, processes
from lw_jax.core.progress import phase
from lw_jax.core.types import SHARED, Example
from lw_jax.data import batches, prompt_tokens
from lw_jax.data.loader import eval_batches
from lw_jax.evals import answers
from lw_jax.evals.comparison import Record
from lw_jax.evals.control_rows import Measured, WireSession
from lw_jax.evals.statistics import Bootstrap
from lw_jax.evals.verdict import format_interval


def pick(
    bench: WireSession, measured: Measured, layout: prompt_tokens.Layout, *, options: config.Eval, seed: int
) -> dict[str, Any] | None:
    """Returns the scores of the joint answers from messages; None for one reader or without their row.

    A candidate is a reader's answer; its cost is the mean over all readers, each with its own latents, of the
    candidate's NLL a token, EOS included. The cheapest is picked, of equal ones the earlier reader's. One that is empty
    or cannot be tokenised has no cost and is picked only where none has: then the first reader's. "oracle" is the best
    reader for each example, "agreement" the share of examples with equal answers after normalisation, "unscored" the
    number of examples where no candidate has a cost. Adds "joint_nll" (None: no cost) and "picked" to every
    record of the row.
    """
    readers = [name for name in bench.frozen if name != SHARED and measured.of(name, "latents")]
    if len(readers) < 2:
        return None
    answered = [measured.of(name, "latents") for name in readers]  # [reader][example]
    costs = _costs(bench, measured, layout, answered, options=options)
    chosen = np.argmin(costs, axis=0)
    for reader, records in enumerate(answered):
        for position, record in enumerate(records):
            cost = float(costs[reader, position])
            record |= {"joint_nll": cost if np.isfinite(cost) else None, "picked": bool(chosen[position] == reader)}

    bootstrap = Bootstrap([example.context for example in measured.examples], seed=seed)
    scores = {key: np.array([[record[key] for record in records] for records in answered]) for key in ("em", "f1")}
    results: dict[str, Any] = {"joint": {}, "oracle": {}, "readers": {name: {} for name in readers}}
    for key, values in scores.items():
        results["joint"] |= bootstrap.mean(values[chosen, np.arange(len(chosen))]).named(key)
        results["oracle"] |= bootstrap.mean(values.max(axis=0)).named(key)
        for name, reader_scores in zip(readers, values, strict=True):
            results["readers"][name] |= bootstrap.mean(reader_scores).named(key)
    for reader, name in enumerate(readers):
        results["readers"][name]["picked"] = float(np.mean(chosen == reader))
    same = [
        len({answers.normalise(record["prediction"]) for record in each}) == 1 for each in zip(*answered, strict=True)
    ]
    results |= bootstrap.mean(np.array(same, np.float64)).named("agreement")
    return results | {"examples": len(chosen), "unscored": int(np.sum(~np.isfinite(costs).any(axis=0)))}


def format_figures(found: dict[str, Any]) -> str:
    alone = ", ".join(f"{name} {figures['f1']:.3f}" for name, figures in found["readers"].items())
    joint, oracle = found["joint"], found["oracle"]
    return (
        f"joint pick: f1 {joint['f1']:.3f} ({format_interval(joint['f1_interval'])}), em {joint['em']:.3f}; oracle f1 "
        f"{oracle['f1']:.3f}; alone {alone}; agreement {found['agreement']:.3f}"
    )


@dataclasses.dataclass(frozen=True, order=True)
class _Candidate:
    position: int  # in `Measured.indices`
    answer: str


def _costs(
    bench: WireSession,
    measured: Measured,
    layout: prompt_tokens.Layout,
    answered: Sequence[Sequence[Record]],
    *,
    options: config.Eval,
) -> np.ndarray:
    """Returns f64[readers n], inf where a candidate has no cost; equal candidates are scored once."""
    candidates = [[_Candidate(i, record["prediction"]) for i, record in enumerate(records)] for records in answered]
    distinct = sorted({candidate for per_reader in candidates for candidate in per_reader if candidate.answer})
    scored: list[tuple[int, float]] = []  # this process's: number of the candidate, cost
    # An answer may be longer than data's, and take more tokens of another reader than of its own.
    data = dataclasses.replace(layout.data, answer_tokens=max(layout.data.answer_tokens, 2 * options.max_new_tokens))
    encoded = batches.encode(_examples(measured, distinct), layout=dataclasses.replace(layout, data=data))
    with phase("scoring every answer by all readers", -(-len(encoded) // options.batch), "batches") as done:
        for host in done.track(eval_batches(encoded, options.batch, share=processes.share())):
            indices, valid = host.pop("index").tolist(), host.pop("valid")
            # An example's id leads back to its candidate, as some may have been dropped; the last one is no candidate.
            numbers = [int(encoded.examples[index].id) for index in indices]
            positions = [distinct[number].position if number < len(distinct) else 0 for number in numbers]
            nll = []
            for name, host_fields in host["readers"].items():
                fields = bench.functions.place(host_fields, name)
                latents = bench.functions.place(measured.latents[positions], None)
                scores = bench.score(fields, name, bench.prompt(fields, name, row="latents", latents=latents))
                nll.append(scores["nll"] / scores["tokens"])
            mean = np.mean(np.asarray(nll, np.float64), axis=0)
            scored += [
                (n, float(c)) for n, c, real in zip(numbers, mean, valid, strict=True) if real and n < len(distinct)
            ]
    costs = {distinct[number]: cost for part in processes.gather(scored) for number, cost in part}
    return np.array([[costs.get(candidate, np.inf) for candidate in per_reader] for per_reader in candidates])


def _examples(measured: Measured, candidates: Sequence[_Candidate]) -> list[Example]:
    """Returns each candidate as its example's answer, and one unchanged example, which is never dropped.

    `encode` refuses data without a usable example, as the candidates of an untrained wire may be.
    """
    originals = measured.examples
    examples = [
        dataclasses.replace(originals[candidate.position], id=str(number), answers=(candidate.answer,))
        for number, candidate in enumerate(candidates)
    ]
    return [*examples, dataclasses.replace(originals[0], id=str(len(candidates)))]
