"""What operations cost, by hand."""

import pytest

from jaxpar.hardware import DEVICES
from jaxpar.inspect import hlo
from jaxpar.inspect.roofline import Cost, Roofline

H100 = DEVICES["H100"]
PARAMETERS = """  %x = bf16[64,128]{1,0} parameter(0)
  %w = bf16[8,128,256]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
"""


def cost(root: str, before: str = "", device=H100) -> Cost:
    module = hlo.parse(f"{before}ENTRY %main (x: bf16[64,128]) -> f32[] {{\n{PARAMETERS}  ROOT %r = {root}\n}}")
    return Roofline(module, device).computation("main")


def fused(name: str, parameters: list[str], body: str) -> str:
    lines = [f"  %p{n} = {shape} parameter({n})" for n, shape in enumerate(parameters)]
    return f"%{name} (p0: f32[]) -> f32[] {{\n" + "\n".join([*lines, body]) + "\n}\n\n"


def test_a_multiplication():
    dot = "bf16[64,256]{1,0} dot(%x, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    found = cost(dot.replace("%v", "%w"))
    assert found.flops == 2 * 64 * 256 * 128
    assert found.flops_seconds == found.flops / 989e12
    assert found.bytes == 2 * (64 * 128 + 8 * 128 * 256 + 64 * 256)
    assert found.seconds == max(found.flops_seconds, found.bytes / 3.35e12)
    assert cost(dot.replace("%v", "%w"), device=None) == Cost(found.flops, 0, found.bytes, 0)


def test_a_call_of_cublas_and_its_scratch_space():
    call = '(f32[64,256]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", '
    call += 'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    found = cost(call)
    assert (found.flops, found.bytes) == (2 * 64 * 256 * 128, 2 * (64 * 128 + 8 * 128 * 256) + 4 * 64 * 256)


@pytest.mark.parametrize(("dtype", "share"), [("bf16", 1), ("f16", 1), ("f32", 0.5), ("f8e4m3fn", 2)])
def test_the_peak_depends_on_the_dtype(dtype: str, share: float):
    module = hlo.parse(
        f"ENTRY %main (x: f32[4,4]) -> f32[4,4] {{\n  %x = {dtype}[4,4]{{1,0}} parameter(0)\n"
        f"  ROOT %r = f32[4,4]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}\n}}"
    )
    assert Roofline(module, H100).computation("main").flops_seconds == 2 * 4**3 / (989e12 * share)


SLICE = "bf16[1,128,256]{2,1,0} dynamic-slice(%p0, %p1, %p1, %p1), dynamic_slice_sizes={1,128,256}"
LAYER_BYTES = 2 * 128 * 256


def test_a_fusion_that_reads_one_layer_of_a_stack():
    stack = ["bf16[8,128,256]{2,1,0}", "s32[]"]
    body = f"  %s = {SLICE}\n  ROOT %n = bf16[1,128,256]{{2,1,0}} negate(%s)"
    found = cost("bf16[1,128,256]{2,1,0} fusion(%w, %i), kind=kLoop, calls=%f", fused("f", stack, body))
    assert found.bytes == LAYER_BYTES + LAYER_BYTES + 4  # one layer in, one out, and the index
    # Behind a bitcast too; but whoever also reads all of it, reads all of it.
    body = f"  %b = bf16[8,128,256]{{2,1,0}} bitcast(%p0)\n  ROOT %s = {SLICE.replace('%p0', '%b')}"
    found = cost("bf16[1,128,256]{2,1,0} fusion(%w, %i), kind=kLoop, calls=%f", fused("f", stack, body))
    assert found.bytes == 2 * LAYER_BYTES + 4
    body = f"  %s = {SLICE}\n  %all = bf16[8,128,256]{{2,1,0}} negate(%p0)\n"
    body += "  ROOT %t = (bf16[1,128,256]{2,1,0}, bf16[8,128,256]{2,1,0}) tuple(%s, %all)"
    both = "(bf16[1,128,256]{2,1,0}, bf16[8,128,256]{2,1,0}) fusion(%w, %i), kind=kLoop, calls=%f"
    assert cost(both, fused("f", stack, body)).bytes == (8 + 1 + 8) * LAYER_BYTES + 4


def test_a_fusion_that_updates_one_layer_in_place():
    shapes = ["bf16[8,128,256]{2,1,0}", "s32[]", "bf16[1,128,256]{2,1,0}"]
    body = "  ROOT %u = bf16[8,128,256]{2,1,0} dynamic-update-slice(%p0, %p2, %p1, %p1, %p1)"
    before = fused("f", shapes, body)
    found = cost("bf16[8,128,256]{2,1,0} fusion(%w, %i, %w), kind=kLoop, calls=%f", before)
    assert found.bytes == 2 * LAYER_BYTES + 4


def test_a_multiplication_inside_a_fusion():
    body = f"  %s = {SLICE}\n  %m = bf16[128,256]{{1,0}} bitcast(%s)\n"
    body += "  ROOT %d = f32[256,256]{1,0} dot(%m, %m), lhs_contracting_dims={0}, rhs_contracting_dims={0}"
    before = fused("f", ["bf16[8,128,256]{2,1,0}", "s32[]"], body)
    found = cost("f32[256,256]{1,0} fusion(%w, %i), kind=kCustom, calls=%f", before)
    assert (found.flops, found.bytes) == (2 * 256 * 256 * 128, LAYER_BYTES + 4 + 4 * 256 * 256)


def test_what_costs_nothing():
    for line in ("bf16[128,64]{1,0} bitcast(%x)", "bf16[8]{0} all-reduce(%x), replica_groups={}", "s32[] tuple(%i)"):
        assert cost(line) == Cost()


def test_a_loop_of_unknown_length_is_counted_once_and_said():
    before = fused("condition", ["s32[]"], "  ROOT %c = pred[] compare(%p0, %p0), direction=LT")
    before += fused("body", ["bf16[64,128]{1,0}"], "  ROOT %n = bf16[64,128]{1,0} negate(%p0)")
    module = hlo.parse(
        f"{before}ENTRY %main (x: f32[]) -> f32[] {{\n{PARAMETERS}"
        "  ROOT %r = bf16[64,128]{1,0} while(%x), condition=%condition, body=%body\n}"
    )
    roofline = Roofline(module, H100)
    assert roofline.computation("main").bytes == 2 * 64 * 128 * 2
    assert list(roofline.notes) == ["a loop whose number of iterations is not known when compiling is counted once"]
