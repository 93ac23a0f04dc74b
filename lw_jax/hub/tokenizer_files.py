"""A tokenizer of a model's folder, as transformers reads it, or rebuilt from the metadata of a .gguf file."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from lw_jax.core import schema
from lw_jax.core.errors import UserError
from lw_jax.hub.config_json import Kind, read_or_default
from lw_jax.hub.gguf_header import read_header

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**24)]
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_FETCH = "fetch the tokenizer's files again"
_OF_THIS_LOAD = ("backend", "is_local", "local_files_only")  # not the tokenizer's, though transformers 5 writes them

# The tokenizer, the ids at which generation ends beside EOS, and the rows of the model's embedding table; None without
# a model in the folder.
Loaded = tuple["PreTrainedTokenizerFast", tuple[int, ...], int | None]


class _Added(msgspec.Struct, frozen=True):
    id: TokenId
    content: str


class _TokenizerJson(msgspec.Struct, frozen=True):
    added_tokens: tuple[_Added, ...] = ()


class _Generation(msgspec.Struct, frozen=True):
    eos_token_id: TokenId | tuple[TokenId, ...] | None = None


class _Gguf(msgspec.Struct, frozen=True, rename=lambda name: f"tokenizer.ggml.{name}"):
    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    token_type: tuple[int, ...]
    add_bos_token: bool | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | None = None
    padding_token_id: TokenId | None = None
    eot_token_id: TokenId | None = None
    chat_template: str | None = msgspec.field(name="tokenizer.chat_template", default=None)


def load(location: Path) -> Loaded:
    """Loads a tokenizer from a folder with tokenizer.json or from a .gguf file.

    Raises UserError where there is no `tokenizer.json`, a GGUF vocabulary of unknown kind, or a file of other types.
    """
    if location.is_dir():
        return _from_folder(location)
    header = read_header(location)
    fast, stops = _from_gguf(location, header.metadata)
    table = header.tensors.get("token_embd.weight")
    return fast, stops, None if table is None else table.shape[0]


@contextlib.contextmanager
def library_refusals(where: str) -> Iterator[None]:
    """Context of calls to the tokenizers library and transformers: what they raise of bad data becomes a UserError."""
    try:
        yield
    except Exception as error:  # tokenizers raises this very class, transformers whatever a field's type leads to
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{where}: the tokenizers library refuses it ({reason}); {_FETCH}") from error


# --- folders


def _from_folder(folder: Path) -> Loaded:
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{folder}: no tokenizer.json; only fast tokenizers are read: save it there with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    # Not AutoTokenizer: by model type it may rebuild normaliser and pre-tokenizer and ignore those of tokenizer.json
    # (transformers 5.23 does for every qwen2 folder), so other ids than the model was trained with.
    with library_refusals(str(folder)):
        fast = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    for token in read_or_default(folder / "tokenizer.json", _TokenizerJson).added_tokens:
        if (place := fast.backend_tokenizer.token_to_id(token.content)) != token.id:
            raise UserError(
                f"{folder}: added token {token.content!r:.80} has id {token.id}, its place is {place}; {_FETCH}"
            )
    stated = folder / "generation_config.json"  # as transformers, which else makes one of config.json
    ends = read_or_default(stated if stated.is_file() else folder / "config.json", _Generation).eos_token_id
    stops = ends if isinstance(ends, tuple) else () if ends is None else (ends,)
    if fast.eos_token_id is None and stops:  # GPT-2's files name none: transformers has it in its class
        fast.eos_token = fast.convert_ids_to_tokens(stops[0])
    return fast, stops, read_or_default(folder / "config.json", Kind).vocab_size


def save(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Writes a tokenizer's files in the words of transformers 4, which 5 reads as well."""
    tokenizer.save_pretrained(str(folder))
    file = folder / "tokenizer_config.json"
    stated = {key: value for key, value in json.loads(file.read_text("utf-8")).items() if key not in _OF_THIS_LOAD}
    if isinstance(stated.get("extra_special_tokens"), list):
        stated["additional_special_tokens"] = stated.pop("extra_special_tokens")
    stated |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    file.write_text(json.dumps(stated, indent=2, ensure_ascii=False) + "\n", "utf-8")


# --- GGUF


def _split(digits: str) -> Any:
    """The published split pattern of Llama 3 (digits "{1,3}") and Qwen2 (one by one), then the byte alphabet."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _pre_tokenizers() -> dict[str, Any]:
    """Maps `tokenizer.ggml.pre` to the pre-tokenizer that its model's tokenizer.json has."""
    smollm = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    return {"smollm": pre_tokenizers.Sequence(smollm), "qwen2": _split(""), "llama-bpe": _split("{1,3}")}


def _from_gguf(path: Path, metadata: Mapping[str, Any]) -> "tuple[PreTrainedTokenizerFast, tuple[int, ...]]":
    """Builds the byte-level BPE that a GGUF describes; returns it and the id that ends a turn, if one is stated.

    transformers' own conversion (5.23) knows no "smollm" digits, no NFC of Qwen2 and no whole-word rule of Llama 3.
    """
    from transformers import PreTrainedTokenizerFast

    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    known = _pre_tokenizers()
    if kind != "gpt2" or not isinstance(pre, str) or pre not in known:
        raise UserError(
            f"{path}: tokenizer.ggml.model={kind!r:.80} with tokenizer.ggml.pre={pre!r:.80} cannot be rebuilt "
            f'faithfully; known: "gpt2" with {sorted(known)}. Use the model\'s folder with its tokenizer.json instead'
        )
    remedy = "use the model's folder with its tokenizer.json"
    parsed = schema.convert(dict(metadata), _Gguf, where=str(path), remedy=remedy)
    vocab = {token: i for i, token in enumerate(parsed.tokens)}
    ids = {"bos_token": parsed.bos_token_id, "eos_token": parsed.eos_token_id, "pad_token": parsed.padding_token_id}
    with library_refusals(str(path)):
        names = {name: parsed.tokens[i] for name, i in ids.items() if i is not None}
        merges = [(first, second) for first, second in (merge.split(" ") for merge in parsed.merges)]
        backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
        kinds = list(zip(parsed.tokens, parsed.token_type, strict=True))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = known[pre]
    backend.decoder = decoders.ByteLevel()
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [AddedToken(token, normalized=False, special=special) for token, kind in kinds if kind == wanted]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    # llama.cpp's rule: files that do not say get a BOS for Llama 3's vocabulary and none for the others
    if pre == "llama-bpe" if parsed.add_bos_token is None else parsed.add_bos_token:
        if "bos_token" not in names:
            raise UserError(f"{path}: tokenizer.ggml.add_bos_token is true but tokenizer.ggml.bos_token_id is missing")
        bos = names["bos_token"]
        backend.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, vocab[bos])])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=parsed.chat_template, **names)
    return fast, () if parsed.eot_token_id is None else (parsed.eot_token_id,)


def check_ids(ids: Iterable[int | None], *, vocab: int, rows: int | None, where: str) -> None:
    """Refuses ids of a tokenizer that it or the model's table, of so many `rows`, does not have.

    `ids` are those that prompts and generation use by themselves, `vocab` is the tokenizer's highest id + 1.
    """
    if beyond := sorted(i for i in ids if i is not None and not 0 <= i < vocab):
        rule = "see eos_token_id in generation_config.json and the special tokens"
        raise UserError(f"{where}: token id {beyond[-1]}, the tokenizer has ids below {vocab}; {rule}")
    if rows is not None and vocab > rows:
        raise UserError(
            f"{where}: the tokenizer has ids up to {vocab - 1}, the model's vocabulary {rows} (vocab_size): an added "
            "token has no embedding; use the model's own tokenizer"
        )
