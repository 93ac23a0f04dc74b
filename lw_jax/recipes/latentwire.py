"""Recipe `latentwire`: trains one encoder and an adapter per reader; the readers are frozen."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core import config, precision
from lw_jax.core import rng as rngs
from lw_jax.core.config import Config
from lw_jax.core.progress import phase
from lw_jax.core.types import EXACT, SHARED, LossTerms, Tree
from lw_jax.data import batches, examples, prompt_tokens, tokens
from lw_jax.data.tokens import BertTokenizer, ByteTokenizer, Tokenizer, load_source_tokenizer, load_tokenizer
from lw_jax.hub import architectures, weights
from lw_jax.losses import objectives
from lw_jax.models import adapter, alignment, codec, lora, wire
from lw_jax.models.bert import BertConfig
from lw_jax.models.decoder import DecoderConfig
from lw_jax.recipes import frozen_models, join, kv_start, states_start, wire_shapes
from lw_jax.recipes.curriculum import Curriculum, encoder_rates, longest_passage
from lw_jax.recipes.surprisal import Surprisal
from lw_jax.recipes.teacher import Teacher
from lw_jax.recipes.wire_readers import WireReaders
from lw_jax.training import step_costs
from lw_jax.training.optimizers import Rates
from lw_jax.training.recipe import Weights
from sharding import place, placement, rules, tables
from sharding.placement import Placement

COUNTED = 1024  # texts whose tokens are in memory at once
PIECES = 4  # ids of a token string in another vocabulary, whose embeddings an aligned start averages


class LatentWire(WireReaders):
    """See `training.recipe.Recipe`. Trainable: {"encoder", "adapters"}; frozen: {reader's name: decoder}.

    Of an encoder with LoRA pairs (encoder.rank) its body is frozen too, under `SHARED`.
    """

    def __init__(self, cfg: Config, placed: Placement, *, outline: bool = False):
        super().__init__(cfg, placed, outline=outline)
        encoder, arithmetic = cfg.encoder, precision.of(cfg.compute.dtype, placed.platform)
        spec = wire.EncoderSpec(
            slots=encoder.slots,
            width=encoder.width,
            pooling=encoder.pooling,
            layers=encoder.layers,
            window=encoder.window,
            body=self._describe_body(),
            precision=arithmetic,
            pairs=lora.make(rank=encoder.rank, dropout=0.0, targets=(".*",)) if encoder.rank else None,
            taps=encoder.states,
            causal=encoder.mask == "causal",
        )
        readers = self._make_readers(kind=cfg.adapter.kind)
        self.wire = wire.Wire(spec, readers, frozen_models.mode(cfg, placed.learner, arithmetic))

    @property
    def rates(self) -> Rates:
        """Returns the learning rate multiples; a pretrained body, or its pairs, have their own."""
        encoder = ((f"encoder/{part}/.*", each) for part, each in encoder_rates(self.cfg).items())
        return (*encoder, ("adapters/.*", 1.0))

    @functools.cached_property
    def body_location(self) -> Path | None:
        """Returns the path of the encoder's pretrained body; None for one from scratch."""
        spec = self.cfg.encoder
        return frozen_models.locate(self.cfg, spec.source, spec.sha256) if spec.kind in frozen_models.BODIES else None

    def _describe_body(self) -> DecoderConfig | BertConfig | None:
        """Returns the shapes of the encoder's body, cut to its layers; None for one from scratch."""
        spec = self.cfg.encoder
        if spec.kind not in frozen_models.BODIES:
            return None
        if not self.outline:
            assert self.body_location is not None  # it has one of the BODIES
            body = frozen_models.BODIES[spec.kind](self.body_location)
        elif spec.kind == "lm":
            body = frozen_models.outline(self.cfg, spec.source)
        else:
            body = architectures.find_bert(spec.source)
        return frozen_models.cut_body(body, spec)

    # --- weights

    @functools.cached_property
    def abstract(self) -> Weights:
        spec, body, frozen = self.wire.encoder, None, self._abstract_readers()
        if spec.body and spec.pairs:
            frozen[SHARED] = frozen_models.abstract_body(spec.body, spec.precision)
        elif spec.body:
            body = frozen_models.abstract_body(spec.body)
        sizes = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in self.wire.readers}
        return Weights(jax.eval_shape(self._init, rngs.abstract(), body, sizes), frozen)

    @functools.cached_property
    def _init(self) -> Callable[..., Tree]:
        """Draws the trained parameters; traced once for all recipes of the same models, wherever they lie."""
        models = self.wire.encoder, {name: reader.config for name, reader in self.wire.readers.items()}
        return step_costs.once(self, "", "init", models, lambda: jax.jit(self.wire.init))

    @functools.cached_property
    def shardings(self) -> Weights:
        shapes = self.abstract
        frozen = self._reader_shardings()
        if SHARED in shapes.frozen:
            whole = place.whole(self.placement.learner)
            frozen[SHARED] = jax.tree.map(lambda leaf: whole, shapes.frozen[SHARED])
        trainable = rules.shardings(tables.TRAINABLE, shapes.trainable, self.placement.learner, name="trainable")
        return Weights(trainable, frozen)

    def build(self, frozen: Tree | None = None) -> Weights:
        placed = self.shardings
        readers: Tree = self.load_frozen() if frozen is None else frozen
        body = None
        if self.body_location and self.wire.encoder.body and self.wire.encoder.pairs is None:
            body = frozen_models.load_body(self.body_location, self.wire.encoder.body)
        key = rngs.stream(self.cfg.seed, "trainable")
        sizes = jax.device_get(place.replicate(self._embedding_sizes(readers), self.placement.learner))
        # On one device, as every placement has it whole: one program for all of them.
        trainable = place.put_first(self._init(key, body, sizes), placed.trainable)
        for start in self._starts():
            trainable = place.put_first(start(trainable, readers), placed.trainable)
        return Weights(trainable, readers)

    def _starts(self) -> Iterator[Callable[[Tree, Tree], Tree]]:
        """Yields, in order, what replaces drawn parameters: (trainable, frozen) -> trainable."""
        spec, kv, aligned = self.cfg.encoder, self.cfg.adapter.kind == "kv", self.cfg.adapter.start == "aligned"
        if spec.run:
            yield self._read_encoder
        elif spec.pooling == "rare":
            yield self._count_tokens
        if aligned and not spec.run:
            yield functools.partial(states_start.start, self) if spec.states else self._align_encoder
        if kv:
            yield functools.partial(kv_start.start, self)
        elif aligned:
            yield self._align_adapters

    def _embedding_sizes(self, readers: Tree) -> dict[str, jax.Array]:
        """Returns the RMS of each reader's embeddings, scalars."""
        embeddings = {name: readers[name]["embed"].astype(jnp.float32) for name in self.wire.readers}
        return {name: adapter.rms(table, axis=None).reshape(()) for name, table in embeddings.items()}

    def _read_encoder(self, trainable: Tree, frozen: Tree) -> Tree:
        del frozen
        other = join.read_config(self.cfg)
        if join.is_exported(self.cfg):  # its readers may be nowhere
            shapes = {"encoder": self.placed().trainable["encoder"]}
            return trainable | join.read_trainable(self.cfg, shapes, without=other.llms)
        sizes = LatentWire(other, placement.one_mesh(self.placement.learner, list(other.llms)), outline=True)
        replicated = jax.tree.leaves(self.shardings.trainable)[0]
        shapes = jax.tree.map(lambda leaf: leaf.update(sharding=replicated), sizes.abstract.trainable)
        return trainable | {"encoder": join.read_trainable(self.cfg, shapes)["encoder"]}

    def _count_tokens(self, trainable: Tree, frozen: Tree) -> Tree:
        """Returns the tree with each token's rarity: -log of its share in the training texts, one more of each."""
        del frozen
        texts = list(dict.fromkeys(example.context for example in self.curriculum.examples("train")))
        counts = np.ones(len(trainable["encoder"]["head"]["pool"]["rarity"]), np.int64)
        with phase("counting the tokens of the training texts", len(texts), "texts") as done:
            for first in range(0, len(texts), COUNTED):
                part = texts[first : first + COUNTED]
                ids = np.concatenate(prompt_tokens.tokenize(self.layout.source, part))
                counts += np.bincount(ids, minlength=len(counts))
                done.advance(len(part))
        rarity = jnp.asarray(np.log(counts.sum() / counts), jnp.float32)
        encoder = trainable["encoder"]
        return trainable | {"encoder": encoder | {"head": encoder["head"] | {"pool": {"rarity": rarity}}}}

    def _align_encoder(self, trainable: Tree, frozen: Tree) -> Tree:
        """Returns the tree with the principal directions of the body's table as projection, the embeddings as mix."""
        encoder, table = trainable["encoder"], _embedding(trainable, frozen)
        with phase("initialising the encoder's projection from its body's embeddings"):
            head, find = encoder["head"], jax.jit(alignment.principal_directions, static_argnames="width")
            directions, project = find(table, self.wire.encoder.width), jax.tree.map(jnp.zeros_like, head["project"])
            project["kernel"] = project["kernel"].at[:, : directions.shape[1]].set(directions)
            head = head | {"project": project, "mix": alignment.mix_logits(head["mix"].shape[0])}
            return trainable | {"encoder": jax.block_until_ready(encoder | {"head": head})}

    @property
    def start_texts(self) -> list[str]:
        """Returns the training texts from which a start is computed, each once, some held out; of another seed others.

        They are shuffled, as a start reads the first ones, until it has tokens enough: sources follow each other.
        """
        texts = list(dict.fromkeys(example.context for example in self.curriculum.examples("train")))
        seed = self.cfg.seed
        chosen = examples.choose(texts, kv_start.TEXTS, seed=seed)
        return [chosen[index] for index in np.random.default_rng(seed).permutation(len(chosen))]

    def _align_adapters(self, trainable: Tree, readers: Tree) -> Tree:
        """Returns the tree with adapters whose linear path is the regression from tokens' latents to their readers'."""
        assert self.body_location is not None  # validation allows the aligned start for a pretrained body only
        table, sizes = _embedding(trainable, readers), self._embedding_sizes(readers)
        projection, adapters = trainable["encoder"]["head"]["project"]["kernel"], {}
        body_tokenizer = load_tokenizer(self.body_location)
        with phase("initialising the adapters from the readers' embeddings"):
            for name, params in trainable["adapters"].items():
                pieces = _match_pieces(body_tokenizer, self.tokenizers[name], len(table))
                target = place.replicate(readers[name]["embed"], self.placement.learner)
                kernel = jax.jit(alignment.linear_map)(table, projection, target, pieces)
                zeros = jax.tree.map(jnp.zeros_like, params["down"])
                adapters[name] = params | {"skip": {"kernel": kernel}, "down": zeros, "gain": sizes[name]}
            return jax.block_until_ready(trainable | {"adapters": adapters})

    def load_frozen(self) -> Tree:
        """Streams the readers' weights, and those of a frozen body, into their shards."""
        placed, spec = self.shardings.frozen, self.wire.encoder
        readers = self._load_readers(placed)
        if self.cfg.loss.kl and self.cfg.loss.teacher_k:
            self._teacher.fill(readers)
        if SHARED in placed and self.body_location and spec.body:
            whole = place.whole(self.placement.learner)
            readers[SHARED] = frozen_models.load_body(self.body_location, spec.body, spec.precision, whole)
        return readers

    # --- data

    @functools.cached_property
    def layout(self) -> prompt_tokens.Layout:
        spec, body = self.cfg.encoder, self.body_location
        source = load_source_tokenizer(body) if body else ByteTokenizer()
        sizes = {"window": spec.window, "windows": spec.windows, "slots": spec.slots, "width": spec.width}
        return self._make_layout(source=source, **sizes)

    def data(self, split: examples.Split, *, rows: Sequence[str] = (), least: int = 0) -> batches.Encoded:
        return batches.encode(self.questions(split, least=least), layout=self.layout, rows=rows)

    @functools.cached_property
    def surprisal(self) -> Surprisal:
        """Returns the encoder's pretrained body as a reader of texts; needs encoder.kind "lm"."""
        assert self.body_location is not None, "only rows of kind lm ask for it"
        return Surprisal(self.cfg, self.body_location, self.placement)

    @functools.cached_property
    def curriculum(self) -> Curriculum:
        return Curriculum(self.cfg, self.layout, self._teach)

    def longest_prompts(self) -> dict[str, int]:
        data = self.cfg.data
        message = wire_shapes.SHARED_PREFIX + self.cfg.encoder.slots + 1  # the task's vector
        asked = message + data.question_tokens + data.answer_tokens
        limits = {"encoder.slots, data.question_tokens and data.answer_tokens": asked}
        if objectives.needs_teacher(self.cfg.loss, "answer"):
            limits["data.context_tokens and data.answer_tokens"] = data.context_tokens + data.answer_tokens
        if passage := longest_passage(self.cfg):
            limits["encoder.slots and the stages' lengths"] = message + passage
        return limits

    def _teach(self, encoded: batches.Encoded) -> batches.Encoded:
        """Returns a data set; where the KL needs text prompts, the teacher's cached tokens may take their place."""
        cached = self.cfg.loss.teacher_k and objectives.needs_teacher(self.cfg.loss, encoded.task)
        return self._teacher.attach(encoded) if cached else encoded

    @functools.cached_property
    def _teacher(self) -> Teacher:
        return Teacher(self)

    # --- loss

    def share(self, trainable: Tree, source: Tree, rng: jax.Array, frozen: Tree = None) -> Tree:
        """Returns the latents after the channel; parts that the batch's stage freezes have no backward pass."""
        del rng  # nothing here is random
        encoder_params = trainable["encoder"]
        parts = {part for part, rates in encoder_rates(self.cfg).items() if not any(rates)}
        parts |= set(source["frozen"].parts) if "frozen" in source else set()
        still = {part: jax.lax.stop_gradient(encoder_params[part]) for part in parts}
        latents = self.wire.encode({"encoder": encoder_params | still}, source, frozen)
        if self._channels:
            channel = source["channel"]
            latents = codec.send(latents, channel[:, 1], channel[:, 2], choices=self._channels)
        return latents

    @functools.cached_property
    def _channels(self) -> tuple[tuple[int, int], ...]:
        """Returns the (width, bits) that a stage may draw; empty where none quantises."""
        channels = {
            (width, bits)
            for _, stage, _ in config.stages(self.cfg)
            for width in stage.widths or (self.cfg.encoder.width,)
            for bits in stage.bits or (EXACT,)
        }
        if all(bits == EXACT for _, bits in channels):
            return ()
        return tuple(sorted(channels | {(self.cfg.encoder.width, EXACT)}))  # validation does not quantise

    def part(self, name: str, trainable: Tree) -> Tree:
        return trainable["adapters"][name]

    def branch(self, name: str, part: Tree, frozen: Tree, fields: Tree, shared: Tree, rng: jax.Array) -> LossTerms:
        """Returns one reader's loss terms from the latents [b ...]; fields are [b ...]."""
        del rng
        task = fields["task"].name
        prefix = self.wire.prefix(part, name, shared, task)
        prompt = wire.wire_prompt(frozen, fields, prefix)
        states = self.wire.answer_states(frozen, name, prompt, fields)
        teacher_states = None
        if objectives.needs_teacher(self.cfg.loss, task) and "teacher" not in fields:
            text = wire.text_prompt(frozen, fields["context" if "packed" in fields else "text"])
            teacher_states = jax.lax.stop_gradient(self.wire.answer_states(frozen, name, text, fields))
        return self.measure(frozen, name, states, fields, teacher_states)

    # --- identity

    def identity(self) -> dict[str, str]:
        """Returns the fingerprints of the frozen readers, of the encoder's source and of all tokenizers."""
        spec = self.cfg.encoder
        origin = "from scratch"
        if self.body_location:
            origin = weights.fingerprint(self.body_location, describe=frozen_models.BODIES[spec.kind])
        if spec.run:
            origin = f"of the run {spec.run}" + (f", {origin}" if spec.rank else "")
        shape = f"{spec.kind} {spec.pooling} {spec.slots}x{spec.width} layers {spec.layers}"
        shape += "".join(f" {key} {value}" for key in ("rank", "states") if (value := getattr(spec, key)))
        shape += f" mask {spec.mask}" if spec.mask != "none" else ""
        identity = {"encoder": f"{shape}, {origin}"} | super().identity()
        if isinstance(source := self.layout.source, Tokenizer | BertTokenizer):
            identity["tokenizers/encoder"] = tokens.identify(source)
        return identity

    def content(self) -> dict[str, str]:
        """Returns hashes of all stages' training tokens and of the held-out text."""
        held_out = examples.digest(self.curriculum.examples("validation"))
        return {"train": self.data_schedule().digest(), "validation": held_out}

    # --- planning

    def batch_widths(self) -> Tree:
        return wire_shapes.example(self.cfg, self.wire.readers, packed=self.cfg.data.packed_tokens)

    def validation_widths(self) -> Tree:
        """Returns one held-out example as shapes: as one of training, with one question."""
        return wire_shapes.example(self.cfg, self.wire.readers, packed=0)


def _embedding(trainable: Tree, frozen: Tree) -> jax.Array:
    """Returns the embedding table, fp32, of an encoder's pretrained body, trained or frozen."""
    return (frozen[SHARED] if SHARED in frozen else trainable["encoder"]["body"])["embed"].astype(jnp.float32)


def _match_pieces(body: Tokenizer, reader: Tokenizer, count: int) -> jax.Array:
    """Returns i32 [v n]: a reader's ids of each of the encoder's `count` token strings, -1 beyond their end."""
    mark = body.encode("a")  # alone, a token of SentencePiece is decoded without its blank
    alone = body.decode(mark)
    texts = [body.decode([*mark, i]).removeprefix(alone) if i < body.vocab else "" for i in range(count)]
    pieces = [row[:PIECES] for row in reader.encode_behind(texts)]
    return jnp.asarray(batches.Field(pieces, PIECES, -1, left=False).collate(range(count))["ids"])
