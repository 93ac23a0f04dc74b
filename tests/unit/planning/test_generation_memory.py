"""lw_jax/planning/generation_memory.py: unstacked layers for many answers or large readers, where memory allows."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from lw_jax import recipes
from lw_jax.evals.wire_functions import WireFunctions
from lw_jax.models.wire import Prompt
from lw_jax.planning import generation_memory, workload
from lw_jax.training.memory_limit import MemoryLimit
from sharding import place as place_
from tests import tiny

pytestmark = pytest.mark.slow

ROOM = MemoryLimit(10**12, 1.0)


def on(platform, placed):
    """The placement as one of devices of this platform, for what only asks for their kind."""
    device = types.SimpleNamespace(platform=platform)
    learner = types.SimpleNamespace(devices=types.SimpleNamespace(flat=[device]))
    return types.SimpleNamespace(learner=learner, readers=placed.readers)


def settle(root, monkeypatch, *, room=ROOM, platform="gpu", need=10**9, **changes):
    cfg = tiny.make_config(root, eval__layers="auto", **changes)
    monkeypatch.setattr(generation_memory, "unstacked_bytes", lambda *_: need)
    return generation_memory.resolve_layers(cfg, on(platform, tiny.place(cfg)), room).eval.layers


@pytest.mark.parametrize(
    ("examples", "layers"),
    [(generation_memory.MANY, "unstacked"), (0, "unstacked"), (generation_memory.MANY - 1, "stacked"), (64, "stacked")],
)
def test_many_answers_on_a_gpu_are_worth_the_longer_compilation(examples, layers, root, monkeypatch):
    assert settle(root, monkeypatch, eval__examples=examples) == layers
    assert settle(root, monkeypatch, eval__examples=examples, platform="cpu") == "stacked"


def test_a_large_reader_on_a_cpu_is_worth_the_longer_compilation_where_it_fits_once_more(root, monkeypatch):
    batches, cfg = 5, tiny.make_config(root)
    size = generation_memory.MANY_BYTES // (batches * cfg.eval.max_new_tokens)
    changes = {"eval__examples": batches * cfg.eval.batch, "platform": "cpu"}
    for held, free, layers in ((size, 3 * size, "unstacked"), (size - 1, 3 * size, "stacked"), (size, size, "stacked")):
        monkeypatch.setattr(recipes, "reader_bytes", lambda cfg, held=held: {"llama": held, "qwen": 1})
        monkeypatch.setattr(generation_memory.host_memory, "held", lambda readers, placed: sum(readers.values()))
        monkeypatch.setattr(generation_memory.host_memory, "available", lambda free=free: free)
        assert settle(root, monkeypatch, **changes) == layers


def test_memory_decides_and_where_it_is_not_known_the_layers_stay_stacked(root, monkeypatch):
    room, asked = MemoryLimit(1000, 0.5), {"eval__examples": 0}
    assert settle(root, monkeypatch, room=room, need=500, **asked) == "unstacked"
    assert settle(root, monkeypatch, room=room, need=501, **asked) == "stacked"
    assert settle(root, monkeypatch, room=None, **asked) == "stacked"


def test_first_process_decides_whatever_memory_the_others_have_left(root, monkeypatch, second):
    asked = {"eval__examples": 0}
    assert settle(root, monkeypatch, room=None, **asked) == "stacked"
    second(True)
    assert settle(root, monkeypatch, room=None, **asked) == "unstacked"


@pytest.mark.parametrize("layers", ["unstacked", "stacked"])
def test_what_is_configured_stays(layers, root):
    cfg = tiny.make_config(root, eval__layers=layers, eval__examples=0)
    assert generation_memory.resolve_layers(cfg, tiny.place(cfg), ROOM) is cfg


def test_readers_are_told(root):
    for layers, apart in (("unstacked", True), ("stacked", False)):
        recipe = tiny.make_recipe(root, eval__layers=layers)
        assert {reader.unstacked for reader in recipe.wire.readers.values()} == {apart}


@pytest.mark.parametrize("kind", ["embeddings", "kv"])
def test_a_program_for_each_token_gives_the_ids_and_scores_of_one_program(kind, root):
    half = {"compute__dtype": "bf16", "llms__qwen__weights": "bf16"}
    recipe = tiny.make_recipe(root, only="qwen", adapter__kind=kind, **half)
    built, fields = recipe.build(), recipe.data("validation").collate(range(4))
    latents = WireFunctions(recipe.wire, recipe.placement).encode(built.trainable, fields["source"])
    for name, own in fields["readers"].items():
        found, ends = {}, ()
        for unstacked in (False, False, True):
            # The last row ends at its third token, as the first pass found it; others go on.
            reader = dataclasses.replace(recipe.wire.readers[name], unstacked=unstacked, stops=ends)
            functions = WireFunctions(dataclasses.replace(recipe.wire, readers={name: reader}), recipe.placement)
            prompt = functions.prompt_from_latents(built.trainable, built.frozen[name], own, latents, name)
            for _ in range(2):  # separate layers are kept for the second batch
                found[unstacked] = np.asarray(functions.generate(built.frozen[name], prompt, name, 6))
                ids, scores = functions.answer(built.frozen[name], prompt, own, name, 6)
                np.testing.assert_array_equal(ids, found[unstacked])
                for key, wanted in functions.score(built.frozen[name], prompt, own, name).items():
                    np.testing.assert_allclose(scores[key], wanted, rtol=2e-3, err_msg=key)
            assert bool(functions._separate) == unstacked, "a program for each token takes separate layers"
            ends = ends or (int(found[False][-1, 2]),)
        assert (found[False][-1] == -1).any() and (found[False][:, -1] >= 0).any()
        np.testing.assert_array_equal(found[True], found[False])


@pytest.mark.optimized
@pytest.mark.parametrize("model", [1, 2])
def test_bytes_are_those_of_the_compiled_program(model, root, tmp_path):
    folder = tiny.write_reader(tmp_path, "llama", width=96, layers=8, ffn=384)  # layers that outweigh all else
    cfg = tiny.make_config(root, llms__llama__source=str(folder), eval__batch=2, data__context_tokens=16)
    cfg = dataclasses.replace(cfg, llms={"llama": cfg.llms["llama"]})
    placed = tiny.place(cfg, "tensor" if model > 1 else "replicate", data=1, model=model, devices=model)
    found = {}
    for layers in ("stacked", "unstacked"):
        recipe = recipes.make(tiny.change(cfg, eval__layers=layers), placed, outline=True)
        prompts, params = workload.prompts(recipe, "llama"), recipe.placed().frozen["llama"]
        generate = jax.jit(
            lambda params, prompts, own=recipe: own.wire.generate(params, "llama", Prompt(*prompts), max_new_tokens=4)
        )
        needs = jax.jit(generate).lower(params, prompts).compile().memory_analysis()
        found[layers] = needs.argument_size_in_bytes + needs.temp_size_in_bytes
    added = generation_memory._copies(cfg, recipe, "llama")
    weights = place_.device_bytes(params)
    assert found["unstacked"] - found["stacked"] == pytest.approx(place_.device_bytes(params["layers"]), rel=0.2)
    assert weights + added == pytest.approx(found["unstacked"], rel=0.2)
    assert generation_memory.unstacked_bytes(cfg, placed) > weights + added, "what is trained lies there as well"
