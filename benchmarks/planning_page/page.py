"""The sections of docs/planning.md that show the plans themselves."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.planning_page.tables import (
    CARDS,
    COUNTS,
    TARGETS,
    Plans,
    batch,
    best_of,
    gb,
    held_bytes,
    named,
    number,
    short,
    single,
    table,
)
from lw_jax.core.config import Config
from lw_jax.planning import gpus, roofline
from lw_jax.recipes import wire_shapes
from sharding.placement import STRATEGIES


def write(cfg: Config, plans: Plans, path: str) -> str:
    """Returns the page; `path` is the configuration's file."""
    sections = (
        opening(cfg, plans, path),
        chosen(plans),
        candidates(plans),
        agreement(plans),
        assumptions(cfg, plans),
    )
    return "\n\n".join("\n".join(section) for section in sections)


def opening(cfg: Config, plans: Plans, path: str) -> list[str]:
    """Returns the title, what the figures are, and the words."""
    one = next(iter(plans.values()))
    compiled = sum(one["compiled"] for one in plans.values())
    readers = " and ".join(llm.source.rpartition("/")[2] for llm in cfg.llms.values())
    missing = [target for target in TARGETS if target not in plans]
    return [
        f"# Planning: {readers}",
        "",
        f"How `{path}` (global batch {one['global_batch']}, {one['steps']} steps) runs on so many GPUs of a kind, at "
        f"most {one['limit_bytes'] / one['memory_bytes']:.0%} of their memory used. {compiled} of the {len(plans)} "
        "plans were compiled: their memory, FLOPs and bytes sent are those of the train step that XLA compiled for "
        "that very card. **No card was at hand: nothing here was measured on one, and seconds are predictions** (last "
        "section).",
        *(["", f"Not planned yet: {', '.join(missing)}."] if missing else []),
        "",
        "- GB are 1e9 bytes on the fullest GPU. *Batch* is examples on a GPU x how often they are accumulated. *Mesh* "
        "is data x model: parts of the batch x parts of each matrix.",
        "- *Remat* is what a layer's backward pass computes again: `none` (what stands between products of matrices), "
        "`full` (the products too).",
        *(f"- `{name}`: {told}." for name, told in STRATEGIES.items()),
    ]


def chosen(plans: Plans) -> list[str]:
    """Returns what the planner takes on every target."""
    head = ("target", "strategy", "mesh", "remat", "batch", "peak GB", "limit GB", "s/step", "samples/s", "hours")
    rows, notes = [], []
    for target, one in plans.items():
        best, limit, took = one["chosen"], f"{one['limit_bytes'] / 1e9:.1f}", f"{one['plan_seconds']:.0f}"
        if best is None:
            rows.append((target, "nothing fits", "", "", "", "", limit, "", "", "", took))
            notes.append(_advice(plans, target))
            continue
        speed = number(best["step_seconds"], 2), number(best["samples_per_second"], 1), number(best["hours"], 2)
        held = best["strategy"], best["mesh"], best["remat"], batch(best), gb(best, "peak_bytes"), limit
        rows.append((target, *held, *speed, took))
        notes += [*_slower_than_fewer(plans, target), *_filled(plans, target)]
    steps = next(iter(plans.values()))["steps"]
    return [
        "## What is chosen",
        "",
        *table((*head, "plan took s"), rows),
        "",
        f"Hours are for {steps} steps. Of what fits the fastest is taken. A micro-batch divides a GPU's share of the "
        "global batch, or nearly, so the next larger one needs up to twice the activations: room below the limit is no "
        "slack. A batch that the GPUs do not divide is filled up with rows of weight zero; samples/s counts examples.",
        *(["", *notes] if notes else []),
    ]


def _advice(plans: Plans, target: str) -> str:
    """Says why nothing fits on a target, and which of the others holds the same."""
    one, wanted = plans[target], gpus.parse(target)
    why = "; ".join(dict.fromkeys(f"{row['strategy']}: {short(row)}" for row in one["candidates"]))
    fitting = [other for other in plans if best_of(plans, other)]
    larger = [name for name in fitting if plans[name]["devices"] == one["devices"]]
    more = [name for name in fitting if gpus.parse(name).card == wanted.card]
    told = [f"more cards ({more[0]}: {plans[more[0]]['chosen']['strategy']})"] if more else []
    told += [f"a larger card ({', '.join(larger)})"] if larger else []
    whole = single(plans)
    share = held_bytes(whole) / one["memory_bytes"] if whole else 0
    line = f"- **{target}** is refused: {why}. Take {', '.join([*told, 'or smaller readers'])}."
    if share and one["devices"] == 1:
        line += f" Weights and optimizer are {share:.0%} of its whole memory, before the first activation."
    return line


def _slower_than_fewer(plans: Plans, target: str) -> list[str]:
    """Says so where fewer GPUs of the same card are predicted to be faster."""
    wanted, own = gpus.parse(target), plans[target]
    faster = {
        name: one["chosen"]["samples_per_second"] or 0
        for name, one in plans.items()
        if one["devices"] < own["devices"] and one["chosen"] and gpus.parse(name).card == wanted.card
    }
    best = max(faster, key=lambda name: faster[name], default=None)
    rate = own["chosen"]["samples_per_second"]
    if best is None or rate is None or faster[best] <= rate:
        return []
    return [
        f"- **{target}** is slower than {best} ({rate:.1f} against {faster[best]:.1f} samples/s): use fewer of its "
        "GPUs, or a global batch that their number divides."
    ]


def _filled(plans: Plans, target: str) -> list[str]:
    """Says what filling up the batch costs, and what the last GPU gains."""
    own, best = plans[target], plans[target]["chosen"]
    if not best.get("filling"):
        return []
    fewer = f"{gpus.parse(target).card.name}x{own['devices'] - 1}"
    before = best_of(plans, fewer)
    gain = ""
    if before and before["samples_per_second"] and best["samples_per_second"]:
        gain = f" {best['samples_per_second'] / before['samples_per_second']:.2f} times the samples/s of {fewer}."
    return [f"- **{target}**: {best['filling']}.{gain}"]


def candidates(plans: Plans) -> list[str]:
    """Returns every candidate of every card, compiled beside arithmetic."""
    lines = [
        "## Every candidate, compiled beside arithmetic",
        "",
        "est.: the arithmetic estimate of the same batch, and how far it lies from the compiled figure. TFLOP and GB "
        "sent are those of one GPU and step. `single` on several GPUs is the same as on one (the others idle) and is "
        "listed once. A candidate may appear with several recomputations: those that were compiled on the way.",
    ]
    for card, title in (CARDS | {"": "Others"}).items():
        mine = {target: one for target, one in plans.items() if _card_of(target) == card}
        if mine:
            lines += ["", f"### {title}", "", *_measured(mine, card)]
    return [*lines, *_refused(plans)]


def _card_of(target: str) -> str:
    """Returns the card whose table shows a target; "" is the table of all others."""
    return next((card for card, counts in COUNTS.items() if target in {f"{card}x{count}" for count in counts}), "")


def _measured(plans: Plans, card: str) -> list[str]:
    head = ("GPUs" if card else "target", "strategy", "mesh", "remat", "batch", "peak GB", "est.", "TFLOP", "est.")
    head += ("GB sent", "s/step", "est.", "samples/s", "")
    alone = plans.get(f"{card}x1", {}).get("candidates", [])
    rows = [
        (str(one["devices"]) if card else target, *_candidate(row, one["chosen"]))
        for target, one in plans.items()
        for row in one["candidates"]
        if row["peak_bytes"] and (one["devices"] == 1 or row == one["chosen"] or row not in alone)
    ]
    return table(head, rows) if rows else []


def _candidate(row: Mapping[str, Any], best: Mapping[str, Any] | None) -> tuple[str, ...]:
    verdict = "**chosen**" if row == best else ("" if row["fits"] else f"no: {short(row)}")
    return (
        *(row["strategy"], row["mesh"], row["remat"], batch(row)),
        *(gb(row, "peak_bytes"), _beside(row, "peak_bytes", 1e9, 1)),
        *(number(row["flops"] / 1e12 if row["flops"] else None, 0), _beside(row, "flops", 1e12, 0)),
        number(row["collective_bytes"] / 1e9 if row["flops"] else None, 1),
        *(number(row["step_seconds"], 2), _beside(row, "step_seconds", 1, 2)),
        *(number(row["samples_per_second"], 1), verdict),
    )


def _beside(row: Mapping[str, Any], key: str, unit: float, digits: int) -> str:
    guess = (row["estimate"] or {}).get(key)
    if guess is None or not row[key]:
        return "-"
    return f"{guess / unit:.{digits}f} ({guess / row[key] - 1:+.0%})"


def _refused(plans: Plans) -> list[str]:
    """Returns one line a reason with the candidates that it refused before anything was compiled."""
    told: dict[str, dict[str, list[str]]] = {}
    for target, one in plans.items():
        for row in one["candidates"]:
            if not row["peak_bytes"]:
                told.setdefault(short(row), {}).setdefault(target, []).append(named(row))
    lines = []
    for reason, by_target in told.items():
        where = [f"{target}: {', '.join(names)}" for target, names in by_target.items()]
        lines.append(f"- {reason}: {'; '.join(where)}.")
    return ["", "### Refused before compiling", "", *lines] if lines else []


def agreement(plans: Plans) -> list[str]:
    """Returns how far arithmetic lies from the compiled figures, by strategy."""
    rows = [row for one in plans.values() if one["compiled"] for row in one["candidates"] if row["flops"]]
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    body = []
    for name in [*names, "all"]:
        mine = [row for row in rows if name in (row["strategy"], "all")]
        body.append((name, str(len(mine)), *(_spread(mine, key) for key in ("peak_bytes", "flops", "step_seconds"))))
    return [
        "### How far arithmetic lies from the compiled figures: median (least to most)",
        "",
        *table(("strategy", "candidates", "peak", "FLOPs", "seconds"), body),
        "",
        "Arithmetic counts matrix products, the largest tensors and, in its seconds, how often kernels beside the "
        "products move each kind of activation (lw_jax/models/memory_traffic.py): it orders what is compiled, and the "
        "compiled figures decide.",
    ]


def _spread(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    found = [row["estimate"][key] / row[key] - 1 for row in rows if row["estimate"] and row[key]]
    if not found:
        return "-"
    return f"{statistics.median(found):+.0%} ({min(found):+.0%} to {max(found):+.0%})"


def assumptions(cfg: Config, plans: Plans) -> list[str]:
    """Returns what the predictions stand on, and how the page is made."""
    took = [one["plan_seconds"] for one in plans.values()]
    return [
        "## What this stands on",
        "",
        *constants(),
        "",
        *_cards(plans),
        "",
        "Cards: XLA's target descriptions and the makers' data sheets, each figure with its source in "
        "`lw_jax/planning/gpus.py`.",
        "",
        f"- **Lengths**: every example at its limit: a source of {cfg.encoder.window} tokens (encoder.window), "
        f"{cfg.encoder.slots} latents (encoder.slots), a question of {cfg.data.question_tokens} tokens "
        f"(data.question_tokens), an answer of {cfg.data.answer_tokens} (data.answer_tokens). Shorter batches are "
        "faster.",
        "- **Not measured**: step times, memory on a card, fragmentation, what the CUDA context and NCCL take beyond "
        "the limit, the time to load weights. Kernels and collectives are added up; what overlaps makes a step faster.",
        f"- **A plan** took {min(took):.0f} to {max(took):.0f} s, {sum(took) / 60:.0f} min for all {len(took)}, on the "
        "CPU of the machine that made this page, other work beside it included; the second call of the same is read "
        "from the cache.",
        "- **Made by** `python -m benchmarks.planning_page --plans FOLDER > docs/planning.md`, where "
        "FOLDER/TARGET.json is `python run.py plan --config FILE --target TARGET --json`; without `--plans` it makes "
        "them itself.",
    ]


def constants() -> list[str]:
    """Returns the constants of every prediction."""
    assumed = {
        "share of the bf16 peak that large products reach": f"{roofline.MATMUL_FRACTION:.0%}",
        "share of memory bandwidth that kernels reach": f"{roofline.BANDWIDTH_FRACTION:.0%}",
        "share of NVLink, PCIe or network bandwidth": f"{roofline.LINK_FRACTION:.0%}",
        "shortest kernel, us": f"{roofline.KERNEL_SECONDS * 1e6:.0f}",
        "start of a collective inside a node, us": f"{roofline.COLLECTIVE_SECONDS * 1e6:.0f}",
        "start of a collective between nodes, us": f"{roofline.NETWORK_SECONDS * 1e6:.0f}",
        "prompt before the context, tokens": str(wire_shapes.SHARED_PREFIX),
    }
    return table(("assumed, not measured by this project", "value"), assumed.items())


def _cards(plans: Plans) -> list[str]:
    cards: dict[str, gpus.Card] = {card.name: card for card in (gpus.parse(target).card for target in plans)}
    head = ("card", "memory GB", "memory GB/s", "bf16 TFLOP/s", "GB/s inside the node", "GB/s to other nodes")
    rows = [
        (
            *(card.name, f"{card.memory_bytes / 1e9:.1f}", f"{card.bandwidth / 1e9:.0f}"),
            *(f"{card.peak['bf16'] / 1e12:.0f}", f"{card.link / 1e9:.0f}", f"{card.network / 1e9:.1f}"),
        )
        for card in cards.values()
    ]
    return table(head, rows)
