"""Our training step against PyTorch's, by turns on this machine: same models, same batch, same loss, checked first.

    python benchmarks/peer.py --config configs/default.py
    python benchmarks/peer.py --config configs/large.py --config.train.global_batch=64 --json peer.json

The other side is benchmarks/torch_wire.py (transformers, SDPA, soft prefix by inputs_embeds) for a wire and
benchmarks/torch_dpo.py (TRL's own trainer) for preference tuning. First both compute the loss and the gradient's norm
of one ragged batch in fp32, with equal weights and every model cut to --check-layers; they must agree to 1e-3, else
code 1. Then each side, in a process of its own and with random weights at full depth, takes steps, in --rounds turns;
on the GPU where there is one. Needs requirements-dev.txt; fetches nothing.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks import common
from lw_jax.core import command_line, environment
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError, leave

AGREE = 1e-3  # relative difference of losses and of gradients' norms, both fp32
OTHERS = {"latentwire": "torch_wire.py", "dpo": "torch_dpo.py"}
SEED = 0

Told = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Checks, times and prints; 1 where the two sides do not compute the same."""
    assignments, rest = command_line.take_assignments(list(sys.argv[1:] if argv is None else argv))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE", help="--config.key=value goes with it")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (default: 3)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a turn (default: 5)")
    parser.add_argument("--check-layers", type=int, default=2, help="of each model in the check (default: 2)")
    parser.add_argument("--compile", action="store_true", help="the other side through torch.compile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also written here")
    parser.add_argument("--only", choices=("write", "check", "time"), help=argparse.SUPPRESS)  # a child of ours
    parser.add_argument("--case", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(rest)
    if args.only:
        environment.reserve_memory()
        environment.hide_idle_cuda()
        print(json.dumps(child(args, settle(args.config, assignments))))
        return 0
    cfg = settle(args.config, assignments)
    other = str(common.ROOT / "benchmarks" / OTHERS[cfg.recipe])
    words = [__file__, "--config", args.config, *common.flags(assignments)]
    words += ["--check-layers", str(args.check_layers)]
    with tempfile.TemporaryDirectory() as folder:
        case = Path(folder)
        device = common.child([*words, "--only", "write", "--case", folder])["device"]
        ours = common.child([*words, "--only", "check", "--case", folder])
        theirs = common.child([other, str(case / "check"), "--device", device, "--steps", "1", "--check"])
        found: Told = {"config": args.config, "assignments": dict(assignments), "device": device}
        found["check"] = {"ours": ours, "theirs": theirs, "layers": args.check_layers}
        if not agree(ours, theirs):
            print(json.dumps(found, indent=2))
            print("error: the two sides do not compute the same; nothing is timed", file=sys.stderr)
            return 1
        timed: dict[str, list[Told]] = {"ours": [], "theirs": []}
        more = ["--compile"] if args.compile else []
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds} ...", file=sys.stderr, flush=True)
            timed["ours"].append(common.child([*words, "--only", "time", "--case", folder, "--steps", str(args.steps)]))
            own = [other, str(case / "full"), "--device", device, "--steps", str(args.steps)]
            timed["theirs"].append(common.child([*own, *more]))
    found |= timed | {"ratio": ratio(timed)}
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    print(table(cfg, found))
    return 0


def settle(spec: str, assignments: Mapping[str, str]) -> Config:
    """Returns the configuration as the other side can follow it: one device, nothing automatic, steps by AdamW."""
    cfg = common.load(spec, assignments)
    if cfg.recipe not in OTHERS:
        raise UserError(f"--config {spec}: recipe {cfg.recipe!r} has no peer here; {', '.join(OTHERS)} have")
    if cfg.recipe == "latentwire" and (cfg.encoder.kind, cfg.encoder.pooling) != ("lm", "windows"):
        raise UserError("config.encoder: the peer has a pretrained decoder body and window pooling; take those")
    remat = "none" if cfg.compute.remat == "auto" else cfg.compute.remat
    train = dataclasses.replace(cfg.train, micro_batch=0)
    compute, optim = dataclasses.replace(cfg.compute, remat=remat), dataclasses.replace(cfg.optim, kind="adamw")
    return dataclasses.replace(cfg, train=train, compute=compute, optim=optim)


def agree(ours: Mapping[str, float], theirs: Mapping[str, float]) -> bool:
    """Says whether loss and gradient's norm are the same on both sides."""
    return all(abs(ours[key] / theirs[key] - 1) < AGREE for key in ("loss", "grad_norm"))


def ratio(timed: Mapping[str, Sequence[Told]]) -> Told:
    """Returns how much longer the other side's median step takes, over all turns and in each pair of them."""
    medians = {side: [one["median"] for one in turns] for side, turns in timed.items()}
    pairs = [theirs / ours for ours, theirs in zip(medians["ours"], medians["theirs"], strict=True)]
    whole = statistics.median(medians["theirs"]) / statistics.median(medians["ours"])
    return {"median": whole, "least": min(pairs), "most": max(pairs)}


def table(cfg: Config, found: Told) -> str:
    """Returns the comparison for people."""
    check = found["check"]
    lines = [
        f"{cfg.recipe}, batch {cfg.train.global_batch}, remat {cfg.compute.remat}, on {found['ours'][0]['device']}",
        f"check, {check['layers']} layers, fp32: loss {check['ours']['loss']:.6f} and {check['theirs']['loss']:.6f}, "
        f"gradient {check['ours']['grad_norm']:.6f} and {check['theirs']['grad_norm']:.6f}",
        "",
        f"{'':<8}{'s/step':>10}{'least..most':>20}{'first step s':>14}{'peak GB':>9}",
    ]
    for side in ("ours", "theirs"):
        turns = found[side]
        every = [second for one in turns for second in one["seconds"]]
        peaks = [one["peak_bytes"] for one in turns if one["peak_bytes"]]
        peak = f"{max(peaks) / 1e9:.2f}" if peaks else "-"
        lines.append(
            f"{side:<8}{statistics.median(one['median'] for one in turns):>10.4f}"
            f"{f'{min(every):.4f}..{max(every):.4f}':>20}{turns[0]['first_seconds']:>14.1f}{peak:>9}"
        )
    told = found["ratio"]
    lines.append(f"theirs / ours: {told['median']:.2f} (turn by turn {told['least']:.2f}..{told['most']:.2f})")
    return "\n".join(lines)


# --- our side


def child(args: argparse.Namespace, cfg: Config) -> Told:
    """Does one of our own parts in this process."""
    import jax

    if args.only == "write":
        write(cfg, args.case / "full")
        own = cut(cfg, args.case / "check", args.check_layers)
        write(own, args.case / "check", origin=cfg, layers=args.check_layers)
        return {"device": "cuda" if jax.default_backend() == "gpu" else "cpu"}
    if args.only == "time":
        return take(cfg, args.case / "full", steps=args.steps)
    with jax.default_matmul_precision("highest"):
        return take(cut(cfg, args.case / "check", args.check_layers), args.case / "check", steps=0)


def cut(cfg: Config, case: Path, layers: int) -> Config:
    """Returns the same run in fp32 over the cut models that `write` puts into a folder."""
    llms = {
        name: dataclasses.replace(llm, source=str(case / name), sha256="", weights="fp32")
        for name, llm in cfg.llms.items()
    }
    encoder = dataclasses.replace(cfg.encoder, source=str(case / "body"), sha256="", layers=layers)
    compute = dataclasses.replace(cfg.compute, dtype="fp32")
    return dataclasses.replace(
        cfg, llms=llms, encoder=encoder if cfg.recipe == "latentwire" else cfg.encoder, compute=compute
    )


def write(cfg: Config, case: Path, *, origin: Config | None = None, layers: int = 0) -> None:
    """Writes what the other side needs; for a configuration cut from `origin` to so many layers, weights as well."""
    import jax

    from lw_jax import recipes
    from lw_jax.hub import families, peft, weights
    from lw_jax.models import decoder

    for number, (name, shapes) in enumerate(models(origin or cfg).items()):
        kind = "qwen2" if shapes.qkv_bias else "llama"
        (case / name).mkdir(parents=True)
        if origin is None:
            (case / name / "config.json").write_text(json.dumps(families.hf_fields(shapes, kind)), "utf-8")
            continue
        own = dataclasses.replace(shapes, layers=min(layers, shapes.layers))
        draw = jax.jit(functools.partial(decoder.init, cfg=own, dtype="float32"))
        weights.save(case / name, draw(jax.random.key(number)), own, model_type=kind)
    recipe: Any = recipes.outline(cfg)
    np.savez(case / "batch.npz", allow_pickle=False, **flatten(ragged(cfg, recipe.batch_widths())))
    (case / "spec.json").write_text(json.dumps(facts(cfg)), "utf-8")
    if origin is None:
        return
    learns = trainable(cfg, recipe)
    if cfg.recipe == "dpo":
        peft.save(case / "adapter", learns, recipe.lora, model_type="llama", base="")
        return
    stored = {path: x for path, x in flatten(learns).items() if "encoder/body/" not in path}
    np.savez(case / "trainable.npz", allow_pickle=False, **stored)


def models(cfg: Config) -> dict[str, Any]:
    """Returns the shapes of the readers and, of a wire, of the encoder's body."""
    from lw_jax.recipes import frozen_models

    found = {name: frozen_models.outline(cfg, llm.source) for name, llm in cfg.llms.items()}
    if cfg.recipe == "latentwire":
        body = frozen_models.outline(cfg, cfg.encoder.source)
        found["body"] = dataclasses.replace(body, layers=cfg.encoder.layers or body.layers, tied=True)
    return found


def facts(cfg: Config) -> Told:
    """Returns what the other side must know beside shapes."""
    from lw_jax.core.types import TASKS, reader_dtype

    (dtype,) = {reader_dtype(llm.weights, cfg.compute.dtype) for llm in cfg.llms.values()}
    told = {"dtype": dtype, "readers": list(cfg.llms), "remat": cfg.compute.remat}
    told |= {"lora": dataclasses.asdict(cfg.lora), "dpo": dataclasses.asdict(cfg.dpo)}
    told |= {"slots": cfg.encoder.slots, "width": cfg.encoder.width, "hidden": cfg.adapter.hidden}
    return told | {"tasks": len(TASKS), "task": TASKS.index("answer"), "body_learns": cfg.encoder.rate > 0}


def flatten(tree: Any) -> dict[str, np.ndarray]:
    """Returns a tree's arrays by path, those of a reader under its name."""
    import jax

    from sharding.rules import path_of

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_of(path).removeprefix("readers/"): np.asarray(leaf) for path, leaf in leaves}


def trainable(cfg: Config, recipe: Any) -> Any:
    """Returns what learns, equal in every process; the second matrices of LoRA pairs are not 0, so that they count."""
    import jax

    from lw_jax.recipes import encoder_bodies

    if cfg.recipe == "dpo":
        shapes = recipe.abstract().trainable
        rng = np.random.default_rng(SEED)
        return jax.tree.map(lambda x: rng.normal(0, 0.02, x.shape).astype(x.dtype), shapes)
    body = encoder_bodies.BODIES["lm"].load(Path(cfg.encoder.source), cfg.encoder.layers)
    sizes = dict.fromkeys(cfg.llms, np.float32(0.02))
    return jax.jit(recipe.wire.init)(jax.random.key(SEED), body=body, embedding_rms=sizes)


def take(cfg: Config, case: Path, *, steps: int) -> Told:
    """Takes one step on the stored weights (`steps` 0), or so many timed ones on random weights."""
    import jax

    from lw_jax import recipes
    from lw_jax.benchmarking import timing
    from lw_jax.core import runtime
    from lw_jax.recipes import frozen_models
    from lw_jax.training.step_spec import StepSpec
    from sharding import place

    recipe = recipes.outline(cfg)
    program, placed = StepSpec(cfg, recipe), recipe.placement
    now: Told = {"state": timing.fill(program.state())}
    if steps:
        frozen = timing.fill(program.frozen())
    else:
        at = recipe.shardings().frozen
        frozen = {
            name: frozen_models.load(case / name, cfg, llm, at[name], placed.platform) for name, llm in cfg.llms.items()
        }
        now["state"]["trainable"] = jax.device_put(trainable(cfg, recipe), recipe.shardings().trainable)
    batch = ragged(cfg, recipe.batch_widths())
    batch = place.put_parts(batch, placed, functools.partial(place.put_batch, accumulation=1))

    def step() -> Told:
        now["state"], now["values"] = program.step(now["state"], frozen, batch)
        return now

    seconds = timing.repeat(step, repeats=steps + 2 if steps else 1, warmup=0)
    told: Told = {"device": runtime.describe(), "jax": jax.__version__, "first_seconds": seconds[0]}
    if not steps:
        return told | {key: float(now["values"][key]) for key in ("loss", "grad_norm")}
    timed = seconds[2:]
    return told | {"seconds": timed, "median": statistics.median(timed), "peak_bytes": timing.peak_bytes()}


def ragged(cfg: Config, widths: Any) -> Any:
    """Returns a batch of random tokens in rows of random lengths, padded as ours are; equal in every process."""
    from lw_jax.core.types import EXACT

    rng, rows = np.random.default_rng(SEED), cfg.train.global_batch
    whole = np.tile(np.array([cfg.encoder.slots, cfg.encoder.width, EXACT], np.int32), (rows, 1))

    def tokens(shape: tuple[int, ...], *, left: bool) -> tuple[np.ndarray, np.ndarray]:
        width, at = shape[-1], np.arange(shape[-1])
        real = rng.integers((width + 1) // 2, width + 1, (rows, *shape[:-1]))[..., None]
        mask = at >= width - real if left else at < real
        return rng.integers(1, 256, (rows, *shape), np.int32) * mask, mask

    def fill(node: Any, name: str) -> Any:
        if not isinstance(node, dict):
            return (
                whole
                if name == "channel"
                else np.ones((rows, *node.shape), node.dtype)
                if hasattr(node, "shape")
                else node
            )
        made = {key: fill(value, key) for key, value in node.items()}
        if "mask" in node:
            made["ids"], made["mask"] = tokens(node["ids"].shape, left=name in ("before", "after"))
        if name == "before":  # the same words in every row, as a prompt's opening is
            made |= {key: np.repeat(made[key][:1], rows, axis=0) for key in ("ids", "mask")}
        if "completion" in node:  # of a pair: what follows the prompt, a quarter of the longest row
            made["completion"] = made["mask"] & (np.arange(node["ids"].shape[-1]) >= node["ids"].shape[-1] // 4)
        if "targets" in node:
            made["targets"], real = tokens(node["targets"].shape, left=False)
            made["answer_inputs"], made["weights"] = made["targets"][:, :-1], real.astype(np.float32)
        return made

    return fill(widths, "")


if __name__ == "__main__":
    leave(main)
