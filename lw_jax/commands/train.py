"""`run.py train`: train a configuration, or resume its run."""

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax

from lw_jax import recipes
from lw_jax.commands.loading import Loaded
from lw_jax.core import processes, runtime, tree
from lw_jax.core.command_line import PROGRAM
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.progress import phase
from lw_jax.hub import sources
from lw_jax.planning import gpus, hardware, planner
from lw_jax.recipes import selfmade
from lw_jax.recipes.cache_wire import CacheWire
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.training import hardware_record, preflight, run_folder, sinks
from lw_jax.training.checkpoint import Checkpointer
from lw_jax.training.memory import bytes_of
from lw_jax.training.recipe import Recipe
from lw_jax.training.trainer import Run

KEEP = 2  # newest checkpoints, beside the best by validation


@processes.Together()
def run(_: argparse.Namespace, loaded: Loaded) -> int:
    # Before anything that may refuse, as a process that ends alone leaves the others waiting to join; the devices after
    # the folder, as those of a run that has it are in use.
    runtime.start(devices=False)
    sinks.check_installed(loaded.cfg)
    record = functools.partial(
        run_folder.write_workdir,
        loaded.workdir,
        cfg=loaded.cfg,
        base=loaded.defaults,
        command=(PROGRAM.removeprefix("python "), *sys.argv[1:]),
    )
    processes.from_first(lambda: _take_folder(loaded, record))
    return main(loaded.cfg, loaded.workdir, record)


def _take_folder(loaded: Loaded, record: Callable[[], None]) -> None:
    run_folder.lock(loaded.workdir)
    run_folder.check_run(loaded.cfg, loaded.workdir)
    if not run_folder.has_trained(loaded.workdir):
        record()


def main(cfg: Config, workdir: Path, record: Callable[[], None] = lambda: None) -> int:
    """Trains until `train.steps`, or saves and returns `runtime.REQUEUE` when asked to stop.

    `record` writes what the run is into its folder, once it is known to take a step there.
    """
    runtime.start_devices()
    runtime.enable_compile_cache(sources.cache_root() / "compiled")
    # An impossible schedule and a missing file are refused before minutes of making readers or fetching models.
    preflight.refuse(preflight.inspect(cfg, None))
    if absent := preflight.missing_data(cfg):
        raise UserError("; ".join(absent))
    hardware.check_processes(cfg, jax.device_count(), jax.process_count())
    if jax.process_index():
        return _train(cfg, workdir, None, record)
    services = sinks.Services(cfg, workdir)  # before minutes of making readers and reading weights
    code = 1  # of an exception
    try:
        code = _train(cfg, workdir, services, record)
    finally:
        _print_lines(services.close(code))
    return code


def _print_lines(lines: Iterable[object]) -> None:
    print("".join(f"{line}\n" for line in lines), end="", flush=True)


def _describe_models(cfg: Config, recipe: Recipe) -> Iterator[str]:
    frozen = recipe.abstract.frozen
    for name, llm in cfg.llms.items():
        yield f"{name}: {llm.source}, frozen, {bytes_of(tree.nbytes(frozen[name]))} ({llm.weights})"
    if isinstance(recipe, LatentWire):
        origin = f"of the run {cfg.encoder.run}, frozen" if cfg.encoder.run else cfg.encoder.source or "from scratch"
        yield f"encoder: {origin}; a message has at most {cfg.encoder.slots} latents of {cfg.encoder.width} values"


def _train(cfg: Config, workdir: Path, services: sinks.Services | None, record: Callable[[], None]) -> int:
    first = jax.process_index() == 0
    if first:
        print(runtime.device_line(), flush=True)
    selfmade.make_readers(cfg)
    cfg, placement = planner.resolve_auto(cfg, reading=not cfg.train.steps)
    if first:
        print(f"precision: {planner.precision(cfg)}", flush=True)
        if jax.device_count() > 1:
            print(placement.describe(), flush=True)
    recipe = recipes.make(cfg, placement) if cfg.train.steps else CacheWire(cfg, placement)
    if first:
        _print_lines(_describe_models(cfg, recipe))
    with phase("reading and tokenising the data"):  # both ask for all of it; the recipe keeps it
        findings = preflight.inspect(cfg, recipe)
        preflight.refuse(findings)
        if first:
            _print_lines(findings)
        identity = recipes.identity(recipe, cfg)
        processes.check_agreement(identity)

    def record_hardware(step: int, micro_batch: int) -> None:
        card = gpus.of_all_devices()
        name = card.name if card else ""
        hardware_record.write(workdir, cfg, placement, card=name, micro_batch=micro_batch, step=step)

    def begin(step: int, micro_batch: int = 0) -> None:
        if first:  # a start that is refused, or finds the run finished, changes no record of it
            record()
            record_hardware(step, micro_batch)

    with Checkpointer(workdir / "checkpoints", keep=KEEP, identity=identity) as checkpointer:
        if not cfg.train.steps:
            return _save_start(recipe, checkpointer, workdir, begin)
        training = Run(cfg, recipe, checkpointer, workdir, services)
        training.prepare()  # until here a signal ends the process at once (`process_start`): there is nothing to save
        if services:  # of the first process
            anew = ["no checkpoint to resume from: the run begins anew, and the rows of its log are replaced"]
            is_anew = not training.first_step and run_folder.has_trained(workdir)
            _print_lines([*anew * is_anew, *services.resume()])
        if training.first_step < cfg.train.steps:
            begin(training.first_step, training.micro_batch)
        with runtime.Preemption() as preemption:
            return training.train(preemption.requested, halved=record_hardware)


def _save_start(recipe: Recipe, checkpointer: Checkpointer, workdir: Path, begin: Callable[[int], None]) -> int:
    """Saves the start of a run without steps as its only checkpoint, unless the folder has it."""
    if checkpointer.restore({"trainable": recipe.placed().trainable}) is None:
        begin(0)
        checkpointer.save(0, {"trainable": recipe.build().trainable}, data={}, wait=True)
    print(f"{workdir}: finished, nothing is trained; {PROGRAM} eval --workdir {workdir} measures it", flush=True)
    return 0
