"""A tokenizer's files, of a model folder or inside a .gguf, typed and bounded before the tokenizers library sees them.

Of tokenizer_config.json and its like only the fields below reach transformers: the rest are keyword arguments of its
classes, whatever a file calls them.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from lw_jax.core import schema
from lw_jax.core.errors import UserError
from lw_jax.hub.gguf_header import read_header

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**24)]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=2**16)]
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_FETCH = "fetch the tokenizer's files again"
_SMALL = 16 << 20  # bytes of every file but tokenizer.json
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Loaded(NamedTuple):
    """A tokenizer as loaded from its files."""

    fast: "PreTrainedTokenizerFast"
    stops: tuple[int, ...]  # ids at which generation ends, beside EOS
    rows: int | None  # of the model's embedding table; None without a model in the folder


class _Token(msgspec.Struct, frozen=True, omit_defaults=True):
    content: _Text
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None  # where it is not stated: those that are not special
    special: bool = False


class _Added(_Token, frozen=True, kw_only=True):
    id: TokenId


class _Piece(msgspec.Struct, frozen=True):
    id: str


class _Processor(msgspec.Struct, frozen=True):
    type: str
    processors: tuple["_Processor", ...] = ()
    single: tuple[dict[str, _Piece], ...] = ()
    pair: tuple[dict[str, _Piece], ...] = ()
    special_tokens: dict[str, msgspec.Raw] = {}


class _PlainProcessor(msgspec.Struct, frozen=True):  # of another type, whose fields have other forms
    type: str


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, TokenId] | list[tuple[str, float]]


class _TokenizerJson(msgspec.Struct, frozen=True):
    model: _Model
    added_tokens: tuple[_Added, ...] = ()
    post_processor: msgspec.Raw = msgspec.Raw(b"null")


class _SpecialTokens(msgspec.Struct, frozen=True):
    """special_tokens_map.json, and the same fields of tokenizer_config.json."""

    bos_token: _Text | _Token | None = None
    eos_token: _Text | _Token | None = None
    unk_token: _Text | _Token | None = None
    sep_token: _Text | _Token | None = None
    pad_token: _Text | _Token | None = None
    cls_token: _Text | _Token | None = None
    mask_token: _Text | _Token | None = None
    extra_special_tokens: tuple[_Text | _Token, ...] | dict[str, _Text | _Token] | None = None
    additional_special_tokens: tuple[_Text | _Token, ...] | None = None


class _Template(msgspec.Struct, frozen=True):
    name: str
    template: str


class _Config(_SpecialTokens, frozen=True):
    added_tokens_decoder: dict[TokenId, _Token] | None = None
    chat_template: str | tuple[_Template, ...] | None = None
    clean_up_tokenization_spaces: bool | None = None
    split_special_tokens: bool | None = None
    model_max_length: float | None = None


class _Generation(msgspec.Struct, frozen=True):
    eos_token_id: TokenId | tuple[TokenId, ...] | None = None


class _ModelConfig(msgspec.Struct, frozen=True):
    model_type: str | None = None
    vocab_size: schema.Size | None = None


class _Gguf(msgspec.Struct, frozen=True, rename=lambda name: f"tokenizer.ggml.{name}"):
    tokens: tuple[str, ...]
    merges: tuple[Annotated[str, msgspec.Meta(pattern=r"^[^ ]+ [^ ]+$")], ...]
    token_type: tuple[int, ...]
    scores: tuple[float, ...] | None = None
    add_bos_token: bool | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | None = None
    padding_token_id: TokenId | None = None
    eot_token_id: TokenId | None = None
    chat_template: str | None = msgspec.field(name="tokenizer.chat_template", default=None)


def is_bert(folder: Path) -> bool:
    """Returns True where a folder's config.json, if there is one, names a BERT-class body."""
    return _read(folder / "config.json", _ModelConfig).model_type == "bert"


def load(location: Path) -> Loaded:
    """Loads a tokenizer from a folder with tokenizer.json or from a .gguf file.

    Raises:
        UserError: no `tokenizer.json`, a GGUF vocabulary of unknown kind, or a file of other types than these.
    """
    if location.is_dir():
        return _from_folder(location)
    header = read_header(location)
    fast, stops = _from_gguf(location, header.metadata)
    table = header.tensors.get("token_embd.weight")
    return Loaded(fast, stops, None if table is None else table.shape[0])


@contextlib.contextmanager
def library_refusals(where: str) -> Iterator[None]:
    """Context that turns the tokenizers library's errors of bad data into a UserError."""
    try:
        yield
    except Exception as error:
        # The library raises this very class, no subclass; transformers wraps none of it. All else is a fault of ours.
        if type(error) is not Exception and not isinstance(error, (OSError, ValueError, OverflowError)):
            raise
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{where}: the tokenizers library refuses it ({said}); {_FETCH}") from error


# --- folders


def _read(file: Path, kind: type, limit: int = _SMALL) -> Any:
    """Returns a file as `kind`; the kind's defaults where there is no file."""
    try:
        return schema.read(file, kind, remedy=_FETCH, limit=limit)
    except FileNotFoundError:
        return kind()


def _from_folder(folder: Path) -> Loaded:
    from transformers import PreTrainedTokenizerFast

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            f"{folder}: no tokenizer.json; only fast tokenizers are read: save it there with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    parsed: _TokenizerJson = schema.read(file, _TokenizerJson, remedy=_FETCH)
    vocab = parsed.model.vocab
    if isinstance(vocab, dict) and len(set(vocab.values())) < len(vocab):
        raise UserError(f"{file}: model.vocab gives one id to several tokens; {_FETCH}")
    _check_processor(parsed.post_processor, f"{file}: post_processor")
    config, arguments = _arguments(folder)
    # Not AutoTokenizer: by model type it may rebuild normaliser and pre-tokenizer and ignore those of tokenizer.json
    # (transformers 5.23 does for every qwen2 folder), so other ids than the model was trained with. Not from_pretrained
    # either: it hands all of tokenizer_config.json to the class.
    with library_refusals(str(file)):
        fast = PreTrainedTokenizerFast(tokenizer_file=str(file), **arguments)
    stated = {token.content: token.id for token in parsed.added_tokens}
    stated |= {token.content: number for number, token in (config.added_tokens_decoder or {}).items()}
    for content, number in stated.items():
        if (found := fast.backend_tokenizer.token_to_id(content)) != number:
            raise UserError(f"{folder}: added token {content!r:.80} has id {number}, its place is {found}; {_FETCH}")
    ends = _read(folder / "generation_config.json", _Generation).eos_token_id
    stops = ends if isinstance(ends, tuple) else () if ends is None else (ends,)
    return Loaded(fast, stops, _read(folder / "config.json", _ModelConfig).vocab_size)


def _check_processor(raw: msgspec.Raw, where: str) -> None:
    """Refuses a template of special tokens that it does not define: the library panics at the first text."""
    if schema.decode(raw, dict[str, Any] | None, where=where, remedy=_FETCH) is None:
        return
    kind = schema.decode(raw, _PlainProcessor, where=where, remedy=_FETCH).type
    if kind in ("TemplateProcessing", "Sequence"):
        _check_template(schema.decode(raw, _Processor, where=where, remedy=_FETCH), where)


def _check_template(processor: _Processor, where: str) -> None:
    named = {
        piece["SpecialToken"].id for piece in (*processor.single, *processor.pair) if piece.keys() == {"SpecialToken"}
    }
    if unknown := sorted(named - processor.special_tokens.keys()):
        raise UserError(f"{where}: it puts {unknown[0]!r:.80}, which its special_tokens lack; {_FETCH}")
    for inner in processor.processors:
        _check_template(inner, where)


def _arguments(folder: Path) -> tuple[_Config, dict[str, Any]]:
    """Returns tokenizer_config.json, and its values with those of the other files, as transformers reads them."""
    config: _Config = _read(folder / "tokenizer_config.json", _Config)
    named: dict[str, Any] = {name: getattr(config, name) for name in _NAMED}
    extra: Any = config.extra_special_tokens or config.additional_special_tokens or ()
    decoder = dict(config.added_tokens_decoder or {})
    if config.added_tokens_decoder is None:  # files of before 2023: transformers reads these two then, and only then
        special: _SpecialTokens = _read(folder / "special_tokens_map.json", _SpecialTokens)
        own = {name: getattr(special, name) for name in _NAMED if getattr(special, name) is not None}
        named |= {
            name: msgspec.structs.replace(token, special=True) if isinstance(token, _Token) else token
            for name, token in own.items()
        }
        extra = special.extra_special_tokens or special.additional_special_tokens or extra
        names = {token.content if isinstance(token, _Token) else token for token in (*named.values(), *extra)}
        for content, number in _read(folder / "added_tokens.json", dict[str, TokenId]).items():
            marked = content in names
            decoder[number] = _Token(content, normalized=not marked, special=marked)
    arguments: dict[str, Any] = {name: _added(token) for name, token in named.items() if token is not None}
    if extra:
        arguments["extra_special_tokens"] = (
            {name: _added(token) for name, token in extra.items()}
            if isinstance(extra, dict)
            else [_added(token) for token in extra]
        )
    for name in ("clean_up_tokenization_spaces", "split_special_tokens"):
        if getattr(config, name) is not None:
            arguments[name] = getattr(config, name)
    if config.model_max_length is not None:
        arguments["model_max_length"] = int(config.model_max_length)
    arguments["added_tokens_decoder"] = {number: _added(token) for number, token in decoder.items()}
    return config, arguments | {"chat_template": _chat_template(folder, config)}


def _added(token: str | _Token) -> str | AddedToken:
    if isinstance(token, str):
        return token
    normalized = not token.special if token.normalized is None else token.normalized
    return AddedToken(**msgspec.structs.asdict(msgspec.structs.replace(token, normalized=normalized)))


def _chat_template(folder: Path, config: _Config) -> str | dict[str, str] | None:
    """Returns the template that transformers uses: its own file before tokenizer_config.json."""
    more = {
        file.stem: _text(file)
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
        if file.is_file()
    }
    own = folder / "chat_template.jinja"
    if own.is_file():
        return {"default": _text(own), **more} if more else _text(own)
    if more:
        return more
    if isinstance(config.chat_template, tuple):
        return {one.name: one.template for one in config.chat_template}
    return config.chat_template


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > _SMALL:
            raise UserError(f"{file}: {file.stat().st_size:,} bytes, at most {_SMALL:,} are read; {_FETCH}")
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: it cannot be read as UTF-8 ({error}); {_FETCH}") from error


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
    if len(vocab) != len(parsed.tokens):
        raise UserError(f"{path}: {len(parsed.tokens) - len(vocab)} tokens of tokenizer.ggml.tokens are repeated")
    for name in ("token_type", "scores"):
        values = getattr(parsed, name)
        if values is not None and len(values) != len(parsed.tokens):
            raise UserError(
                f"{path}: tokenizer.ggml.{name} has {len(values)} values, {len(parsed.tokens)} tokens need one each"
            )
    names = _named_tokens(path, parsed)
    with library_refusals(str(path)):
        merges = [(first, second) for first, second in (merge.split(" ") for merge in parsed.merges)]
        backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = known[pre]
    backend.decoder = decoders.ByteLevel()
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        marked = [t for t, kind in zip(parsed.tokens, parsed.token_type, strict=True) if kind == wanted]
        added = [AddedToken(token, normalized=False, special=special) for token in marked]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    # llama.cpp's rule: files that do not say get a BOS for Llama 3's vocabulary and none for the others
    if pre == "llama-bpe" if parsed.add_bos_token is None else parsed.add_bos_token:
        if "bos_token" not in names:
            raise UserError(f"{path}: tokenizer.ggml.add_bos_token is true but tokenizer.ggml.bos_token_id is missing")
        bos = names["bos_token"]
        backend.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, vocab[bos])])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=parsed.chat_template, **names)
    return fast, () if parsed.eot_token_id is None else (parsed.eot_token_id,)


def _named_tokens(path: Path, parsed: _Gguf) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
    ids = {name: getattr(parsed, f"{key}_token_id") for name, key in keys.items()}
    if beyond := [f"{keys[name]}_token_id={i}" for name, i in ids.items() if i is not None and i >= len(parsed.tokens)]:
        raise UserError(f"{path}: tokenizer.ggml.{beyond[0]}, there are {len(parsed.tokens)} tokens; convert it again")
    return {name: parsed.tokens[i] for name, i in ids.items() if i is not None}


def check_ids(ids: Iterable[int | None], *, vocab: int, rows: int | None, where: str) -> None:
    """Refuses ids of a tokenizer that it or the model's table does not have.

    Args:
        ids: those that prompts and generation use by themselves.
        vocab: the tokenizer's highest id + 1.
        rows: of the model's table, if it is known.
        where: the tokenizer's place, for messages.
    """
    if beyond := sorted(i for i in ids if i is not None and not 0 <= i < vocab):
        rule = "see eos_token_id in generation_config.json and the special tokens"
        raise UserError(f"{where}: token id {beyond[-1]}, the tokenizer has ids below {vocab}; {rule}")
    if rows is not None and vocab > rows:
        raise UserError(
            f"{where}: the tokenizer has ids up to {vocab - 1}, the model's vocabulary {rows} (vocab_size): an added "
            "token has no embedding; use the model's own tokenizer"
        )
