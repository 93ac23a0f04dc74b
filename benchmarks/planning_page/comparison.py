"""The original's three documents beside plans: the sections of docs/planning.md that answer them."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from benchmarks.planning_page import original
from benchmarks.planning_page.tables import (
    ABSENT,
    CARDS,
    Plan,
    Plans,
    batch,
    best_of,
    gb,
    held_bytes,
    layout,
    named,
    number,
    short,
    single,
    table,
)
from lw_jax import recipes
from lw_jax.core.config import Config
from lw_jax.planning import gpus, legacy, planner, roofline
from lw_jax.recipes import wire_shapes


def analysis(cfg: Config, plans: Plans) -> list[str]:
    """Returns the options of the original's GPU configuration analysis beside ours."""
    head = ("H100", "GB: theirs", "plan", "samples/s: theirs", "plan", "epoch, min: theirs", "plan")
    head += ("hours: theirs", "plan", "GPU-hours: theirs", "plan", "advice: theirs")
    rows = []
    for count, theirs in original.OPTIONS.items():
        best = best_of(plans, f"h100x{count}")
        rate = best["samples_per_second"] if best else None
        hours = original.SAMPLES / rate / 3600 if rate else None
        rows.append(
            (
                *(str(count), f"{theirs.memory_gb:g}", gb(best, "peak_bytes")),
                *(f"{theirs.samples_per_second:g}", number(rate, 1)),
                *(f"{theirs.epoch_minutes:g}", number(original.EPOCH / rate / 60 if rate else None, 1)),
                *(f"{theirs.hours:g}", number(hours, 2), f"{count * theirs.hours:.1f}"),
                *(number(count * hours if hours else None, 2), theirs.recommendation),
            )
        )
    return [
        "## Beside the original's GPU configuration analysis",
        "",
        f"Its job: {original.SAMPLES:,} samples, {original.EPOCH:,} an epoch, with both readers.",
        "",
        *table(head, rows),
        "",
        *_memory_reasons(plans),
        *_time_reasons(cfg, plans),
        "",
        *scaling(cfg, plans),
    ]


def _memory_reasons(plans: Plans) -> list[str]:
    """Says why 34 / 17 / 8.5 GB are not what a GPU takes."""
    parts = ", ".join(f"{size} of {name}" for name, size in original.PARTS_GB.items())
    lines = [
        f"- **34 / 17 / 8.5 GB.** 34 is one sum ({parts}); 17 and 8.5 are that sum divided by the number of GPUs. Data "
        "parallel divides nothing that is frozen: every GPU holds both readers."
    ]
    told = []
    for count in (2, 4):
        rows = plans.get(f"h100x{count}", {}).get("candidates", [])
        held = {named(row): gb(row, "weights_bytes") for row in rows if row["peak_bytes"] and row["devices_used"] > 1}
        if held:
            told.append(f"on {count}: {', '.join(f'{size} {name}' for name, size in held.items())}")
    if told:
        lines.append(f"  Frozen GB on the fullest GPU: {'; '.join(told)}.")
    best = best_of(plans, "h100x1")
    if best:
        lines.append(
            f"  Our peaks are larger by choice: {held_bytes(best) / 1e9:.1f} GB must be there on one GPU whatever the "
            "batch; the rest is a micro-batch as large as the limit allows."
        )
    return lines


def _time_reasons(cfg: Config, plans: Plans) -> list[str]:
    """Says why their hours and their advice are not ours."""
    rates = " / ".join(f"{option.samples_per_second:g}" for option in original.OPTIONS.values())
    lines = [
        f"- **{rates} samples/s** are constants of a script, not measured; its minutes and hours follow from them. "
        f"{_loss_set(cfg)}"
    ]
    whole = single(plans)
    if whole:
        share = _peak_share("h100x1", original.OPTIONS[1].samples_per_second, _flops_per_sample(cfg, whole))
        lines.append(f"  At that, their rate on one GPU would be {share:.0%} of an H100's bf16 peak.")
    spent = {}
    for count in original.OPTIONS:
        best = best_of(plans, f"h100x{count}")
        if best and best["samples_per_second"]:
            spent[count] = count / best["samples_per_second"]
    if 1 in spent and len(spent) > 1:
        first = original.OPTIONS[1].hours
        told = (
            f"{count} GPUs {spent[count] / spent[1]:.2f} x (theirs {count * theirs.hours / first:.2f} x)"
            for count, theirs in original.OPTIONS.items()
            if count in spent and count > 1
        )
        lines.append(
            f"- **Advice.** One H100 holds both readers, as they say. GPU-hours beside those of one GPU: "
            f"{', '.join(told)}; near 1 a further GPU only shortens the wait."
        )
    return lines


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
        *table(("change, one H100", "time x: theirs", "arithmetic"), rows),
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
    (found,) = planner.make(variant, "h100x1", estimate=True)["candidates"]
    return found["step_seconds"]


def guide(cfg: Config, plans: Plans) -> list[str]:
    """Returns the elastic guide's strategies and throughputs beside ours."""
    rows = [
        (f"{count} x {name}", *_against(plans.get(f"{card}x{count}"), theirs["h100" if card == "h100" else "a100"]))
        for count, theirs in original.STRATEGIES.items()
        for card, name in CARDS.items()
    ]
    head = ("GPUs", "guide", "is here", "fits", "samples/s", "plan", "samples/s")
    needed = original.GUIDE_WEIGHTS_GB + original.GUIDE_BATCH * original.GUIDE_SAMPLE_GB
    limit = original.GUIDE_UTILISATION * legacy.MEMORY_GB
    return [
        "## Beside the original's elastic guide",
        "",
        *table(head, rows),
        "",
        "- Its rules are literals keyed by the card's name: on H100 they skip the memory check, and by its own terms "
        f"({original.GUIDE_WEIGHTS_GB} GB and {original.GUIDE_SAMPLE_GB} GB a sample) the {original.GUIDE_BATCH} a GPU "
        f"that it sets need {needed:.0f} GB, above its {original.GUIDE_UTILISATION:.0%} of {legacy.MEMORY_GB:.0f} GB = "
        f"{limit:.0f} GB. Ours come from the compiled step and the card's memory.",
        "",
        *throughput(cfg, plans),
    ]


def _against(one: Plan | None, guided: str) -> tuple[str, ...]:
    """Returns how the guide's strategy fares in a plan, and what the plan takes instead."""
    wanted = original.OUR_WORDS[guided]
    if one is None:
        return guided, " or ".join(wanted), ABSENT, "-", "-", "-"
    rows = [row for row in one["candidates"] if row["strategy"] in wanted]
    best = one["chosen"]
    own = (layout(best), number(best["samples_per_second"], 1)) if best else ("nothing fits", "-")
    fitting = [row for row in rows if row["fits"]]
    if not fitting:
        return guided, " or ".join(wanted), f"no: {'; '.join(map(short, rows))}", "-", *own
    first = max(fitting, key=lambda row: row["samples_per_second"] or 0)
    return guided, layout(first), "yes", number(first["samples_per_second"], 1), *own


def throughput(cfg: Config, plans: Plans) -> list[str]:
    """Returns the guide's "performance expectations" beside ours, and what they would ask of the cards."""
    whole = single(plans)
    positions = sum(_positions(cfg).values())
    flops = _flops_per_sample(cfg, whole) if whole else None
    fewer = flops * original.POSITIONS / positions if flops else None
    rows = []
    for target, (rate, examples) in original.THROUGHPUT.items():
        best = best_of(plans, target)
        own = number(best["samples_per_second"], 1) if best else (ABSENT if target not in plans else "does not fit")
        shares = (f"{_peak_share(target, rate, each):.0%}" if each else "-" for each in (flops, fewer))
        rows.append((target, str(rate), own, *shares, str(examples), str(cfg.train.global_batch)))
    head = ("target", "samples/s: theirs", "plan", "theirs of bf16 peak, our lengths")
    head += (f"at {original.POSITIONS} positions", "batch: theirs", "ours")
    lines = [*table(head, rows), "", f"- **50 / 80 / 160 / 320 samples/s** were not measured. {_loss_set(cfg)}"]
    if flops and fewer:
        lines.append(
            f"  One example is {flops / 1e12:.1f} TFLOP at our {positions} positions a reader ({_told(cfg)}); large "
            f"products reach {roofline.MATMUL_FRACTION:.0%} of the peak at best (assumed). In proportion it is "
            f"{fewer / 1e12:.1f} TFLOP at the {original.POSITIONS} positions of the original's training: their rates "
            "ask for prompts that short, and no teacher."
        )
    lines.append(
        "- Their batch changes with the number of GPUs, and with it the training; ours is fixed, and accumulation "
        "fills it up."
    )
    return lines


def note(cfg: Config, plans: Plans) -> list[str]:
    """Returns the memory budgets of all three documents and the batch sizes of the note beside ours."""
    best = best_of(plans, "h100x1")
    ours = {f"{name.capitalize()} weights": size / 1e9 for name, size in recipes.reader_bytes(cfg).items()}
    if best:
        ours |= {"frozen weights": best["weights_bytes"] / 1e9, "trained weights": best["trainable_bytes"] / 1e9}
        ours |= {"optimizer": best["optimizer_bytes"] / 1e9}
        ours["activations of one example"] = best["activation_bytes"] / 1e9 / best["micro_batch"]
        ours["left for activations"] = (plans["h100x1"]["limit_bytes"] - held_bytes(best)) / 1e9
    held = sum(legacy.legacy_batch().fixed_gb.values())
    left = (f"{legacy.MEMORY_GB * share - held:.0f} at {share:.0%}" for share in (legacy.UTILISATION, 0.8))
    reasons = dict.fromkeys(("Llama weights", "Qwen weights"), "the plan counts the shapes") | legacy.REASONS
    reasons["left for activations"] = f"theirs before a utilisation target, ours after it; theirs {', '.join(left)}"
    rows = [(name, *theirs, number(ours.get(name), 2), reasons[name]) for name, theirs in original.MEMORY.items()]
    return [
        "## Beside the original's batch size note",
        "",
        *table(("GB on one H100", "analysis", "guide", "note", "plan", "why they differ"), rows),
        "",
        *_batches(plans),
        "",
        *_batch_reasons(cfg, plans),
    ]


def _batches(plans: Plans) -> list[str]:
    rows = []
    for count in (1, 2, 3, 4):
        formula = [legacy.legacy_batch(utilisation=share, gpus=count) for share in (legacy.UTILISATION, 0.8)]
        best = best_of(plans, f"h100x{count}")
        own = (batch(best), str(plans[f"h100x{count}"]["global_batch"]), layout(best)) if best else (ABSENT, "-", "")
        theirs = (str(original.NOTE_BATCH), str(original.NOTE_BATCH * count))
        rows.append((str(count), *theirs, *(f"{one.per_gpu} ({one.total})" for one in formula), *own))
    head = ("H100", "note: a GPU", "all", "formula at 85 %: a GPU (all)", "at 80 %", "plan: a GPU", "all", "layout")
    return table(head, rows)


def _batch_reasons(cfg: Config, plans: Plans) -> list[str]:
    """Says where 69 and 59 come from, and why the plan's micro-batch is another."""
    most, fewer = (legacy.legacy_batch(utilisation=share) for share in (legacy.UTILISATION, 0.8))
    reached = (sum(most.fixed_gb.values()) + original.NOTE_BATCH * most.sample_gb) / most.memory_gb
    lines = [
        f"- **{most.per_gpu} and {fewer.per_gpu}** are the note's own formula at {legacy.UTILISATION:.0%} and 80%: "
        f"({most.memory_gb:.0f} GB x share - {sum(most.fixed_gb.values()):.0f} GB) / {most.sample_gb:.2f} GB. Its "
        f'{original.NOTE_BATCH} "at 80 %" takes {reached:.1%} by the same formula.',
        f"  {most.sample_gb:.2f} GB is one model of {legacy.LAYERS} layers over {legacy.POSITIONS} positions: no "
        f"second reader, no encoder, no logits, and other lengths than ours ({cfg.encoder.window} in the encoder, "
        f"{sum(_positions(cfg).values())} in each reader).",
    ]
    best = best_of(plans, "h100x1")
    if best:
        lines.append(
            f"- **{best['micro_batch']}** on one GPU here: compiled, at remat {best['remat']}, with gradients. What "
            f"learns is a pretrained encoder in fp32, not {legacy.TRAINED_PARAMETERS / 1e6:.0f} M parameters in bf16. "
            "Accumulation makes the same global batch of it on every row, so that all train alike."
        )
    return [*lines, "- `python run.py plan --legacy` prints the formula beside any plan."]


def _positions(cfg: Config) -> dict[str, int]:
    """Returns what one reader sees of one example, at its limits."""
    data = cfg.data
    return {
        "prompt": wire_shapes.SHARED_PREFIX,
        "latents": cfg.encoder.slots,
        "question": data.question_tokens,
        "answer": data.answer_tokens,
    }


def _told(cfg: Config) -> str:
    return ", ".join(f"{name} {count}" for name, count in _positions(cfg).items())


def _loss_set(cfg: Config) -> str:
    """Says which work a sample is."""
    teacher = f"and a pass over the text as teacher (loss.kl = {cfg.loss.kl:g})" if cfg.loss.kl else "without a teacher"
    return (
        f"They name neither losses nor lengths; ours: one teacher-forced pass a reader {teacher}, {cfg.encoder.slots} "
        f"latents, a source of {cfg.encoder.window} tokens through an encoder that learns."
    )


def _flops_per_sample(cfg: Config, whole: Mapping[str, Any]) -> float:
    """Returns the FLOPs of one example from a step that runs on one GPU."""
    return whole["flops"] / cfg.train.global_batch


def _peak_share(target: str, samples_per_second: float, flops: float) -> float:
    """Returns which share of the cards' bf16 peak a rate asks for."""
    wanted = gpus.parse(target)
    return flops * samples_per_second / wanted.devices / wanted.card.peak["bf16"]
