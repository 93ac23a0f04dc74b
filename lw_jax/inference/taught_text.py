"""Upper row of an evaluation: a reader of the text itself, its form of answer taught by one learned vector.

A wire teaches its readers the form of the answer too, by the task's vector behind the latents. Here the same vector
stands behind the text's own tokens and is all that is trained: what remains between both rows is what the message
lost.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lw_jax.core import config, precision, processes
from lw_jax.core import rng as rngs
from lw_jax.core.errors import UserError
from lw_jax.core.files import content_hash, whole
from lw_jax.core.progress import phase, say
from lw_jax.core.types import Example, Tree
from lw_jax.data import batches, examples
from lw_jax.data.batches import Encoded
from lw_jax.data.loader import batches_of
from lw_jax.data.packing import Packed
from lw_jax.hub import sources, weights
from lw_jax.losses import token_losses
from lw_jax.models import adapter, decoder, kv_prefix, rotary, wire
from lw_jax.recipes.wire_readers import WireReaders
from lw_jax.training import optimizers, run_folder
from sharding import place

FORMAT = 1  # raised when what is trained changes, so that kept vectors are not taken up
FIELDS = ("context", "asked")
QUESTIONS = 4  # of a step, or all of one text: many small steps teach one vector faster than few large ones
TOKENS = 2048  # of them at once, at most, or one example a device: their backward pass keeps every product
OPTIM = config.Optim(
    kind="adamw",
    learning_rate=1.0,  # x the size of the reader's embeddings
    warmup_steps=4,
    end_fraction=0.1,
    weight_decay=0.0,
    clip_norm=1.0,
    b2=0.99,
)


def teach(recipe: WireReaders, frozen: Tree, *, batch: int) -> dict[str, jax.Array]:
    """Returns each reader's vector f32[1 d] on its mesh, trained on examples of data.train or taken from the cache.

    `eval.taught_steps` of the configuration is the effort; `batch`: most examples at once, a multiple of the data axis.
    """
    with phase("reading the training data that teach the form of the answer"):
        encoded, vectors = _encode(recipe), {}
    for name in recipe.wire.readers:
        training = _TrainingSet.of(dataclasses.replace(encoded, readers={name: encoded.readers[name]}), recipe)
        path = sources.cache_root() / "taught" / f"{_identify(recipe, training, name)}.npy"
        # One process decides, so that all train or none does.
        width = recipe.wire.readers[name].config.width
        cached: list | None = processes.from_first(lambda path=path, width=width: _read(path, width))
        if cached is None:
            writable = functools.partial(run_folder.check_writable, path.parent, remedy="LW_JAX_CACHE names its cache")
            processes.from_first(writable)  # before the vector is trained, and lost
            vector, losses = _train(recipe, frozen[name], training, name, batch=batch)
            if not np.isfinite(vector).all():
                raise UserError(
                    f"text_taught {name}: the vector diverged in {len(losses)} steps, from loss {losses[0]:.3f} to "
                    f"{losses[-1]:.3f}, and must be finite; change config.eval.taught_steps or config.seed, or leave "
                    "the rows with a learned vector out of config.eval.rows"
                )
            if jax.process_index() == 0:
                learned = f"{len(losses)} steps of {training.describe()}, loss {losses[0]:.3f} at first"
                last = f"{np.mean(losses[-4:]):.3f} at last"
                say(f"text_taught {name}: one vector taught the form of the answer in {learned}, {last}")
                path.parent.mkdir(parents=True, exist_ok=True)
                with whole(path) as partial, partial.open("wb") as file:
                    np.save(file, vector)
            cached = vector.tolist()
        vectors[name] = place.replicate(np.asarray(cached, np.float32), recipe.placement.readers[name].mesh)
    return vectors


@dataclasses.dataclass(frozen=True)
class _TrainingSet:
    """Examples of one reader's training: questions, or texts with all of their questions packed."""

    stream: Encoded | Packed
    step_size: int  # examples of a step

    @classmethod
    def of(cls, encoded: Encoded, recipe: WireReaders) -> "_TrainingSet":
        """Returns the examples as training takes them: a packed text is read once for all of its questions."""
        tokens = recipe.cfg.data.packed_tokens
        if not tokens:
            return cls(encoded, QUESTIONS)
        packed = Packed(encoded, tokens)
        return cls(packed, max(1, round(QUESTIONS * len(packed) / len(encoded))))

    def rows(self, name: str, data: int) -> int:
        """Returns how many examples are read at once: a multiple of the data axis."""
        fields = self.stream.probe()["readers"][name]
        length = sum(fields[key]["ids"].shape[1] for key in (*FIELDS, "packed") if key in fields)
        return place.round_up(min(self.step_size, max(1, TOKENS // length // data * data)), data)

    def describe(self) -> str:
        if not isinstance(self.stream, Packed):
            return f"{self.step_size} examples"
        return f"all questions of {self.step_size} text{'s' if self.step_size > 1 else ''}"


def _encode(recipe: WireReaders) -> Encoded:
    """Returns texts, questions and answers of data.train, as many as the steps take; one beyond a limit is left out."""
    layout, steps = recipe.layout, recipe.cfg.eval.taught_steps
    questions = examples.load(recipe.cfg.data, "train", seed=recipe.cfg.seed)
    packed, groups = recipe.cfg.data.packed_tokens > 0, {}
    for number, example in enumerate(questions):
        groups.setdefault(example.context if packed else number, []).append(example)
    count = steps * max(1, round(QUESTIONS * len(groups) / len(questions)))
    lists: list[list[Example]] = list(groups.values())
    chosen = [example for number in examples.spread(len(lists), count) for example in lists[number]]
    data = layout.data if layout.data.overlong == "cut" else dataclasses.replace(layout.data, overlong="drop")
    return batches.encode(chosen, layout=dataclasses.replace(layout, data=data), rows=FIELDS[:1] if packed else FIELDS)


def _train(
    recipe: WireReaders, params: Tree, training: _TrainingSet, name: str, *, batch: int
) -> tuple[np.ndarray, list[float]]:
    steps, mesh = recipe.cfg.eval.taught_steps, recipe.placement.readers[name].mesh
    batch = min(batch, training.rows(name, recipe.placement.data))
    measure, apply, state = _programs(recipe.wire, name, steps)
    size = float(adapter.rms(jnp.asarray(params["embed"], jnp.float32), axis=None).reshape(()))
    first = jax.random.normal(
        rngs.stream(recipe.cfg.seed, f"taught/{name}"), (1, recipe.wire.readers[name].config.width)
    )
    trainable = place.replicate({"tasks": first}, mesh)
    moments, losses = state(trainable), []
    order = _order(len(training.stream), steps, training.step_size, seed=recipe.cfg.seed)
    scale = place.replicate(np.float32(size), mesh)
    with phase(f"text_taught {name}: teaching the form of the answer", steps, "steps") as done:
        for step in done.track(range(steps)):
            gradient: Any = None
            for host in batches_of(training.stream, order[step].tolist(), batch, share=processes.share()):
                fields = batches.weigh({"readers": {name: host["readers"][name]}}, host["valid"])["readers"][name]
                sums = measure(params, trainable, scale, place.put_eval(fields, mesh))
                gradient = sums if gradient is None else jax.tree.map(jnp.add, gradient, sums)
            trainable, moments, loss = apply(trainable, moments, gradient)
            losses.append(float(loss))
    return np.asarray(jax.device_get(trainable["tasks"])) * size, losses


def _programs(wired: wire.Wire, name: str, steps: int):
    """Returns jitted (reader, trainable, size, fields) -> sums, (trainable, moments, sums) -> next, and the start."""
    shape = {"tasks": jax.ShapeDtypeStruct((1, wired.readers[name].config.width), jnp.float32)}
    optimizer = optimizers.make(OPTIM, phases=[optimizers.Phase(steps)], rates=((".*", 1.0),), abstract=shape)

    def loss(trainable: Tree, params: Tree, size: jax.Array, fields: Tree) -> tuple[jax.Array, jax.Array]:
        prompt = _read_before(wired.readers[name], params, fields, trainable["tasks"] * size)
        logits = wired.answer_logits(params, name, prompt, fields)
        return token_losses.nll(logits, fields["targets"], fields["weights"])

    def measure(params: Tree, trainable: Tree, size: jax.Array, fields: Tree):
        return jax.value_and_grad(loss, has_aux=True)(trainable, params, size, fields)

    def apply(trainable: Tree, moments: Tree, sums: Any):
        (total, weight), gradient = sums
        gradient = jax.tree.map(lambda leaf: leaf / weight, gradient)
        updates, moments = optimizer.update(gradient, moments, trainable)
        return optax.apply_updates(trainable, updates), moments, total / weight

    return jax.jit(measure), jax.jit(apply), jax.jit(optimizer.init)


def _read_before(reader: wire.Reader, params: Tree, fields: Tree, vectors: jax.Array) -> wire.Prompt:
    """Returns `wire.taught_prompt` with the text's keys and values: what stands before the vector has no gradient."""
    whole, context = wire.taught_prompt(params, fields, vectors), fields["context"]
    if isinstance(reader.config.rope_scaling, rotary.LongRope):
        return whole  # its frequencies depend on the whole length
    x, width = decoder.embed(params, context["ids"]), context["mask"].shape[1]
    read = kv_prefix.take(params, reader.config, x, mask=context["mask"], mode=reader.mode)
    read = jax.lax.stop_gradient(read._replace(k=reader.constrain(read.k), v=reader.constrain(read.v)))
    return wire.Prompt(whole.embeddings[:, width:], whole.mask[:, width:], kv_prefix=read)


def _order(count: int, steps: int, size: int, *, seed: int) -> np.ndarray:
    """Returns the examples of each step i32[steps size]: all of them once before any is seen again."""
    rng, total = np.random.default_rng(seed), steps * size
    rounds = [rng.permutation(count) for _ in range(-(-total // count))]
    return np.concatenate(rounds)[:total].reshape(steps, size)


def _identify(recipe: WireReaders, training: _TrainingSet, name: str) -> str:
    cfg = recipe.cfg
    content = {
        "format": FORMAT,
        "reader": [name, weights.identify(recipe.locations[name])],  # its first vector is drawn by name
        "stored": cfg.llms[name].weights,
        "arithmetic": precision.resolve(cfg.compute.dtype, recipe.placement.platform),
        "optim": dataclasses.asdict(OPTIM),
        "steps": [cfg.eval.taught_steps, training.step_size],
        "seed": cfg.seed,
        "examples": training.stream.digest(),
    }
    return content_hash(content, size=12)


def _read(path: Path, width: int) -> list | None:
    """Returns a cached vector [1 d]; None where there is none or the file is damaged: it is trained anew."""
    try:
        vector = np.load(path)
    except (FileNotFoundError, ValueError, EOFError):
        return None
    whole = vector.shape == (1, width) and vector.dtype == np.float32 and np.isfinite(vector).all()
    return vector.tolist() if whole else None
