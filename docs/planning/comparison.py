"""The original's three documents beside plans: the sections of docs/planning.md that answer them."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from docs.planning import original
from docs.planning.tables import ABSENT, CARDS, Plan, Plans, best_of, gb, number, short, table
from lw_jax import legacy, plan, recipes, roofline, targets
from lw_jax.core.config import Config


def analysis(cfg: Config, plans: Plans) -> list[str]:
    """Returns the options of the original's GPU configuration analysis beside ours."""
    head = ("GPUs", "GB, theirs", "GB, plan", "samples/s, theirs", "plan", "epoch min, theirs", "plan")
    head += ("hours, theirs", "plan", "GPU-hours, theirs", "plan", "advice, theirs")
    rows, spent = [], {}
    for count, theirs in original.OPTIONS.items():
        best = best_of(plans, f"h100x{count}")
        rate = best["samples_per_second"] if best else None
        hours = original.SAMPLES / rate / 3600 if rate else None
        if hours:
            spent[count] = count * hours
        rows.append(
            (
                *(str(count), f"{theirs.memory_gb:g}", gb(best, "peak_bytes")),
                *(f"{theirs.samples_per_second:g}", number(rate, 1)),
                *(f"{theirs.epoch_minutes:g}", number(original.EPOCH / rate / 60 if rate else None, 1)),
                *(f"{theirs.hours:g}", number(hours, 2), f"{count * theirs.hours:.1f}"),
                *(number(spent.get(count), 2), theirs.recommendation),
            )
        )
    cheap = min(spent, key=lambda count: spent[count], default=None)
    lines = [
        f"## Beside the original's GPU configuration analysis ({original.SAMPLES:,} samples on H100)",
        "",
        *table(head, rows),
        "",
        f"- **Memory.** 34 / 17 / 8.5 GB is one total divided by the number of GPUs. {_divided(plans)}",
        "- **Time.** Their 2.0 / 3.5 / 6.0 samples/s are constants of a script, and their hours follow from them; ours "
        f"are predicted from the compiled step. {_loss_set(cfg)}",
    ]
    if cheap:
        lines.append(
            f"- **Advice.** Fewest GPU-hours: {cheap} GPU{'s' if cheap > 1 else ''}; every further one buys time: "
            + ", ".join(f"{count}: {hours / spent[1]:.2f} x" for count, hours in spent.items() if 1 in spent)
            + " the GPU-hours of one."
        )
    return [*lines, "", *scaling(cfg, plans)]


def scaling(cfg: Config, plans: Plans) -> list[str]:
    """Returns the factors on time of the original's "scaling considerations" beside ours, by arithmetic on one H100."""
    best = best_of(plans, "h100x1")
    if best is None:
        return []
    seconds = functools.partial(_estimated_seconds, cfg, best)
    ours = {"data": lambda: 2.0, "micro_batch": lambda: seconds(micro_batch=8) / seconds(micro_batch=4)}
    ours["slots"] = lambda: seconds(slots=64) / seconds(slots=32)
    rows = [(what, f"{factor:.2f}", f"{ours[key]():.2f}") for what, (factor, key) in original.SCALING.items()]
    return [
        *table(("change, one H100", "time, theirs", "time, arithmetic"), rows),
        "",
        f"By the arithmetic estimate at remat {best['remat']}; samples and epochs are linear by definition.",
    ]


def _estimated_seconds(cfg: Config, best: Mapping[str, Any], *, micro_batch: int = 4, slots: int = 32) -> float:
    """Returns the arithmetic seconds a step of a variant on one H100."""
    variant = dataclasses.replace(
        cfg,
        train=dataclasses.replace(cfg.train, micro_batch=micro_batch),
        encoder=dataclasses.replace(cfg.encoder, slots=slots),
        compute=dataclasses.replace(cfg.compute, remat=best["remat"]),
    )
    (found,) = plan.make(variant, "h100x1", estimate=True)["candidates"]
    return found["step_seconds"]


def guide(cfg: Config, plans: Plans) -> list[str]:
    """Returns the elastic guide's strategies and throughputs beside ours."""
    rows = []
    for count, theirs in original.STRATEGIES.items():
        for card, name in CARDS.items():
            one = plans.get(f"{card}x{count}")
            rows.append(
                (f"{count} x {name}", theirs["h100" if card == "h100" else "a100"], *_against(one, theirs, card))
            )
    lines = ["## Beside the original's elastic guide", ""]
    lines += table(("GPUs", "guide", "guide's, planned", "plan", "samples/s, guide's", "plan"), rows)
    rates = []
    for target, (rate, batch) in original.THROUGHPUT.items():
        wanted = targets.parse(target)
        share = _flops_per_sample(plans) * rate / wanted.devices / wanted.card.peak["bf16"]
        best = best_of(plans, target)
        own = number(best["samples_per_second"], 1) if best else (ABSENT if target not in plans else "does not fit")
        rates.append(
            (target, str(rate), own, f"{share:.0%}" if share else "-", str(batch), str(cfg.train.global_batch))
        )
    head = ("target", "samples/s, theirs", "plan", "theirs would take, of bf16 peak", "batch, theirs", "ours")
    return [
        *lines,
        "",
        *table(head, rates),
        "",
        f"- Their rates were not measured. {_loss_set(cfg)} One example is {_flops_per_sample(plans) / 1e12:.1f} TFLOP; "
        f"large products reach {roofline.MATMUL_FRACTION:.0%} of the peak at best (assumed).",
        "- Their batch changes with the number of GPUs, and with it the training; ours is fixed, and accumulation fills "
        "it up. Their rule for H100 looks at the card's name and not at its memory.",
    ]


def _against(one: Plan | None, theirs: Mapping[str, str], card: str) -> tuple[str, str, str, str]:
    """Returns how the guide's strategy fares in a plan, and what the plan takes instead."""
    if one is None:
        return ABSENT, "", "-", "-"
    wanted = original.OUR_WORDS[theirs["h100" if card == "h100" else "a100"]]
    rows = [row for row in one["candidates"] if row["strategy"] in wanted]
    fitting = [row for row in rows if row["fits"]]
    best = one["chosen"]
    own = f"{best['strategy']} {best['mesh']}" if best else "nothing fits"
    speed = number(best["samples_per_second"], 1) if best else "-"
    if not fitting:
        return "no: " + "; ".join(map(short, rows)), own, "-", speed
    first = max(fitting, key=lambda row: row["samples_per_second"] or 0)
    return f"fits ({first['strategy']})", own, number(first["samples_per_second"], 1), speed


def note(cfg: Config, plans: Plans) -> list[str]:
    """Returns the memory budgets of all three documents and the batch sizes of the note beside ours."""
    best, sizes = best_of(plans, "h100x1"), recipes.reader_bytes(cfg)
    ours = {f"{name.capitalize()} weights": f"{size / 1e9:.2f}" for name, size in sizes.items()}
    limit = "-"
    if best:
        ours |= {"frozen weights": gb(best, "weights_bytes", 2), "trained weights": gb(best, "trainable_bytes", 2)}
        ours |= {"optimizer": gb(best, "optimizer_bytes", 2), "gradients": "in activations"}
        ours |= {"overhead": "beyond the limit"}
        ours["activations of one example"] = f"{best['activation_bytes'] / 1e9 / best['micro_batch']:.2f}"
        held = sum(best[f"{key}_bytes"] for key in ("weights", "trainable", "optimizer"))
        ours["left for activations"] = f"{(plans['h100x1']['limit_bytes'] - held) / 1e9:.1f}"
        limit = f"remat {best['remat']}, batch {best['micro_batch']} x {best['accumulation']}"
    head = ("GB on one H100", "analysis", "guide", "batch note", "plan")
    rows = [(name, *theirs, ours.get(name, "-")) for name, theirs in original.MEMORY.items()]
    return [
        "## Beside the original's batch size note",
        "",
        *table(head, rows),
        "",
        f"The plan: {limit}. Weights differ by rounding; what learns here is a pretrained encoder in fp32 with two fp32 "
        f"moments, not {legacy.TRAINED_PARAMETERS / 1e6:.0f} M parameters; the note's 40 GB are before its own "
        "utilisation target, ours after it.",
        "",
        *_batches(plans),
        "",
        f"The note's formula gives {legacy.legacy_batch().per_gpu} at {legacy.UTILISATION:.0%} and "
        f"{legacy.legacy_batch(utilisation=0.8).per_gpu} at 80%; its {original.NOTE_BATCH} takes "
        f"{_reached(original.NOTE_BATCH):.1%}. It counts {legacy.POSITIONS} positions in one model and neither logits "
        "nor the second reader; the plan counts what was compiled. `python run.py plan --legacy` prints both.",
    ]


def _batches(plans: Plans) -> list[str]:
    rows = []
    for count in (1, 2, 3, 4):
        largest = [legacy.legacy_batch(utilisation=share, gpus=count) for share in (0.85, 0.80)]
        best = best_of(plans, f"h100x{count}")
        own = f"{best['micro_batch']} x {best['accumulation']}" if best else ABSENT
        theirs = (f"{original.NOTE_BATCH}", f"{original.NOTE_BATCH * count}")
        whole = str(plans[f"h100x{count}"]["global_batch"]) if best else "-"
        kind = f"{best['strategy']}, {best['remat']}" if best else ""
        rows.append(
            (f"{count} x H100", *theirs, *(f"{one.per_gpu} ({one.total})" for one in largest), own, whole, kind)
        )
    head = (
        "",
        "note, a GPU",
        "note, all",
        "formula at 85 % (all)",
        "at 80 % (all)",
        "plan, a GPU",
        "plan, all",
        "plan",
    )
    return table(head, rows)


def _reached(batch: int) -> float:
    found = legacy.legacy_batch()
    return (sum(found.fixed_gb.values()) + batch * found.sample_gb) / found.memory_gb


def _divided(plans: Plans) -> str:
    """Says what the frozen weights take on one of several GPUs under each strategy."""
    told = []
    for count in (2, 4):
        rows = plans.get(f"h100x{count}", {}).get("candidates", [])
        held = {f"{row['strategy']} {row['mesh']}": gb(row, "weights_bytes") for row in rows if row["weights_bytes"]}
        told += [f"on {count}: " + ", ".join(f"{name} {size}" for name, size in held.items())] if held else []
    return f"Data parallel holds all weights on every GPU. Frozen GB on the fullest, {'; '.join(told)}." if told else ""


def _loss_set(cfg: Config) -> str:
    """Says which work a sample is."""
    teacher = f"and a pass over the text as teacher (loss.kl = {cfg.loss.kl:g})" if cfg.loss.kl else "without a teacher"
    return (
        f"They name neither losses nor lengths; ours: one teacher-forced pass a reader {teacher}, {cfg.encoder.slots} "
        f"latents, a source of {cfg.encoder.window} tokens through an encoder that learns."
    )


def _flops_per_sample(plans: Plans) -> float:
    """Returns the FLOPs of one example, from a step that runs on one GPU; 0 where none was planned."""
    for one in plans.values():
        for row in one["candidates"]:
            if row["strategy"] == "single" and row["flops"]:
                return row["flops"] / one["global_batch"]
    return 0.0
