"""Fixtures of several unit tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from lw_jax.core import processes
from lw_jax.data.tokens import Tokenizer, load_tokenizer
from tests import standin


@pytest.fixture(scope="session")
def own_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the models that examples/tiny_models.py makes, by family."""
    pytest.importorskip("torch", reason="the example needs torch: pip install -r requirements-dev.txt")
    from examples import tiny_models

    folder = tmp_path_factory.mktemp("models")
    assert tiny_models.main(["--out", str(folder)]) == 0
    return {family: folder / family for family in tiny_models.MODELS}


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the functions that the test compiles, as "jit(run)"."""
    names: list[str] = []

    def listen(event: str, _: float, **fields: Any) -> None:
        if event.endswith("backend_compile_duration"):
            names.append(fields["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> standin.Measure:
    """StepMemory by arithmetic, nothing compiled."""
    return standin.replace_compiler(monkeypatch)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of what one test alone keeps: plans, and outputs of frozen models."""
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def module_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a file's tests keep and share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LW_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this process one of several; the first one decides for all, with these values, one after the other."""

    def take(*values: Any) -> None:
        decided = iter(values)
        monkeypatch.setattr(processes, "from_first", lambda make: next(decided))

    return take


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Tokenizer:
    """A tokenizer that puts a blank before every text, as Llama 2's, and takes it away again."""
    from transformers import PreTrainedTokenizerFast

    tokens = ["<e>", "\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581a", "\n"]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, [("\u2581", "a")]))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>").save_pretrained(tmp_path)
    return load_tokenizer(tmp_path)
