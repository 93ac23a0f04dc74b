"""The wire model: source ids -> latents -> one soft prefix per reader -> logits at the answer's positions.

Inputs are ids, outputs logits or generated ids; text, tokenizers and losses are elsewhere.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lw_jax.core.precision import FP32, Precision
from lw_jax.core.types import Tree
from lw_jax.models import bert, decode, decoder, encoder, kv_prefix, lora, products, rotary
from lw_jax.models.adapter import Adapter, KeysValues, KVAdapter, calibrate
from lw_jax.models.lora import Lora
from lw_jax.models.modules import Pure


@dataclasses.dataclass(frozen=True)
class EncoderSpec:
    """Static settings of the encoder; `body` is set for a pretrained one."""

    slots: int
    width: int
    pooling: str
    layers: int
    window: int  # tokens of one pass of the body
    body: decoder.DecoderConfig | bert.BertConfig | None
    precision: Precision = FP32  # of arithmetic; parameters are fp32
    pairs: Lora | None = None  # beside the body's matrices, which are then frozen
    taps: int = 0  # layers of the body whose states stand side by side; 0: a mix over all
    causal: bool = False  # the body keeps its causal mask

    def head(self) -> Pure[encoder.Head]:
        body_width, states = (self.body.width, self.body.layers + 1) if self.body else (self.width, 0)
        vocab = self.body.vocab if self.body else encoder.BYTE_VOCABULARY
        sizes = {"slots": self.slots, "states": states, "vocab": vocab, "taps": self.taps}
        return Pure(encoder.Head, body_width, self.width, pooling=self.pooling, **sizes)

    def byte_body(self) -> Pure[encoder.ByteBody]:
        return Pure(encoder.ByteBody, self.width, self.layers or encoder.BYTE_LAYERS)


@dataclasses.dataclass(frozen=True)
class Reader:
    """Static settings of one frozen reader and its adapter."""

    config: decoder.DecoderConfig
    adapter_hidden: int
    stops: tuple[int, ...]
    mode: decoder.Mode = decoder.Mode()
    unstacked: bool = False  # in generation: see `decode.unstack_layers`
    kind: str = "embeddings"  # of the prefix: config.adapter.kind
    constrain: Callable[[jax.Array], jax.Array] = decoder.unchanged  # applied to a prefix' keys and values [l b m k e]

    def adapter(self, width: int) -> Pure[Any]:
        """Describes the reader's `Adapter` or, of kind "kv", `KVAdapter`."""
        if self.kind == "kv":
            return Pure(KVAdapter, width, self.adapter_hidden, self.config)
        return Pure(Adapter, width, self.adapter_hidden, self.config.width)

    def start(self, key: jax.Array, size_key: jax.Array, *, width: int, slots: int, size: jax.Array) -> Tree:
        """Draws the adapter's parameters; `size` is the RMS of the reader's embeddings.

        Keys and values have unit size: `kv_start` gives them the reader's own.
        """
        module = self.adapter(width)
        params = module.init(key)
        if self.kind == "kv":
            return params | {"task_gain": size.astype(jnp.float32)}
        return calibrate(module, params, key=size_key, slots=slots, target=size)


@dataclasses.dataclass(frozen=True)
class Wire:
    """One encoder, any number of readers by name; trainable: {"encoder": {"body", "head"}, "adapters": {name: ...}}.

    An encoder with `pairs` has {"lora", "head"}: its body is frozen and given beside.
    """

    encoder: EncoderSpec
    readers: Mapping[str, Reader]
    mode: decoder.Mode = decoder.Mode()  # of the encoder's body

    def init(self, key: jax.Array, body: Tree | None, embedding_rms: Mapping[str, jax.Array]) -> Tree:
        """Draws the trainable parameters in fp32; `body` holds the pretrained weights of an encoder that trains them.

        `embedding_rms[name]` is the size that reader's adapter starts with.
        """
        body_key, head_key, adapter_key = jax.random.split(key, 3)
        if self.encoder.pairs is not None:
            assert isinstance(self.encoder.body, decoder.DecoderConfig), "validation allows pairs for a decoder only"
            learned = {"lora": lora.init(body_key, self.encoder.body, self.encoder.pairs)}
        elif body is None:
            learned = {"body": self.encoder.byte_body().init(body_key)}
        else:
            learned = {"body": body}
        adapters = {}
        for name, reader in self.readers.items():
            init_key, size_key = jax.random.split(jax.random.fold_in(adapter_key, zlib.crc32(name.encode())))
            adapters[name] = reader.start(
                init_key, size_key, width=self.encoder.width, slots=self.encoder.slots, size=embedding_rms[name]
            )
        return {"encoder": learned | {"head": self.encoder.head().init(head_key)}, "adapters": adapters}

    def encode(
        self, trainable: Tree, source: Mapping[str, jax.Array], body: Tree | None = None
    ) -> Float[Array, "b m z"]:
        """Encodes {"ids" [b s], "mask" [b s], "channel" [b 3]} (right-padded) into fp32 latents.

        They have unit RMS in each row's first slots and the first width of them, and are 0 elsewhere. A source longer
        than the body's window is encoded window by window and pooled as a whole. `body` is the frozen one of an encoder
        with pairs.
        """
        params = products.cast(trainable["encoder"], self.encoder.precision)
        if self.encoder.pairs is not None:
            assert body is not None, "an encoder with pairs needs its frozen body"
            params |= {"body": lora.attach(body, params["lora"], self.encoder.pairs)}
        ids, mask = source["ids"], source["mask"]
        window = min(self.encoder.window, ids.shape[1])
        mix = trainable["encoder"]["head"].get("mix")  # fp32, as what it sums
        states = self._read(params, mix, ids.reshape(-1, window), mask.reshape(-1, window))
        states = states.reshape(*ids.shape, states.shape[2])
        head = params["head"]
        whole = trainable["encoder"]["head"]  # fp32: bf16 would make tokens as rare, or lose a state's small values
        if "rarity" in whole.get("pool", {}):
            head = head | {"pool": whole["pool"]}
        head = head | {name: whole[name] for name in ("shift", "scale") if name in whole}
        return self.encoder.head().bind(head)(states, mask, source["channel"], ids)

    def _read(
        self, params: Tree, mix: Float[Array, " n"] | None, ids: Int[Array, "b s"], mask: Bool[Array, "b s"]
    ) -> Float[Array, "b s d"]:
        body = self.encoder.body
        if body is None:
            return self.encoder.byte_body().bind(params["body"])(ids, mask, saves_products=self.mode.saves_products)
        mix = None if mix is None else jax.nn.softmax(mix)
        if isinstance(body, bert.BertConfig):
            assert mix is not None, "validation allows taps for a decoder only"
            return bert.forward(params["body"], body, ids, mask=mask, mix=mix, mode=self.mode)
        mode = dataclasses.replace(self.mode, causal=self.encoder.causal)
        return encoder.read_lm(params["body"], body, mix, ids=ids, mask=mask, mode=mode, taps=self.encoder.taps)

    def prefix(
        self, params: Tree, name: str, latents: Float[Array, "b m z"], task: str
    ) -> Float[Array, "b n d"] | KeysValues:
        """Turns latents into one reader's soft prefix, the task's vector behind them (n = m + 1)."""
        precision, reader = self.encoder.precision, self.readers[name]
        params = products.cast(params, precision)
        prefix = reader.adapter(self.encoder.width).bind(params)(latents.astype(precision.values), task)
        if isinstance(prefix, KeysValues):
            return prefix._replace(k=reader.constrain(prefix.k), v=reader.constrain(prefix.v))
        return prefix

    def answer_logits(
        self, params: Tree, name: str, prompt: "Prompt", fields: Mapping[str, Any]
    ) -> Float[Array, "b t v"]:
        """fp32 logits that predict each answer token and the EOS; the head sees no other position.

        `fields` are the reader's part of a batch: "answer_inputs" [b t-1] and "weights" [b t], above 0 at real targets;
        or, of several questions a row, "packed" {"ids", "segments"} [b p] and "places" [b t].
        """
        return decoder.logits(params, self.answer_states(params, name, prompt, fields))

    def answer_states(
        self, params: Tree, name: str, prompt: "Prompt", fields: Mapping[str, Any]
    ) -> Float[Array, "b t d"]:
        """Hidden states of `answer_logits`, before the head."""
        assert prompt.packed is None, "it is for answers: scores mask what a head does not keep"
        config, mode = self.readers[name].config, self.readers[name].mode
        prompt = prompt.joined() if isinstance(config.rope_scaling, rotary.LongRope) else prompt  # by the whole length
        length = prompt.mask.shape[1]
        if "packed" in fields:
            ids, numbers = fields["packed"]["ids"], fields["packed"]["segments"]
            real, segments = numbers > 0, jnp.pad(numbers, ((0, 0), (length, 0)))
        else:
            (ids, real), segments = _answer_inputs(fields), None
        x = jnp.concatenate([prompt.embeddings, decoder.embed(params, ids)], axis=1)
        mask = jnp.concatenate([prompt.mask, real], axis=1)
        before = {"shared_prefix": prompt.shared_prefix, "kv_prefix": prompt.kv_prefix}
        hidden = decoder.forward(params, config, x, mask=mask, segments=segments, mode=mode, **before).hidden
        if "packed" in fields:
            return jnp.take_along_axis(hidden, length + fields["places"][:, :, None], axis=1)
        return hidden[:, length - 1 :]

    def generate(self, params: Tree, name: str, prompt: "Prompt", *, max_new_tokens: int) -> Int[Array, "b n"]:
        """Greedy answer ids, -1 after the stop."""
        return self.answer(params, name, prompt, None, max_new_tokens=max_new_tokens)[0]

    def answer(
        self, params: Tree, name: str, prompt: "Prompt", fields: Mapping[str, Any] | None, *, max_new_tokens: int
    ) -> tuple[Int[Array, "b n"], Float[Array, "b t v"]]:
        """Returns `generate`'s ids and `answer_logits` of the reference answers, from one pass over the prompt."""
        reader = self.readers[name]
        first, memory, logits = self.begin(params, name, prompt, fields, max_new_tokens=max_new_tokens)
        sampling = decode.Sampling(max_new_tokens, reader.stops, unstacked=reader.unstacked)
        settings = {"sampling": sampling, "key": jax.random.key(0), "mode": reader.mode}
        return decode.continue_generation(params, reader.config, first, memory, **settings), logits

    def open_cache(self, params: Tree, name: str, prompt: "Prompt", *, room: int = 0) -> decoder.Cache:
        """Returns a cache of what stands before a prompt's embeddings, keys turned, with `room` positions behind it."""
        reader, size = self.readers[name], prompt.positions - prompt.mask.shape[1] + room
        before = {"prefix": prompt.kv_prefix, "packed": prompt.packed, "shared_prefix": prompt.shared_prefix}
        return kv_prefix.open_cache(params, reader.config, size, **before, mode=reader.mode)

    def begin(
        self, params: Tree, name: str, prompt: "Prompt", fields: Mapping[str, Any] | None = None, *, max_new_tokens: int
    ) -> tuple[Float[Array, "b v"], Tree, Float[Array, "b t v"]]:
        """Reads a prompt and, of `fields`, the reference answer behind it, which it forgets.

        Returns the logits of the first answer token, the memory that `follow` takes, and `answer_logits`; without
        fields those of the first token.
        """
        reader, answer, cache, room = self.readers[name], None, None, max_new_tokens
        if fields is not None:
            ids, real = _answer_inputs(fields)
            answer, room = (decoder.embed(params, ids), real), max(room, ids.shape[1])
        if prompt.kv_prefix is not None or prompt.packed is not None:
            cache = self.open_cache(params, name, prompt, room=prompt.mask.shape[1] + room)
        settings = {"max_new_tokens": max_new_tokens, "answer": answer, "cache": cache, "mode": reader.mode}
        return decode.begin(params, reader.config, prompt.embeddings, mask=prompt.mask, **settings)

    def follow(
        self, params: Tree, name: str, token: Int[Array, " b"], memory: Tree
    ) -> tuple[Float[Array, "b v"], Tree]:
        """Reads one more token of every row: the next logits and the memory behind it."""
        reader = self.readers[name]
        return decode.follow(params, reader.config, reader.mode, token, jnp.ones(token.shape, bool), memory)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompt:
    """Input of a reader before its answer; the last column is a real token of every row."""

    embeddings: Float[Array, "b p d"]
    mask: Bool[Array, "b p"]
    shared_prefix: decoder.SharedPrefix | None = None  # before it in every row; for `generate` only with the next
    kv_prefix: decoder.KVPrefix | None = None  # between it and the embeddings
    packed: decoder.PackedPrefix | None = None  # behind it, for answers: keys of each head's own number

    @property
    def positions(self) -> int:
        """Returns the positions of a row in a cache, padding included; a packed prefix takes none."""
        before = [prefix.mask.shape[1] for prefix in (self.shared_prefix, self.kv_prefix) if prefix is not None]
        return self.mask.shape[1] + sum(before)

    def joined(self) -> "Prompt":
        """Returns the prompt with its shared prefix copied into each row; as it is where keys and values follow it."""
        if self.shared_prefix is None or self.kv_prefix is not None:
            return self
        x, mask = (decoder.repeat(leaf, len(self.mask)) for leaf in self.shared_prefix)
        return Prompt(jnp.concatenate([x, self.embeddings], axis=1), jnp.concatenate([mask, self.mask], axis=1))


def text_prompt(params: Tree, tokens: Mapping[str, jax.Array]) -> Prompt:
    """Returns a prompt of token ids: {"ids", "mask"} left-padded."""
    return Prompt(decoder.embed(params, tokens["ids"]), tokens["mask"])


def _answer_inputs(fields: Mapping[str, Any]) -> tuple[Int[Array, "b a"], Bool[Array, "b a"]]:
    """Returns the ids of a reference answer but its last, and which are real: targets of the position before.

    Padding must not count: LongRope chooses its frequencies by a row's real tokens.
    """
    return fields["answer_inputs"], jnp.asarray(fields["weights"])[:, 1:] > 0


def after_prefix(fields: Mapping[str, Any]) -> Mapping[str, jax.Array]:
    """Returns {"ids", "mask"} of the question, left-padded; before packed questions there is nothing."""
    if "after" in fields:
        return fields["after"]
    rows = len(fields["packed"]["ids"])
    return {"ids": jnp.zeros((rows, 0), jnp.int32), "mask": jnp.zeros((rows, 0), bool)}


def taught_prompt(params: Tree, fields: Mapping[str, Any], vectors: Float[Array, "k d"]) -> Prompt:
    """Returns a text's prompt with learned vectors behind the context, where a message has its task's vector.

    `fields` has "context" (everything before the question) and, where no packed questions follow, "asked" (from the
    question on), left-padded.
    """
    context = fields["context"]
    asked = fields["asked"] if "asked" in fields else {key: leaf[:, :0] for key, leaf in context.items()}
    question, mask = _teach(vectors, decoder.embed(params, asked["ids"]), asked["mask"])
    x = jnp.concatenate([decoder.embed(params, context["ids"]), question], axis=1)
    return Prompt(x, jnp.concatenate([context["mask"], mask], axis=1))


def compacted_prompt(
    params: Tree, fields: Mapping[str, Any], kept: decoder.KVPrefix, vectors: Float[Array, "k d"] | None = None
) -> Prompt:
    """Returns the shared prefix, a text's kept keys and values in the place of the context, then the question.

    `vectors`: as of `taught_prompt`, behind the kept keys.
    """
    question, mask = decoder.embed(params, fields["asked"]["ids"]), fields["asked"]["mask"]
    if vectors is not None:
        question, mask = _teach(vectors, question, mask)
    return Prompt(question, mask, embed_shared_prefix(params, fields["before"]), kept)


def _teach(
    vectors: Float[Array, "k d"], x: Float[Array, "b q d"], mask: Bool[Array, "b q"]
) -> tuple[Float[Array, "b p d"], Bool[Array, "b p"]]:
    """Returns embeddings and their mask with the vectors before them in each row."""
    taught = jnp.broadcast_to(vectors.astype(x.dtype)[None], (len(x), *vectors.shape))
    return jnp.concatenate([taught, x], axis=1), jnp.concatenate([jnp.ones(taught.shape[:2], bool), mask], axis=1)


def wire_prompt(params: Tree, fields: Mapping[str, Any], prefix: Float[Array, "b n d"] | KeysValues) -> Prompt:
    """Returns BOS and template text, the soft prefix in the place of the context, then the question.

    `fields["before"]` is the same in every row: its first row is the shared prefix.
    """
    after, kv = after_prefix(fields), None
    shared = embed_shared_prefix(params, fields["before"])
    question = decoder.embed(params, after["ids"])
    task = jnp.ones((len(question), 1), bool)
    if isinstance(prefix, KeysValues):
        slots = encoder.slot_mask(fields["channel"][:, 0], prefix.k.shape[2])
        kv = decoder.KVPrefix(prefix.k.astype(question.dtype), prefix.v.astype(question.dtype), slots)
        front, marks = prefix.task, task
    else:
        slots = encoder.slot_mask(fields["channel"][:, 0], prefix.shape[1] - 1)
        front, marks = prefix, jnp.concatenate([slots, task], axis=1)
    embeddings = jnp.concatenate([front.astype(question.dtype), question], axis=1)
    return Prompt(embeddings, jnp.concatenate([marks, after["mask"]], axis=1), shared, kv)


def embed_shared_prefix(params: Tree, before: Mapping[str, jax.Array]) -> decoder.SharedPrefix | None:
    """Returns what stands before a prefix as a shared prefix, from the first row; None where nothing does."""
    if not before["ids"].shape[1]:
        return None
    return decoder.SharedPrefix(decoder.embed(params, before["ids"][:1]), before["mask"][:1])
