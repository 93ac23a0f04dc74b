"""Command `plan`: placement, memory and time of a configuration on given GPUs, compiled for them on any machine."""

import argparse
import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

import jax

from lw_jax.benchmarking import timing
from lw_jax.commands.loading import Loaded
from lw_jax.core import runtime
from lw_jax.core.errors import UserError
from lw_jax.planning import estimate as estimates
from lw_jax.planning import gpus, plan_tables, planner, simulation, start_plan, workload
from lw_jax.planning.plans import Plan
from lw_jax.planning.roofline import Speed
from lw_jax.slurm import cluster_profile
from lw_jax.training import preflight

NOTHING_FITS, VOID = 3, 2  # exit codes


def run(args: argparse.Namespace, loaded: Loaded) -> int:
    """Prints the plan of one target, or one line for each simulated number of devices; 3 when nothing fits."""
    runtime.start_devices()
    if args.simulate:
        return _simulate(args, loaded)
    plan = _make(args, loaded)
    findings = [*planner.inspect(loaded.cfg), *cluster_profile.inspect(plan, loaded.cfg.train)]
    if args.json:
        print(json.dumps(_with_findings(plan, findings), indent=2))
    else:
        print("\n".join([plan_tables.report(plan, own=loaded.own), *map(str, findings)]))
    return _code(findings, fits=plan.chosen is not None)


def _simulate(args: argparse.Namespace, loaded: Loaded) -> int:
    cfg = loaded.cfg
    if not cfg.train.steps:
        rule = "config.train.steps = 0 has no step to compare; leave it out, a --target at a time"
        raise UserError(f"--simulate {args.simulate}: {rule}")
    counts = parse_counts(args.simulate)
    card = gpus.parse(planner.resolve_target(args.target or "", config=loaded.spec)).card
    plans = [planner.simulate(cfg, card, count, estimate=args.estimate) for count in counts]
    findings, sizes = planner.inspect(cfg), [plan for plan in plans if plan.devices]
    if args.json:
        print(json.dumps([_with_findings(plan, findings) for plan in plans], indent=2))
    else:
        guessed = any(plan.chosen and not plan.compiled for plan in sizes)
        tables = [
            plan_tables.simulation_table(plans),
            f"seconds: {estimates.ERROR}" if guessed else "",
            simulation.text(cfg, plans, own=loaded.own, estimate=functools.partial(planner.make, estimate=True)),
        ]
        print("\n".join(["\n\n".join(filter(None, tables)), *map(str, findings)]))
    return _code(findings, fits=not sizes or any(plan.chosen for plan in sizes))


def _make(args: argparse.Namespace, loaded: Loaded) -> Plan:
    """Returns the plan of the target, else of this machine's own GPUs; without either of the configuration's card.

    A run without steps, on a machine without GPUs, is planned for its CPU.
    """
    cfg, target = loaded.cfg, args.target or ""
    on_gpu = not target and jax.default_backend() == "gpu"
    if not cfg.train.steps and not target and not on_gpu:
        measured = {
            name: timing.ceilings(name, repeats=3)
            for name in dict.fromkeys((workload.arithmetic(cfg, "cpu"), "float32"))
        }
        speeds, fp32 = {name: ceilings.matmul for name, ceilings in measured.items()}, measured["float32"]
        return start_plan.of_cpu(cfg, Speed(speeds, fp32.matmul, fp32.bandwidth))
    if not on_gpu or (args.estimate and cfg.train.steps):  # the machine's own step is planned by compiling
        target = planner.resolve_target(target, config=loaded.spec)
    return planner.plan_run(cfg, target, estimate=args.estimate)


def _with_findings(plan: Plan, findings: Sequence[preflight.Finding]) -> dict[str, Any]:
    return dataclasses.asdict(plan) | {"findings": [dataclasses.asdict(finding) for finding in findings]}


def _code(findings: Sequence[preflight.Finding], *, fits: bool) -> int:
    if any(finding.severity == "error" for finding in findings):
        return VOID
    return 0 if fits else NOTHING_FITS


def parse_counts(text: str) -> list[int]:
    """Returns the numbers of "0..8" or "1,2,4"."""
    span = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if span and int(span[1]) <= int(span[2]) <= gpus.PER_HOST:
        return list(range(int(span[1]), int(span[2]) + 1))
    if re.fullmatch(r"\d+(,\d+)*", text) and max(map(int, text.split(","))) <= gpus.PER_HOST:
        return [int(word) for word in text.split(",")]
    raise UserError(f"--simulate {text}: write FIRST..LAST or a list, as 0..8 or 1,2,4; up to {gpus.PER_HOST}.")
