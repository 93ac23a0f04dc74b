"""Shapes of one training example of recipe `latentwire` at the configuration's limits, for the planner."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.core.types import Task, Tree
from lw_jax.losses import objectives
from lw_jax.recipes.curriculum import longest_passage

AGAIN = 24  # tokens that ask for a text's repetition, assumed likewise
SHARED_PREFIX = 40  # tokens of a prompt before the context, assumed where no tokenizer is at hand (Llama 3.1 chat: 36)


def example(cfg: Config, readers: Iterable[str], *, packed: int) -> Tree:
    """Returns one example as shapes, its questions packed in so many tokens.

    It is of the stages' task that costs a reader most (`_cost`).
    """
    channel = jax.ShapeDtypeStruct((3,), jnp.int32)
    candidates = []
    if any("answer" in stage.tasks for _, stage, _ in config.stages(cfg)):
        candidates.append(_questions(cfg, packed))
    if longest_passage(cfg):
        candidates.append(_passage(cfg))
    reader = max(candidates, key=lambda each: _cost(cfg, each)) | {"channel": channel}
    return {
        "source": _field(cfg.encoder.window * cfg.encoder.windows) | {"channel": channel},
        "readers": dict.fromkeys(readers, reader),
        "index": jax.ShapeDtypeStruct((), jnp.int32),
    }


def cache_example(cfg: Config, readers: Iterable[str]) -> Tree:
    """Returns the same of encoder.kind "cache": each reader has the text itself, another one, and asks for it again."""
    shapes = example(cfg, readers, packed=0)
    text, again = _field(cfg.data.context_tokens), _field(AGAIN)
    for name, fields in shapes["readers"].items():
        after = fields["after"] if fields["task"].name == "answer" else again
        shapes["readers"][name] = fields | {"own": text, "other": text, "again": again, "after": after}
    return shapes


def _questions(cfg: Config, packed: int) -> Tree:
    """Returns a reader's fields of one message's questions: one, or those packed in so many tokens."""
    answers = packed // 2 or cfg.data.answer_tokens
    reader = _reader("answer", answers)
    if objectives.needs_teacher(cfg.loss, "answer"):
        if cfg.loss.teacher_k:
            top = (answers, cfg.loss.teacher_k)
            reader["teacher"] = {"ids": jax.ShapeDtypeStruct(top, jnp.int32), "logp": jax.ShapeDtypeStruct(top, "f2")}
        else:
            reader["context" if packed else "text"] = _field(cfg.data.context_tokens)
    if packed:
        ids = jax.ShapeDtypeStruct((packed,), jnp.int32)
        return reader | {
            "packed": {"ids": ids, "segments": ids},
            "places": jax.ShapeDtypeStruct((answers,), jnp.int32),
        }
    return reader | {
        "after": _field(cfg.data.question_tokens),
        "answer_inputs": jax.ShapeDtypeStruct((answers - 1,), jnp.int32),
    }


def _passage(cfg: Config) -> Tree:
    longest = longest_passage(cfg)
    return _reader("reconstruct", longest + 1) | {
        "after": _field(0),
        "answer_inputs": jax.ShapeDtypeStruct((longest,), jnp.int32),
    }


def _reader(task: str, answers: int) -> Tree:
    """Returns the fields that every task has."""
    return {
        "before": _field(SHARED_PREFIX),
        "targets": jax.ShapeDtypeStruct((answers,), jnp.int32),
        "weights": jax.ShapeDtypeStruct((answers,), jnp.float32),
        "task": Task(task),
    }


def _cost(cfg: Config, reader: Tree) -> int:
    """Returns the positions that the passes of one message compute; where whole logits dominate memory, their targets.

    What comes before the message is the same in every row and is read once.
    """
    if not cfg.compute.logits_chunk:
        return reader["targets"].size
    width = {key: reader[key]["ids"].size for key in ("after", "context", "packed", "text") if key in reader}
    width["answer"] = reader["answer_inputs"].size if "answer_inputs" in reader else 0
    question = width.get("after", 0) + width.get("packed", 0) + width["answer"]
    text = width.get("context", 0) or width.get("text", 0)
    return question + (text + question if text else 0)


def _field(width: int) -> Tree:
    return {"ids": jax.ShapeDtypeStruct((width,), jnp.int32), "mask": jax.ShapeDtypeStruct((width,), bool)}
