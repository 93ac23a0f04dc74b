"""E0, the proof that latents carry information: key-value cards, two readers trained here, every control, every bit.

Nothing is downloaded. The numbers that this run gave stand in docs/experiments.md.
"""

import json

import pytest

from configs import pairs
from lw_jax.core import config, tree
from lw_jax.recipes.latentwire import LatentWire
from sharding import placement
from tests.smoke.test_commands import start

VALUES = 30  # of each key: the best guess without the card
CHANCE = 1 / VALUES
COLLAPSED, NO_GAP = 0.60, 0.30  # below these the wire does not work at all
TEXT, LATENTS, ABOVE_CHANCE = 0.99, 0.95, 0.05
INT4_LOSS = 0.02
PARAMETERS = 1_000_000

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def proof(tmp_path_factory) -> dict:
    """Trains and evaluates configs/pairs.py as a user would; returns eval.json."""
    workdir = tmp_path_factory.mktemp("proof") / "run"
    flags = ["--config.eval.examples=192", "--config.eval.curve=f1", "--config.eval.curve_examples=96"]
    for words in (["--config", "configs/pairs.py"], ["eval", *flags]):
        done = start(*words, "--workdir", str(workdir), cwd=workdir.parent)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((workdir / "eval.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("reader", ["llama", "qwen"])
def test_latents_carry_the_text_and_another_text_does_not(proof, reader):
    rows = {row: values["em"] for row, values in proof["rows"][reader].items()}
    assert rows["latents"] >= COLLAPSED and rows["latents"] - rows["shuffled"] >= NO_GAP, f"COLLAPSED: {rows}"
    assert rows["text"] >= TEXT, rows
    assert rows["latents"] >= LATENTS, rows
    assert max(rows["shuffled"], rows["zero"], rows["none"]) <= CHANCE + ABOVE_CHANCE, rows


@pytest.mark.parametrize("reader", ["llama", "qwen"])
def test_latents_survive_quantisation(proof, reader):
    points = [point for point in proof["curve"]["points"] if point["reader"] == reader]
    em = {point["bits"]: point["em"] for point in points}
    assert em.keys() == {16, 8, 6, 4, 2}
    assert em[8] >= em[16], em
    assert em[4] >= em[16] - INT4_LOSS, em
    sizes = [point["framed_bytes"] for point in sorted(points, key=lambda point: -point["bits"])]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0] / 6


def test_encoder_is_small():
    cfg = config.build(pairs.get_config())
    recipe = LatentWire(cfg, placement.place("single", dict.fromkeys(cfg.llms, 1)), outline=True)
    assert tree.count(recipe.abstract().trainable["encoder"]) <= PARAMETERS
