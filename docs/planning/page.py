"""The sections of docs/planning.md that show the plans themselves."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from docs.planning import comparison
from docs.planning.tables import CARDS, COUNTS, TARGETS, Plan, Plans, gb, number, short, table, words
from lw_jax import roofline, targets
from lw_jax.core.config import Config
from lw_jax.recipes import latentwire


def write(cfg: Config, plans: Plans, path: str) -> str:
    """Returns the page; `path` is the configuration's file."""
    sections = (
        opening(cfg, plans, path),
        chosen(plans),
        comparison.analysis(cfg, plans),
        comparison.guide(cfg, plans),
        comparison.note(cfg, plans),
        candidates(plans),
        agreement(plans),
        assumptions(cfg, plans),
    )
    return "\n\n".join("\n".join(section) for section in sections)


def opening(cfg: Config, plans: Plans, path: str) -> list[str]:
    """Returns the title and what the figures are."""
    one = next(iter(plans.values()))
    compiled = sum(one["compiled"] for one in plans.values())
    readers = " and ".join(llm.source.rpartition("/")[2] for llm in cfg.llms.values())
    missing = [target for target in TARGETS if target not in plans]
    return [
        f"# Planning: {readers}",
        "",
        f"`{path}`: global batch {one['global_batch']}, {one['steps']} steps, at most "
        f"{one['limit_bytes'] / one['memory_bytes']:.0%} of a card's memory. Memory, FLOPs and bytes sent are those of "
        f"the train step that XLA compiled for each card ({compiled} of {len(plans)} plans). **No card was at hand: "
        "nothing here was measured on one; seconds are predictions** (last section). GB are 1e9 bytes on the fullest "
        "GPU; batch is examples on a GPU x accumulated.",
        *([f"Not planned yet: {', '.join(missing)}."] if missing else []),
    ]


def chosen(plans: Plans) -> list[str]:
    """Returns what the planner takes on every target."""
    head = ("target", "strategy", "mesh", "remat", "batch", "peak GB", "limit GB", "s/step", "samples/s", "hours")
    rows = []
    for target, one in plans.items():
        best, limit, took = one["chosen"], f"{one['limit_bytes'] / 1e9:.1f}", f"{one['plan_seconds']:.0f}"
        if best is None:
            why = "; ".join(dict.fromkeys(map(short, one["candidates"])))
            rows.append((target, f"nothing fits: {why}", "", "", "", "", limit, "", "", "", took))
            continue
        rows.append((target, *words(best), limit, *_speed(best), took))
    return ["## What is chosen", "", *table((*head, "plan took s"), rows)]


def candidates(plans: Plans) -> list[str]:
    """Returns every candidate of every card, compiled beside arithmetic."""
    lines = [
        "## Every candidate, compiled beside arithmetic",
        "",
        "est.: the arithmetic estimate of the same batch, and how far it lies from the compiled figure. TFLOP are those "
        "of one GPU and step, GB sent likewise.",
    ]
    head = (
        "GPUs",
        "strategy",
        "mesh",
        "remat",
        "batch",
        "peak GB",
        "est.",
        "TFLOP",
        "est.",
        "GB sent",
        "s/step",
        "est.",
    )
    groups = CARDS | {"other": "others"}
    for card, title in groups.items():
        mine = {key: one for key, one in plans.items() if _card_of(key) == card}
        rows = [
            (key if card == "other" else str(one["devices"]), *_candidate(row, one["chosen"]))
            for key, one in mine.items()
            for row in one["candidates"]
        ]
        if rows:
            lines += ["", f"### {title}", "", *table((*head, "samples/s", ""), rows)]
    return lines


def _card_of(target: str) -> str:
    return next((card for card in CARDS if target in {f"{card}x{count}" for count in COUNTS}), "other")


def _candidate(row: Mapping[str, Any], best: Mapping[str, Any] | None) -> tuple[str, ...]:
    verdict = "**chosen**" if row == best else ("" if row["fits"] else f"no: {short(row)}")
    if not row["peak_bytes"]:
        return row["strategy"], row["mesh"], *[""] * 10, verdict
    compiled = (row["peak_bytes"] / 1e9, row["flops"] / 1e12, row["step_seconds"])
    return (
        *words(row),
        *(_beside(row, "peak_bytes", 1e9, 1), number(compiled[1] or None, 0), _beside(row, "flops", 1e12, 0)),
        *(number(row["collective_bytes"] / 1e9, 1), number(compiled[2], 2), _beside(row, "step_seconds", 1, 2)),
        *(number(row["samples_per_second"], 1), verdict),
    )


def _beside(row: Mapping[str, Any], key: str, unit: float, digits: int) -> str:
    guess = (row["estimate"] or {}).get(key)
    if guess is None or not row[key]:
        return "-"
    return f"{guess / unit:.{digits}f} ({guess / row[key] - 1:+.0%})"


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
        "Arithmetic knows no fusion, no copy and no kernel that waits for memory: its seconds are a lower bound to "
        "order candidates by. The planner takes the compiled figures.",
    ]


def _spread(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    found = [row["estimate"][key] / row[key] - 1 for row in rows if row["estimate"] and row[key]]
    if not found:
        return "-"
    return f"{statistics.median(found):+.0%} ({min(found):+.0%} to {max(found):+.0%})"


def _speed(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return number(row["step_seconds"], 2), number(row["samples_per_second"], 1), number(row["hours"], 2)


def assumptions(cfg: Config, plans: Plans) -> list[str]:
    """Returns what the predictions stand on, and how the page is made."""
    assumed = {
        "share of the bf16 peak that large products reach": f"{roofline.MATMUL_FRACTION:.0%}",
        "share of memory bandwidth that kernels reach": f"{roofline.BANDWIDTH_FRACTION:.0%}",
        "share of NVLink, PCIe or network bandwidth": f"{roofline.LINK_FRACTION:.0%}",
        "shortest kernel": f"{roofline.KERNEL_SECONDS * 1e6:.0f} us",
        "start of a collective, one node": f"{roofline.COLLECTIVE_SECONDS * 1e6:.0f} us",
        "start of a collective between nodes": f"{roofline.NETWORK_SECONDS * 1e6:.0f} us",
        "prompt before the context, in tokens": str(latentwire.OPENING),
    }
    limits = {
        "source, tokens (encoder.window)": cfg.encoder.window,
        "latents (encoder.slots)": cfg.encoder.slots,
        "question, tokens (data.question_tokens)": cfg.data.question_tokens,
        "answer, tokens (data.answer_tokens)": cfg.data.answer_tokens,
    }
    rows = [(what, value, "assumed") for what, value in assumed.items()]
    rows += [(what, str(value), "configuration, its limit") for what, value in limits.items()]
    names = {targets.parse(target).card.name for target in plans}
    cards = [
        (
            *(card.name, f"{card.memory_bytes / 1e9:.1f}", f"{card.bandwidth / 1e9:.0f}"),
            *(f"{card.peak['bf16'] / 1e12:.0f}", f"{card.link / 1e9:.0f}", f"{card.network / 1e9:.1f}"),
        )
        for card in targets.CARDS.values()
        if card.name in names
    ]
    took = [one["plan_seconds"] for one in plans.values()]
    return [
        "## What this stands on",
        "",
        *table(("constant", "value", "where from"), rows),
        "",
        *table(("card", "memory GB", "GB/s", "bf16 TFLOP/s", "GB/s to a GPU of the node", "to other nodes"), cards),
        "",
        "Cards: XLA's target descriptions and the makers' data sheets, each figure with its source in "
        "`lw_jax/targets.py`. Every example is taken at its limit; shorter batches are faster.",
        "",
        "- **Not measured**: step times, memory on a card, fragmentation, what the CUDA context and NCCL take beyond "
        "the limit, the time to load weights. Kernels and collectives are added up; what overlaps makes a step faster.",
        f"- **A plan** took {min(took):.0f} to {max(took):.0f} s, {sum(took) / 60:.0f} min for all {len(took)}, on the "
        "CPU of the machine that made this page, other work beside it included; the second call of the same is read "
        "from the cache.",
        "- **Made by** `python docs/make_planning.py --plans FOLDER > docs/planning.md`, where FOLDER/TARGET.json is "
        "`python run.py plan --config FILE --target TARGET --json`; without `--plans` it makes them itself.",
    ]
