"""Every strategy gives the loss curve of one device; what cannot be placed is refused by name."""

import jax
import numpy as np
import pytest

from lw_jax.inference import evaluation
from lw_jax.training import run_folder, trainer
from sharding.errors import PlacementError
from tests import tiny

GRADIENT = 1e-4  # relative; the norm of summed squares
SCORES = 1e-5  # relative, fp32 sums of one forward pass

TEXT, QUESTION = "Mara Ellis lives in Lisbon.", "Where does Mara Ellis live?"
ROWS = ("text", "latents", "shuffled", "zero")

PLACED = {
    "data 2 accumulate 2": {"devices": 2, "train__micro_batch": 2},
    "fsdp 4 accumulate 2, remat full": {
        **{"devices": 4, "strategy": "fsdp", "train__micro_batch": 1},
        "compute__remat": "full",
    },
    "data 2 x tensor 4, logits of a row of each at once": {
        **{"devices": 8, "model": 4, "strategy": "tensor"},
        "compute__logits_chunk": 1,
    },
    "replicate 7, three of them with filling alone": {"devices": 7},
    "data 3 x tensor 2 accumulate 2": {"devices": 6, "model": 2, "strategy": "tensor", "train__micro_batch": 2},
    "hybrid3 accumulate 3": {"devices": 3, "strategy": "hybrid3", "train__micro_batch": 3},
    "split 8 over pairs accumulate 2": {"devices": 8, "strategy": "split", "model": 2, "train__micro_batch": 2},
    "hybrid4 of 8": {"devices": 8, "strategy": "hybrid4"},
}
FILLED = ("replicate 7, three of them with filling alone", "data 3 x tensor 2 accumulate 2", "hybrid3 accumulate 3")
QUICK = "data 2 accumulate 2"  # in `make test`


def series(folder, name: str = "loss") -> list[float]:
    return [row[f"train/{name}"] for row in run_folder.read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one != QUICK)) for one in PLACED])
def test_every_placement_gives_the_curve_and_the_values_of_one_device(name, root, single, tmp_path, capsys):
    *wanted, folder = single
    found = tiny.unsaved_curve(tiny.make_recipe(root, **PLACED[name]), tmp_path / "run")
    (batch,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("global batch 8 = "))
    assert ("padding rows" in batch) == (name in FILLED)
    tiny.assert_same_curve(found, wanted)
    assert found[1][-1] < found[1][0]
    ours, theirs = (run_folder.read_metrics(folder / "metrics.jsonl") for folder in (tmp_path / "run", folder))
    assert len(ours) == len(theirs) == 6
    for row, wanted in zip(ours, theirs, strict=True):
        assert row.keys() == wanted.keys()
        for key in ("train/grad_norm", "train/accuracy/llama", "train/nll/llama", "train/nll/qwen"):
            np.testing.assert_allclose(row[key], wanted[key], rtol=GRADIENT, err_msg=key)


@pytest.mark.slow
def test_kl_and_a_pretrained_encoder_with_aligned_start_are_the_same_where_readers_lie_apart(root, tmp_path):
    changes = {
        "loss__kl": 50.0,  # of a KL near 0.02 nats, so that the objective shows it
        "encoder__kind": "lm",
        "encoder__source": str(tiny.readers(root)["llama"]),
        "encoder__layers": 1,
        "adapter__start": "aligned",
        "train__steps": 4,
    }
    apart = {"devices": 3, "strategy": "hybrid3", "train__micro_batch": 4}
    tiny.unsaved_curve(tiny.make_recipe(root, **changes), tmp_path / "alone")
    tiny.unsaved_curve(tiny.make_recipe(root, **apart, **changes), tmp_path / "apart")
    for name in ("loss", "kl/llama", "kl/qwen"):
        np.testing.assert_allclose(series(tmp_path / "apart", name), series(tmp_path / "alone", name), rtol=tiny.LOSS)
    first = run_folder.read_metrics(tmp_path / "alone" / "metrics.jsonl")[0]
    assert first["train/kl/llama"] > 0 and first["train/kl/qwen"] > 0
    nll = [first[f"train/nll/{name}"] for name in ("llama", "qwen")]
    assert first["train/loss"] > max(nll), "the KL must be part of the objective"


@pytest.fixture(scope="module")
def thirds(tmp_path_factory):
    """Readers whose ffn and embeddings divide by three, while 4 and 8 heads do not."""
    qwen = tiny.write_reader(tmp_path_factory.mktemp("thirds") / "qwen", "qwen2", width=54, ffn=90)
    return {"train__global_batch": 6, "llms__qwen__source": str(qwen)}


@pytest.fixture(scope="module")
def curve_of_thirds(root, thirds, tmp_path_factory):
    return tiny.unsaved_curve(tiny.make_recipe(root, **thirds), tmp_path_factory.mktemp("thirds") / "run")


@pytest.mark.slow
def test_heads_that_do_not_divide_stay_whole_and_the_curve_is_the_same(root, thirds, curve_of_thirds, tmp_path):
    for devices in (3, 6):
        recipe = tiny.make_recipe(root, devices=devices, model=3, strategy="tensor", **thirds)
        for name in ("llama", "qwen"):
            layers = recipe.shardings.frozen[name]["layers"]
            assert all(layers[leaf].is_fully_replicated for leaf in ("q", "k", "v", "o"))
            assert not any(layers[leaf].is_fully_replicated for leaf in ("gate", "up", "down"))
    tiny.assert_same_curve(tiny.unsaved_curve(recipe, tmp_path / "run"), curve_of_thirds)


def test_ffn_that_does_not_divide_is_refused_with_its_path_and_the_sizes_that_do(root, thirds, tmp_path):
    qwen = tiny.write_reader(tmp_path / "qwen", "qwen2", width=54, ffn=88)
    recipe = tiny.make_recipe(root, devices=3, model=3, **thirds | {"llms__qwen__source": str(qwen)})
    words = r"llms/qwen: layers/(gate|up|down) \(.*88.*\).*\(88\) does not divide mesh axis model=3.*1, 2, 4, 8, 11"
    with pytest.raises(PlacementError, match=words):
        assert trainer.Run(recipe.cfg, recipe, None, None).step_spec.frozen


def test_widths_that_do_not_divide_over_data_are_refused_under_fsdp(root):
    recipe = tiny.make_recipe(root, devices=3, strategy="fsdp", train__global_batch=6)
    with pytest.raises(PlacementError, match=r"llms/qwen: .*does not divide mesh axis data=3"):
        recipe.load_frozen()


@pytest.fixture(scope="module")
def trained(single):
    return single[2]


def answers_of(wire, message: bytes) -> dict[tuple[str, str], str]:
    """What every reader says from the message and from the text."""
    found = {}
    for reader in ("llama", "qwen"):
        found[reader, "latents"] = wire.read(message, reader, QUESTION)
        found[reader, "text"] = wire.read_text(TEXT, reader, QUESTION)
    return found


@pytest.fixture(scope="module")
def on_one_device(root, trained):
    wire = tiny.wire_of(tiny.make_recipe(root, eval__rows=ROWS), trained)
    message = wire.write(TEXT, bits=16)
    return message, answers_of(wire, message), evaluation.measure(wire).records


APART = {"split 4": {"devices": 4, "strategy": "split"}, "hybrid3": {"devices": 3, "strategy": "hybrid3"}}


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_readers_apart_answer_and_score_as_on_one_device(name, root, trained, on_one_device):
    message, said, scored = on_one_device
    wire = tiny.wire_of(tiny.make_recipe(root, eval__rows=ROWS, **APART[name]), trained)
    assert wire.write(TEXT, bits=8) and answers_of(wire, message) == said
    tiny.assert_same_scores(evaluation.measure(wire).records, scored)


@pytest.mark.slow
def test_validation_of_readers_apart_is_that_of_one_device(root, trained):
    found = []
    for where in ({}, APART["split 4"]):
        recipe = tiny.make_recipe(root, **where)
        run = trainer.Run(recipe.cfg, recipe, None, None)
        run.state = {"trainable": jax.device_put(jax.device_get(trained), recipe.shardings.trainable)}
        found.append(run.validation_loop.measure(run.state["trainable"], recipe.load_frozen()))
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        np.testing.assert_allclose(found[1][key], value, rtol=SCORES, err_msg=key)
