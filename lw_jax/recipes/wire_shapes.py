"""Shapes of one training example of recipe `latentwire` at the configuration's limits, for the planner."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.core.types import Task, Tree
from lw_jax.data import prompt_tokens
from lw_jax.losses import objectives
from lw_jax.recipes.curriculum import longest_passage

SHARED_PREFIX = 40  # tokens of a prompt before the context, assumed where no tokenizer is at hand (Llama 3.1 chat: 36)


def example(cfg: Config, readers: Iterable[str], *, packed: int, messages: int) -> Tree:
    """Returns one example as shapes, of so many messages where it has questions, and those packed in so many tokens.

    It is of the stages' task that costs most (`_passages_cost_more`).
    """
    data, stages = cfg.data, [stage for _, stage, _ in config.stages(cfg)]
    task, answers = "answer", packed // 2 or data.answer_tokens
    widths = {"before": SHARED_PREFIX, "after": data.question_tokens}
    words, text = prompt_tokens.LITERAL_TOKENS * cfg.message.literals, data.context_tokens
    if not any(stage.answer for stage in stages) or _passages_cost_more(cfg, packed=packed, messages=messages):
        task, longest = _passage_task(cfg), longest_passage(cfg)
        answers, text = longest + 1, SHARED_PREFIX + longest
        widths |= {"after": min(words, 1)}  # a token behind literals
    if words:
        widths |= {"literals": words}
    teacher = objectives.needs_teacher(cfg.loss, task)
    if teacher and not cfg.loss.teacher_k:
        widths |= {"context" if packed and task == "answer" else "text": text}
    channel = jax.ShapeDtypeStruct((3,), jnp.int32)
    reader: Tree = {key: _field(width) for key, width in widths.items()}
    reader |= {
        "targets": jax.ShapeDtypeStruct((answers,), jnp.int32),
        "weights": jax.ShapeDtypeStruct((answers,), jnp.float32),
        "channel": channel,
        "task": Task(task),
    }
    if teacher and cfg.loss.teacher_k:
        top = (answers, cfg.loss.teacher_k)
        reader["teacher"] = {"ids": jax.ShapeDtypeStruct(top, jnp.int32), "logp": jax.ShapeDtypeStruct(top, "f2")}
    if packed and task == "answer":
        del reader["after"]
        ids = jax.ShapeDtypeStruct((packed,), jnp.int32)
        reader |= {"packed": {"ids": ids, "segments": ids}, "places": jax.ShapeDtypeStruct((answers,), jnp.int32)}
    else:
        reader["answer_inputs"] = jax.ShapeDtypeStruct((answers - 1,), jnp.int32)
    if messages > 1 and task == "answer":
        reader = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((messages, *leaf.shape), leaf.dtype), reader)
        channel = jax.ShapeDtypeStruct((messages, 3), jnp.int32)
    return {
        "source": _field(cfg.encoder.window * cfg.encoder.windows) | {"channel": channel},
        "readers": dict.fromkeys(readers, reader),
        "index": jax.ShapeDtypeStruct((), jnp.int32),
    }


def _passage_task(cfg: Config) -> str:
    """Returns the passages' task with the most passes."""
    taught = objectives.needs_teacher(cfg.loss, "continuation")
    return "continuation" if taught and any(stage.continuation for _, stage, _ in config.stages(cfg)) else "reconstruct"


def _passages_cost_more(cfg: Config, *, packed: int, messages: int) -> bool:
    """Returns whether a passage takes more of a reader than a text's questions.

    Whole logits dominate memory: then their targets decide; else the positions that a step's passes compute.
    """
    data, longest = cfg.data, longest_passage(cfg)
    if not longest:
        return False
    answers, words = packed // 2 or data.answer_tokens, prompt_tokens.LITERAL_TOKENS * cfg.message.literals
    if not cfg.compute.logits_chunk:
        return longest + 1 > answers * messages
    asked = packed or data.question_tokens + data.answer_tokens
    live = not cfg.loss.teacher_k
    of_questions = messages * (words + asked)
    if live and objectives.needs_teacher(cfg.loss, "answer"):
        of_questions += data.context_tokens + messages * asked
    of_passage = words + 1 + longest
    if live and objectives.needs_teacher(cfg.loss, _passage_task(cfg)):
        of_passage += SHARED_PREFIX + 2 * longest
    return of_passage > of_questions


def longest_prompts(cfg: Config) -> dict[str, int]:
    """Returns the most positions of a question's prompt and answer, by the keys that limit them; without an opening."""
    data = cfg.data
    message = cfg.encoder.slots + prompt_tokens.LITERAL_TOKENS * cfg.message.literals + data.question_tokens
    found = {"encoder.slots, message.literals and data.question_tokens": message}
    if objectives.needs_teacher(cfg.loss, "answer"):
        found["data.context_tokens"] = data.context_tokens
    return {f"{keys} and data.answer_tokens": limit + data.answer_tokens for keys, limit in found.items()}


def _field(width: int) -> Tree:
    return {"ids": jax.ShapeDtypeStruct((width,), jnp.int32), "mask": jax.ShapeDtypeStruct((width,), bool)}
