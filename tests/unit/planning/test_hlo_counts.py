"""Counts of compiled programs against counts by hand; notations that the CPU does not write are given as text."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lw_jax.core.errors import UserError
from lw_jax.planning import hlo_counts
from tests import commands

ROOT = Path(__file__).resolve().parents[3]
B, D, F, L = 53, 37, 71, 5  # batch, width, ffn, layers
F32 = 4  # bytes

pytestmark = pytest.mark.optimized  # what XLA writes into the text depends on its passes


def shape(*dims, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


def program(f, *args):
    return hlo_counts.analyse(jax.jit(f).lower(*args).compile().as_text())


def mlp(x, w):
    return jnp.tanh(x @ w["up"]) @ w["down"], None


def stack(layers):
    return {"up": shape(layers, D, F), "down": shape(layers, F, D)}


# --- matrix products ---


PRODUCT = 2 * B * D * F
SCANNED = shape(B, D), stack(L)
FLOPS = {
    "a scan counts its body once a round": (lambda x, w: jax.lax.scan(mlp, x, w)[0], SCANNED, 2 * L * PRODUCT),
    # forward 2, again 1 (the last product of a layer is not needed), backward to x 2
    "a gradient with recomputation counts what runs again": (
        jax.grad(lambda x, w: jnp.sum(jax.lax.scan(jax.checkpoint(mlp), x, w)[0] ** 2)),
        SCANNED,
        5 * L * PRODUCT,
    ),
    "nested loops multiply": (
        lambda x, w: jax.lax.scan(lambda x, _: jax.lax.scan(mlp, x, w), x, length=3)[0],
        SCANNED,
        3 * 2 * L * PRODUCT,
    ),
    "a batched contraction counts every dimension once": (
        lambda q, k: jnp.einsum("bthe,bshe->bhts", q, k),
        (shape(B, 29, 3, 17), shape(B, F, 3, 17)),
        2 * B * 3 * 29 * F * 17,
    ),
    "a conditional counts its heavier branch": (
        lambda p, x, w: jax.lax.cond(p, lambda: x @ w @ w.T, lambda: (x @ w) @ w.T @ w @ w.T),
        (shape(dtype=jnp.bool), shape(B, D), shape(D, F)),
        4 * PRODUCT,
    ),
    "a loop of unknown length counts one round": (
        lambda x, w: jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: jnp.tanh(x @ w), x),
        (shape(B, B), shape(B, B)),
        2 * B**3,
    ),
}


@pytest.mark.parametrize("rule", FLOPS)
def test_flops_are_those_by_hand(rule):
    function, args, flops = FLOPS[rule]
    assert program(function, *args).flops == flops


def test_exact_products_are_told_from_those_that_may_be_tf32():
    def both(x, w):
        return jnp.dot(x, w, precision="highest") + jnp.dot(x + 1, w)

    found = program(both, shape(B, D), shape(D, F))
    assert {kernel.arithmetic: kernel.flops for kernel in found.kernels if kernel.flops} == {
        "fp32": 2 * B * D * F,
        "tf32": 2 * B * D * F,
    }


# --- memory traffic ---


def test_product_reads_operands_and_writes_result():
    found = program(lambda x, w: x @ w, shape(B, D), shape(D, F))
    assert found.moved_bytes == F32 * (B * D + D * F + B * F)


def test_elementwise_fusion_reads_once_and_writes_once():
    found = program(lambda x, y: jnp.tanh(x * y + x) * 2, shape(B, D), shape(B, D))
    assert (found.moved_bytes, found.flops) == (3 * F32 * B * D, 0)


def test_scan_reads_a_layer_a_round_not_the_stack():
    def total(layers):
        found = program(lambda x, w: jax.lax.scan(mlp, x, w)[0], shape(B, D), stack(layers))
        return found.moved_bytes

    # Were the whole stack read in each round, the growth of 4 more layers would itself grow.
    assert total(9) - total(5) == total(13) - total(9)
    # At least the operands and results of both products; besides, weights and states are copied, and tanh is a pass.
    products = F32 * 2 * (B * D + D * F + B * F)
    assert products <= (total(9) - total(5)) / 4 <= 3 * products


FUSIONS = """HloModule m, is_scheduled=true, num_partitions=1

%slice (p0: bf16[11,7,5], p1: s32[]) -> bf16[1,7,5] {
  %p0 = bf16[11,7,5]{2,1,0} parameter(0)
  %view = bf16[11,35]{1,0} bitcast(%p0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %ds = bf16[1,35]{1,0} dynamic-slice(%view, %p1, %zero), dynamic_slice_sizes={1,35}
}

%update (p0: f32[11,35], p1: s32[], p2: f32[1,35]) -> f32[11,35] {
  %p0 = f32[11,35]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[1,35]{1,0} parameter(2)
  %zero = s32[] constant(0)
  ROOT %dus = f32[11,35]{1,0} dynamic-update-slice(%p0, %p2, %p1, %zero)
}

%both (p0: f32[11,35], p1: s32[]) -> (f32[1,35], f32[11,35]) {
  %p0 = f32[11,35]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %ds = f32[1,35]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,35}
  %neg = f32[11,35]{1,0} negate(%p0)
  ROOT %t = (f32[1,35]{1,0}, f32[11,35]{1,0}) tuple(%ds, %neg)
}

ENTRY %main (a: bf16[11,7,5], b: f32[11,35], i: s32[]) -> f32[11,35] {
  %a = bf16[11,7,5]{2,1,0} parameter(0)
  %b = f32[11,35]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %one = bf16[1,35]{1,0} fusion(%a, %i), kind=kLoop, calls=%slice
  %row = f32[1,35]{1,0} convert(%one)
  %two = f32[11,35]{1,0} fusion(%b, %i, %row), kind=kLoop, calls=%update
  %three = (f32[1,35]{1,0}, f32[11,35]{1,0}) fusion(%two, %i), kind=kLoop, calls=%both
  %four = f32[11,35]{1,0} dynamic-update-slice(%two, %row, %i, %i)
  %cs = (f32[11,35]{1,0}, f32[11,35]{1,0}, u32[]) copy-start(%two)
  ROOT %cd = f32[11,35]{1,0} copy-done(%cs)
}
"""


def test_fusion_touches_of_its_operands_what_it_uses():
    whole, row, index = 11 * 35 * 4, 35 * 4, 4
    found = sorted(kernel.bytes for kernel in hlo_counts.analyse(FUSIONS).kernels)
    assert found == sorted(
        [
            35 * 2 + 35 * 2 + index,  # slice: reads and writes bf16 rows
            35 * 2 + row,  # convert
            row + row + index,  # update in place: reads and writes the row
            whole + row + whole + index,  # both: the negation needs all of it
            2 * row,  # update outside of a fusion
            2 * whole,  # copy
        ]
    )


def test_text_that_is_no_module_is_refused():
    with pytest.raises(UserError, match="as_text"):
        hlo_counts.analyse("func.func @main() {\n}\n")


# --- what GPU programs write ---

GEMM = """HloModule m, is_scheduled=true, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (s: (s32[], bf16[5,11,7])) -> (s32[], bf16[5,11,7]) {
  %s = (s32[], bf16[5,11,7]{2,1,0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %x = bf16[5,11,7]{2,1,0} get-tuple-element(%s), index=1
  %gemm = (f32[5,11,11]{2,1,0}, s8[4194304]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul", \
metadata={op_name="a(b"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["2"],"lhs_batch_dimensions":["0"]},\
"precision_config":{"operand_precision":["DEFAULT","DEFAULT"],"algorithm":"ALG_UNSET"}}}
  %g = f32[5,11,11]{2,1,0} get-tuple-element(%gemm), index=0
  %ars = f32[5,11,11]{2,1,0} all-reduce-start(%g), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  %ard = f32[5,11,11]{2,1,0} all-reduce-done(%ars)
  %ags = (bf16[5,11,7]{2,1,0}, bf16[5,44,7]{2,1,0}) all-gather-start(%x), replica_groups={}, dimensions={1}
  %agd = bf16[5,44,7]{2,1,0} all-gather-done(%ags)
  ROOT %t = (s32[], /*index=1*/bf16[5,11,7]{2,1,0:T(8,128)}) tuple(%n, %x)
}

%cond (s: (s32[], bf16[5,11,7])) -> pred[] {
  %s = (s32[], bf16[5,11,7]{2,1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%triton (p: f8e4m3fn[3,13], q: f8e4m3fn[13,2]) -> f32[3,2] {
  %p = f8e4m3fn[3,13]{1,0} parameter(0)
  %q = f8e4m3fn[13,2]{1,0} parameter(1)
  ROOT %dot = f32[3,2]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (s: (s32[], bf16[5,11,7]), p: f8e4m3fn[3,13], q: f8e4m3fn[13,2]) -> bf16[5,11,7] {
  %s = (s32[], bf16[5,11,7]{2,1,0}) parameter(0)
  %p = f8e4m3fn[3,13]{1,0} parameter(1)
  %q = f8e4m3fn[13,2]{1,0} parameter(2)
  %loop = (s32[], bf16[5,11,7]{2,1,0}) while(%s), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"6"},"dynamic_variables":[]}
  %small = f32[3,2]{1,0} fusion(%p, %q), kind=kCustom, calls=%triton
  %attention = (f32[3,2]{1,0}, u8[0]{0}) custom-call(%small), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %x = bf16[5,11,7]{2,1,0} get-tuple-element(%loop), index=1
}
"""


INTEGERS = """HloModule integers

ENTRY %main (x: s8[6,16], w: s8[24,16]) -> s32[6,24] {
  %x = s8[6,16]{1,0} parameter(0)
  %w = s8[24,16]{1,0} parameter(1)
  ROOT %y = s32[6,24]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""


def test_product_of_bytes_is_counted_as_one_of_integers():
    (kernel,) = hlo_counts.analyse(INTEGERS).kernels
    assert kernel == hlo_counts.Kernel("int8", 2 * 6 * 24 * 16, 6 * 16 + 24 * 16 + 6 * 24 * 4, 1)


def test_library_call_counts_its_product_without_its_workspace():
    found = hlo_counts.analyse(GEMM)
    gemm, triton = (kernel for kernel in found.kernels if kernel.flops)
    x = 5 * 11 * 7 * 2  # both operands are the same array
    assert gemm == hlo_counts.Kernel("bf16", 2 * 5 * 11 * 11 * 7, x + 5 * 11 * 11 * 4, 6)
    assert triton == hlo_counts.Kernel("fp8", 2 * 3 * 2 * 13, 3 * 13 + 13 * 2 + 3 * 2 * 4, 1)


def test_asynchronous_collectives_in_a_loop_are_counted_once_a_round():
    gather, reduce = hlo_counts.analyse(GEMM).collectives
    x, g = 5 * 11 * 7 * 2, 5 * 11 * 11 * 4
    assert gather == hlo_counts.Collective("all-gather", ((0, 1, 2, 3),), x, 3 * x, 6)
    assert reduce == hlo_counts.Collective("all-reduce", ((0, 1), (2, 3)), g, g, 6)


FUSED = """HloModule m, is_scheduled=true, num_partitions=4

%reduced (p: bf16[5,11]) -> bf16[5,11] {
  %p = bf16[5,11]{1,0} parameter(0)
  ROOT %c = bf16[5,11]{1,0} all-reduce(%p), channel_id=1, replica_groups=mesh['model'=4] {'model'}, to_apply=%add
}

ENTRY %main (x: bf16[5,11]) -> bf16[5,11] {
  %x = bf16[5,11]{1,0} parameter(0)
  %start = ((bf16[5,11]{1,0}), bf16[5,11]{1,0}) fusion-start(%x), kind=kCustom, calls=%reduced
  ROOT %done = bf16[5,11]{1,0} fusion-done(%start)
}
"""


def test_collective_inside_a_fusion_is_counted_as_jax_0_11_writes_it():
    found = hlo_counts.analyse(FUSED)
    (reduce,) = found.collectives
    assert reduce == hlo_counts.Collective("all-reduce", ((0, 1, 2, 3),), 5 * 11 * 2, 5 * 11 * 2 * 2 * 3 // 4)
    assert found.kernels == ()


# Frame 2 lies in frame 1: a parent's number is one more than its row's. Frame 3 is a library's, called from frame 2.
TRACED = """HloModule m, is_scheduled=true

FileNames
1 "/home/someone/lw_jax/training/train_step.py"
2 "/home/someone/lw_jax/models/decoder.py"
3 "/usr/lib/python3/site-packages/jax/_src/nn/functions.py"

FunctionNames
1 "Fused.__init__.<locals>.step"
2 "unit_rms"
3 "silu"

FileLocations
1 {file_name_id=1 function_name_id=1 line=5 end_line=5 column=8 end_column=26}
2 {file_name_id=2 function_name_id=2 line=6 end_line=6 column=8 end_column=26}
3 {file_name_id=3 function_name_id=3 line=7 end_line=7 column=8 end_column=26}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %n = f32[4]{0} negate(%p), metadata={op_name="neg" stack_frame_id=3}
}

%body (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  ROOT %s = (s32[], f32[4]{0}) parameter(0)
}

ENTRY %main (x: f32[4], s: (s32[], f32[4])) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %s = (s32[], f32[4]{0}) parameter(1)
  %loop = (s32[], f32[4]{0}) while(%s), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  %sum = f32[4]{0} add(%x, %x), metadata={op_name="add" stack_frame_id=1}
  %lost = f32[4]{0} add(%sum, %x)
  ROOT %fusion = f32[4]{0} fusion(%lost), kind=kLoop, calls=%fused
}
"""


def test_a_kernel_says_the_innermost_function_of_the_project_and_a_loop_is_none():
    found = hlo_counts.kernels_by_name(TRACED)
    assert {name: found[name].source for name in ("sum", "lost", "fusion")} == {
        "sum": "train_step.Fused.__init__",
        "lost": "",
        "fusion": "decoder.unit_rms",
    }
    assert "loop" not in found
    assert {kernel.source for kernel in hlo_counts.analyse(TRACED).kernels} == {one.source for one in found.values()}


GROUPS = """HloModule m, num_partitions=8

ENTRY %main (x: f32[16]) -> f32[16] {{
  %x = f32[16]{{0}} parameter(0)
  ROOT %c = f32[16]{{0}} {operation}
}}
"""


@pytest.mark.parametrize(
    ("notation", "groups"),
    [
        ("{{0,3},{1,2}}", ((0, 3), (1, 2))),
        ("{}", (tuple(range(8)),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'b':(2)2}", ((0, 1), (4, 5), (2, 3), (6, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
    ],
)
def test_groups_are_read_in_every_notation(notation, groups):
    operation = f"all-reduce(%x), channel_id=1, replica_groups={notation}, use_global_device_ids=true, to_apply=%add"
    (found,) = hlo_counts.analyse(GROUPS.format(operation=operation)).collectives
    assert sorted(map(sorted, found.groups)) == sorted(map(sorted, groups))


def test_unknown_notation_of_groups_is_refused():
    with pytest.raises(UserError, match="replica_groups"):
        hlo_counts.analyse(GROUPS.format(operation="all-reduce(%x), replica_groups=<new>, to_apply=%add"))


def test_text_with_anything_missing_is_counted_or_not_understood():
    """Whatever another version of XLA writes: never an error of another kind."""
    unread = 0
    for text in (GEMM, FUSIONS, INTEGERS):
        for place in range(0, len(text), 17):
            for changed in (text[:place], text[:place] + text[place + 3 :], text[:place] + "}(" + text[place:]):
                try:
                    hlo_counts.analyse(changed)
                except hlo_counts.Unreadable:
                    unread += 1
    assert unread > 50


@pytest.mark.parametrize(
    ("operation", "wire"),
    [
        ("all-reduce(%x), replica_groups={{0,1,2,3}}", 2 * 64 * 3 // 4),
        ("all-gather(%x), replica_groups={{0,1,2,3}}", 64 * 3),
        ("reduce-scatter(%x), replica_groups={{0,1,2,3}}", 64 * 3 // 4),
        ("all-to-all(%x), replica_groups={{0,1,2,3}}", 64 * 3 // 4),
        ("collective-permute(%x), source_target_pairs={{0,1},{1,0},{2,2}}", 64),
        ("collective-permute(%x), source_target_pairs={{0,0},{1,1}}", 0),
        ("all-reduce(%x), replica_groups={{0},{1}}", 0),
    ],
)
def test_device_sends_what_the_ring_algorithm_sends(operation, wire):
    (found,) = hlo_counts.analyse(GROUPS.format(operation=operation)).collectives
    assert (found.operand_bytes, found.wire_bytes) == (16 * F32, wire)


# --- sharded programs ---


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def test_tensor_parallel_scan_reduces_over_the_model_axis_once_a_layer(mesh):
    width, ffn, batch = 40, 72, 54  # what the axes divide

    def place(*spec):
        return NamedSharding(mesh, P(*spec))

    up = shape(L, width, ffn, sharding=place(None, None, "model"))
    down = shape(L, ffn, width, sharding=place(None, "model"))
    x = shape(batch, width, sharding=place("data"))
    found = program(lambda x, w: jax.lax.scan(mlp, x, w)[0], x, {"up": up, "down": down})
    assert found.flops == L * 2 * (2 * batch * width * ffn) // 8
    (reduce,) = found.collectives
    assert (reduce.kind, reduce.executed) == ("all-reduce", L)
    assert sorted(reduce.groups) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert reduce.operand_bytes == F32 * batch // 2 * width
    assert reduce.wire_bytes == reduce.operand_bytes * 2 * 3 // 4


ABSENT = """
import dataclasses, json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from lw_jax.core.precision import Precision
from lw_jax.models import decoder
from lw_jax.models.ttt_inner import Inner, Text
from lw_jax.models.ttt_kernel import read_by_kernel
from lw_jax.planning import gpus, hlo_counts
from lw_jax.training.traced_costs import trace
from sharding import shards
from tests import ttt_cases

target = gpus.parse("h100x4")
mesh = Mesh(np.array(gpus.compile_devices(target)), ("model",))
def shape(*dims, spec=P()):
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
def loss(x, w):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w["up"]) @ w["down"], None))
    return jnp.sum(jax.lax.scan(layer, x, w)[0].astype(jnp.float32) ** 2)
w = {"up": shape(5, 512, 1536, spec=P(None, None, "model")), "down": shape(5, 1536, 512, spec=P(None, "model"))}
lowered = jax.jit(jax.grad(loss)).lower(shape(256, 512), w)
print(json.dumps(dataclasses.asdict(hlo_counts.analyse(gpus.compile_lowered(lowered).as_text()))))

cfg = decoder.DecoderConfig(
    vocab=512, width=512, layers=3, heads=8, kv_heads=4, head_dim=64, ffn=1024, rope_theta=1e4, norm_eps=1e-6,
    max_positions=256, tied=True, qkv_bias=False,
)
def read(x, params):
    return jnp.sum(decoder.forward(params, cfg, x, mask=jnp.ones(x.shape[:2], bool)).hidden.astype(jnp.float32) ** 2)
one = NamedSharding(Mesh(np.array(gpus.compile_devices(gpus.parse("h100x1"))), ("data",)), P())
args = jax.ShapeDtypeStruct((16, 64, 512), jnp.bfloat16, sharding=one), jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), decoder.abstract(cfg, jnp.bfloat16)
)
compiled = gpus.compile_lowered(jax.jit(jax.grad(read)).lower(*args))
print(json.dumps([hlo_counts.analyse(compiled.as_text()).flops, trace(jax.grad(read), *args).flops]))

mesh = Mesh(np.array(gpus.compile_devices(gpus.parse("h100x2"))), ("data",))
def place(leaf, dtype=None, spec=P("data")):
    return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=NamedSharding(mesh, spec))
p, weights, text, towards = jax.eval_shape(lambda: ttt_cases.draw_inner(6))
text = Text(*(place(x, jnp.bfloat16) for x in text[:3]), place(text.rate))
def by_kernel(p, weights, text, towards):
    inner = Inner(p, Precision("bfloat16", "bfloat16"))
    return jnp.sum(read_by_kernel(inner, text, weights, shards.by_rows(mesh)) * towards)
args = jax.tree.map(lambda leaf: place(leaf, spec=P()), p), jax.tree.map(place, weights), text, place(towards)
graded = jax.grad(by_kernel, argnums=(0, 1, 2))
compiled = hlo_counts.analyse(gpus.compile_lowered(jax.jit(graded).lower(*args)).as_text())
print(json.dumps([compiled.flops, trace(graded, *args).flops, compiled.wire_bytes]))
"""


def test_program_for_absent_h100s_is_counted_as_by_hand():
    # The backward pass of JAX's own attention promotes bf16 with fp32.
    environ = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "false", "JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    found, (compiled, traced), of_kernel = commands.compile_for_absent_gpus(ABSENT, **environ)
    assert compiled == traced, "no product of a frozen reader is computed again to be saved"
    # A chunk of 16 tokens: two products with 32 x 32 for queries and keys, one for the update, two of 16 x 16; the
    # backward pass computes them again and two gradients of each. 48 tokens of 6 texts of 2 heads on two devices.
    by_hand = 4 * 48 * 3 * 2 * (3 * 2 * 32 * 32 + 2 * 2 * 16 * 32)
    of_parameters = 4 * (16 + 2 * 2 * 32)  # bytes that two devices reduce: half of each is sent twice
    assert of_kernel == [by_hand, by_hand, of_parameters], "each device launches the kernel on its own rows"
    products = [kernel for kernel in found["kernels"] if kernel["flops"]]
    assert {kernel["arithmetic"] for kernel in products} == {"bf16"}
    # forward 2, again 1, backward to x 2, as on the CPU above; a quarter on each device
    assert sum(kernel["flops"] * kernel["executed"] for kernel in products) == 5 * 5 * (2 * 256 * 512 * 1536) // 4
    assert {collective["kind"] for collective in found["collectives"]} == {"all-reduce"}
    assert {tuple(map(tuple, collective["groups"])) for collective in found["collectives"]} == {((0, 1, 2, 3),)}
    # forward one a layer, backward to x one a layer
    assert sum(one["executed"] for one in found["collectives"]) == 2 * 5
    assert {one["operand_bytes"] for one in found["collectives"]} == {256 * 512 * 2}
