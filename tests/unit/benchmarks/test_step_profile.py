"""The kinds of kernels, told from a compiled text; that events have these names is seen by running the script."""

from benchmarks import step_profile

TEXT = """
%fused_computation.1 (p: bf16[4,8], q: bf16[8,2]) -> f32[4,2] {
  %p = bf16[4,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[4,2]{1,0} dot(%p, %q), metadata={op_name="jit(step)/btd,fd->btf/dot_general"}
}

%fused_computation.2 (p: bf16[4,8], q: bf16[8,2]) -> f32[4,2] {
  ROOT %dot.2 = f32[4,2]{1,0} dot(%p, %q), metadata={op_name="jit(step)/bkts,bkse->bkte/dot_general"}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %ynn_fusion.1 = f32[4,2]{1,0} fusion(%p, %q), kind=kCustom, calls=%fused_computation.1
  %ynn_fusion.2 = f32[4,2]{1,0} fusion(%p, %q), kind=kCustom, calls=%fused_computation.2
  %wrapped_broadcast.9 = f32[30,4]{1,0} broadcast(%c), dimensions={}
  %while.4 = (s32[], f32[4]) while(%tuple), condition=%c, body=%b
  ROOT %add_fusion = f32[4]{0} add(%p, %p), metadata={op_name="jit(step)/add"}
}
"""


def test_kernels_count_as_their_largest_part_and_loops_do_not():
    seconds = {"ynn_fusion.1": 3.0, "ynn_fusion.2": 2.0, "wrapped_broadcast.9": 0.5, "while.4": 9.0, "add_fusion": 1.0}
    rows = step_profile.shares(step_profile.parse(TEXT), seconds)
    assert rows == [
        ("products with matrices", "ynn_fusion.1", 3.0),
        ("products of attention", "ynn_fusion.2", 2.0),
        ("optimizer", "add_fusion", 1.0),
        ("activations saved", "wrapped_broadcast.9", 0.5),
    ]
    assert "| products with matrices | 3.00 |   46% |" in step_profile.table(rows, 4.0)
