"""Command `plan`: placement, memory and time of a configuration on given GPUs, compiled for them on any machine."""

import argparse
import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from lw_jax.benchmarking import timing
from lw_jax.commands.loading import Loaded
from lw_jax.core import runtime
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.planning import estimate as estimates
from lw_jax.planning import gpus, plan_tables, planner, simulation, start_plan, start_tables, workload
from lw_jax.slurm import cluster_profile
from lw_jax.training import preflight

NOTHING_FITS, VOID = 3, 2  # exit codes


@dataclasses.dataclass(frozen=True)
class Request:
    """Command line of `plan`."""

    config: str  # FILE[:recipe]; its name gives the default target
    target: str = ""
    simulate: str = ""  # "0..8": numbers of devices of the target's card
    estimate: bool = False  # arithmetic only
    as_json: bool = False
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # values of config.SEARCHED that the file sets


def run(args: argparse.Namespace, loaded: Loaded) -> int:
    """Runs the command with its flags."""
    request = Request(
        config=loaded.spec,
        target=args.target or "",
        simulate=args.simulate or "",
        estimate=args.estimate,
        as_json=args.json,
        own=loaded.own,
    )
    return main(loaded.cfg, resolved=loaded.resolved, workdir=loaded.workdir, request=request)


def main(cfg: Config, *, resolved: Mapping[str, Any], workdir: Path, request: Request) -> int:
    """Prints the plan of one target, or one line for each simulated number of devices; 3 when nothing fits."""
    del resolved, workdir
    runtime.start_devices()
    if not cfg.train.steps:
        return _start(cfg, request)
    if request.simulate:
        counts = parse_counts(request.simulate)
        card = gpus.parse(planner.resolve_target(request.target, config=request.config)).card
        plans = [planner.simulate(cfg, card, count, estimate=request.estimate) for count in counts]
        findings = planner.inspect(cfg)
        sizes = [one for one in plans if one["devices"]]
        fits = not sizes or any(one["chosen"] for one in sizes)
        code = _code(findings, fits=fits)
        if request.as_json:
            print(json.dumps([_with_findings(one, findings) for one in plans], indent=2))
            return code
        arithmetic = functools.partial(planner.make, estimate=True)
        guessed = any(one["devices"] and one["chosen"] and not one["compiled"] for one in plans)
        note = f"seconds: {estimates.ERROR}" if guessed else ""
        tables = [
            plan_tables.simulation_table(plans),
            note,
            simulation.text(cfg, plans, own=request.own, estimate=arithmetic),
        ]
        print("\n\n".join(filter(None, tables)))
        print("".join(f"{one}\n" for one in findings), end="")
        return code
    found = planner.make(cfg, _word(request), estimate=request.estimate)
    findings = [*planner.inspect(cfg), *cluster_profile.inspect(found, cfg.train)]
    if request.as_json:
        print(json.dumps(_with_findings(found, findings), indent=2))
    else:
        print(plan_tables.report(found, own=request.own))
        print("".join(f"{one}\n" for one in findings), end="")
    return _code(findings, fits=bool(found["chosen"]))


def _start(cfg: Config, request: Request) -> int:
    """Prints the plan of a run without steps; on a machine without GPUs and without a target that of its CPU."""
    if request.simulate:
        rule = "config.train.steps = 0 has no step to compare; leave it out, a --target at a time"
        raise UserError(f"--simulate {request.simulate}: {rule}")
    if request.target or jax.default_backend() == "gpu":
        word = planner.resolve_target(request.target, config=request.config) if request.target else _this_card()
        found = start_plan.of_target(cfg, word, estimate=request.estimate)
    else:
        found = start_plan.of_cpu(cfg, _measure_cpu(workload.arithmetic(cfg, "cpu")))
    print(json.dumps(dataclasses.asdict(found), indent=2) if request.as_json else start_tables.report(found))
    return 0 if found.chosen else NOTHING_FITS


def _measure_cpu(dtype: str) -> start_plan.Speed:
    """Returns what products of this machine's CPU reach; `dtype`: of the readers' products."""
    found = {one: timing.ceilings(one, repeats=3) for one in dict.fromkeys((dtype, "float32"))}
    own = found["float32"]
    return start_plan.Speed({one: each.matmul for one, each in found.items()}, own.matmul, own.bandwidth)


def _this_card() -> str:
    card = gpus.of_device(jax.local_devices()[0])
    if card is None:
        raise UserError("plan: this machine's card is not in the table of cards; name one with --target, as h100x1")
    return f"{card.name}x{jax.device_count()}"


def _with_findings(found: planner.Plan, findings: Sequence[preflight.Finding]) -> planner.Plan:
    return found | {"findings": [dataclasses.asdict(one) for one in findings]}


def _code(findings: Sequence[preflight.Finding], *, fits: bool) -> int:
    if any(one.severity == "error" for one in findings):
        return VOID
    return 0 if fits else NOTHING_FITS


def _word(request: Request) -> str:
    """Returns the target's word; empty where the machine's own GPUs are meant."""
    if not request.target and not request.estimate and jax.default_backend() == "gpu":
        return ""  # planned by compiling, which an estimate is not
    return planner.resolve_target(request.target, config=request.config)


def parse_counts(text: str) -> list[int]:
    """Returns the numbers of "0..8" or "1,2,4"."""
    span = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if span and int(span[1]) <= int(span[2]) <= gpus.PER_HOST:
        return list(range(int(span[1]), int(span[2]) + 1))
    if re.fullmatch(r"\d+(,\d+)*", text) and max(map(int, text.split(","))) <= gpus.PER_HOST:
        return [int(word) for word in text.split(",")]
    raise UserError(f"--simulate {text}: write FIRST..LAST or a list, as 0..8 or 1,2,4; up to {gpus.PER_HOST}.")
