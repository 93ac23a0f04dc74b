"""Plans on disk, by what shapes them: runs that differ in seed, rates, steps or reports share one."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
from pathlib import Path
from typing import Any

import jax

from lw_jax import recipes
from lw_jax.core import config, precision, schema
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.files import content_hash, write_whole
from lw_jax.hub import sources
from lw_jax.planning.hardware import HERE
from lw_jax.planning.plans import StepPlan
from lw_jax.training import memory_limit

_log = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]


def path(cfg: Config, name: str) -> Path:
    """Returns the file of a plan: by target or `HERE`, the keys that shape it (`config.shape`), versions and code."""
    here = [*(device.device_kind for device in jax.devices()), jax.process_count(), str(memory_limit.local(cfg))]
    here.append(precision.resolve(cfg.compute.dtype, jax.devices()[0].platform))  # of a CPU by its processor
    key = [
        name,
        here if name == HERE else [],
        os.environ.get("XLA_FLAGS", ""),  # they may change what a program takes, an absent card's too
        config.shape(cfg),
        [cfg.encoder.texts, cfg.encoder.ratio] if cfg.encoder.kind == "cache" else [],  # its start's hours
        _shapes(cfg),  # a local folder may hold another model under the same name
        _versions(),
        code(),
    ]
    return sources.cache_root() / "plans" / f"{name}-{content_hash(key, size=8)}.json"


def read(file: Path) -> StepPlan | None:
    """Returns a cached plan; None where there is none or the file is damaged."""
    with contextlib.suppress(FileNotFoundError, UserError):
        return dataclasses.replace(schema.read(file, StepPlan, remedy=""), cached=True)
    return None


def decode(values: Any) -> StepPlan:
    return schema.convert(values, StepPlan, where="the first process's plan", remedy="all must run the same code")


def write(file: Path, plan: StepPlan) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(dataclasses.asdict(plan)))
    except OSError as error:  # a home that compute nodes only read, a quota: the plan is made
        _log.warning("%s: %s; the plan is made anew at each start, LW_JAX_CACHE names its folder", file, error.strerror)


def code() -> str:
    """Returns the hash of the program's source: another version may compile, measure or time a step otherwise."""
    digest = hashlib.sha256()
    for folder in ("lw_jax", "sharding"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _shapes(cfg: Config) -> list[str]:
    weights = recipes.outline(config.with_remat(cfg, "none")).abstract
    leaves = jax.tree_util.tree_leaves_with_path((weights.trainable, weights.frozen))
    return [f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}" for path, leaf in leaves]


def _versions() -> list[str]:
    names = ("jax", "jaxlib", *(f"jax-cuda{version}-plugin" for version in (12, 13)))
    return [f"{dist.name} {dist.version}" for name in names for dist in importlib.metadata.distributions(name=name)]
