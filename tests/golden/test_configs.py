"""Every configuration file resolves, is valid and is what it was; UPDATE_GOLDEN=1 writes `configs.txt` anew.

One file has the defaults and, of every configuration, what differs from its recipe's, or from the configuration that it
varies: a changed default or parent file shows once, a changed value where it is set.
"""

import dataclasses
import os
from pathlib import Path

from lw_jax.core import config, config_file, validation

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).resolve().parent / "configs.txt"
NOT_CONFIGURATIONS = {"__init__", "base", "models", "common"}
SPECS = sorted(
    file.relative_to(ROOT / "configs").as_posix().removesuffix(".py")
    for file in (ROOT / "configs").rglob("*.py")
    if file.stem not in NOT_CONFIGURATIONS
)
SEEDS = [f"{spec}:seed" for spec in SPECS if spec.startswith("dpo/") and spec != "dpo/smollm2"]
# What a configuration is told as a variation of; a seed's varies that of today.
VARIED = {"h100x4": "large", "machines/a100_40x1": "large", "pair_8b": "pair", "pairs_join": "pairs"}
VARIED |= {"pairs_one": "pairs", "pairs": "smoke", "cache_smoke": "smoke"} | {
    spec: spec.partition(":")[0] for spec in SEEDS
}
VARIED |= {spec: "dpo/llama3" for spec in SPECS if spec.startswith("dpo/") and spec != "dpo/llama3"}
VARIED |= {spec: "ttt/ttt_125m" for spec in SPECS if spec.startswith("ttt/") and spec != "ttt/ttt_125m"}


def _build(spec: str) -> config.Config:
    file, _, variant = spec.partition(":")
    cfg = config.build(config_file.load(f"configs/{file}.py{variant and f':{variant}'}", root=ROOT))
    validation.validate(cfg)
    return cfg


def test_configurations_are_unchanged() -> None:
    reader = dataclasses.asdict(config.LLM(""))
    defaults = config.flatten(config.defaults("") | {"llms": {"NAME": reader}})
    sections = {"defaults": [f"{path} = {value!r}" for path, value in defaults.items()]}
    built = {spec: _build(spec) for spec in (*SPECS, *SEEDS)}
    for spec, cfg in built.items():
        varied = VARIED.get(spec)
        before = config.to_dict(built[varied]) if varied else config.defaults(cfg.recipe)
        before["llms"] = dict.fromkeys(cfg.llms, reader) | before["llms"]
        sections[f"{spec} varies {varied}" if varied else spec] = config.diff(before, config.to_dict(cfg))
    text = "\n".join(f"[{name}]\n" + "".join(f"{line}\n" for line in lines) for name, lines in sections.items())
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8"), "changed on purpose? make golden, and say why in the commit"
