"""Memory, FLOPs and traffic of one micro-batch of recipe `latentwire`, for the planner."""

import dataclasses
import math

import jax.numpy as jnp

from lw_jax.core.config import Config
from lw_jax.core.types import Tree
from lw_jax.losses import chunked
from lw_jax.models import encoder
from lw_jax.models import pass_costs as arithmetic
from lw_jax.models.bert import BertConfig
from lw_jax.models.decoder import DecoderConfig
from lw_jax.models.pass_costs import Terms
from lw_jax.models.wire import Wire
from lw_jax.recipes import frozen_models
from sharding.placement import Placement


def terms(cfg: Config, wire: Wire, placement: Placement, widths: Tree, *, rows: int) -> dict[str, Terms]:
    """Returns the encoder's costs under "", each reader's under its name; `widths` as `batch_widths` gives them.

    A reader has `rows` rows, or as many for each message where the widths are of several a text.
    """
    spec, body, positions = wire.encoder, wire.encoder.computed, widths["source"]["ids"].shape[0]
    one = arithmetic.Pass(rows, positions, 0, cfg.compute.remat, jnp.dtype(spec.precision.values).itemsize)
    if isinstance(body, BertConfig):
        found = arithmetic.trained_bert(body, one)
    elif body is not None and spec.pairs is not None:
        found = arithmetic.adapted(body, spec.pairs, one)
    elif body is not None:
        found = arithmetic.trained(body, one)
    else:
        found = arithmetic.trained_bytes(spec.layers or encoder.BYTE_LAYERS, spec.width, one)
    if spec.taps and isinstance(body, DecoderConfig):
        found = dataclasses.replace(found, bytes=found.bytes + arithmetic.tapped_bytes(body, one))
    messages = math.prod(widths["source"]["channel"].shape[:-1])
    readers = {
        name: _reader(cfg, wire, placement, name, widths["readers"][name], (rows, rows * messages))
        for name in wire.readers
    }
    return {"": found} | readers


def _reader(cfg: Config, wire: Wire, placement: Placement, name: str, fields: Tree, counts: tuple[int, int]) -> Terms:
    texts, messages = counts
    rows = texts * math.prod(fields["targets"].shape[:-1])
    model, llm, at = wire.readers[name].config, cfg.llms[name], placement.readers[name]
    answers = fields["targets"].shape[-1]
    shared = fields["before"]["ids"].shape[-1]  # read once for all rows
    asked = sum(fields[key]["ids"].shape[-1] for key in ("after", "packed") if key in fields)
    given = wire.encoder.slots if wire.readers[name].kind == "kv" else 0  # as keys and values, which no pass makes
    answer = 0 if "packed" in fields else answers - 1  # inputs beside those asked
    positions = asked + wire.encoder.slots - given + 1 + answer
    own = frozen_models.precision_of(cfg, llm, placement.platform)
    one = frozen_models.teacher_forced(cfg, at=at, own=own, rows=rows, positions=positions, answers=answers)
    pieces = chunked.pieces(cfg.compute.logits_chunk, rows=rows, length=answers, data=1)  # the rows are one device's
    one = dataclasses.replace(one, before=shared + given, slots=given)
    found = arithmetic.frozen(model, dataclasses.replace(one, pieces=pieces))
    unpacked = arithmetic.restored_bytes(model, llm.weights, one.size) / one.model
    opening = dataclasses.replace(one, rows=1, positions=shared, answers=0, before=0, slots=0)
    parts = [found, arithmetic.shared_prefix(model, opening)]
    if given:
        parts.append(arithmetic.kv_adapter(model, one, wire.encoder.width, texts=messages))
    sums = {field.name: sum(getattr(part, field.name) for part in parts) for field in dataclasses.fields(Terms)}
    sums |= {key: sums[key] + unpacked for key in ("bytes", "forward")}
    found = dataclasses.replace(found, **sums)
    text = next((fields[key] for key in ("text", "context") if key in fields), None)
    if text is not None:
        length = text["ids"].shape[-1] + (fields["packed"]["ids"].shape[-1] if "packed" in fields else answers - 1)
        one = dataclasses.replace(one, before=0, slots=0, positions=length)
        teacher = arithmetic.forward_only(model, one)
        sums = {key: getattr(found, key) + getattr(teacher, key) for key in ("flops", "traffic", "read")}
        found = dataclasses.replace(found, forward=max(found.forward, teacher.forward + unpacked), **sums)
    return found
