"""warp_specialized_matmul's study: the chapter's loop, the forms, what is multiplied twice, what partitions take."""

import re

from harness.codegen import CodegenError, Kernel, compile_for, dump

import pytest
import torch
import triton

from examples.triton.warp_specialized_matmul import BLOCKS, matmul_specialized, outcome
from studies.triton import warp_specialized_matmul as technique
from studies.triton.warp_specialized_matmul import (
    COPY_BLOCK,
    FORMS,
    copy_specialized,
    programs_per_sm,
    share_of_mma,
    show_forms,
)

X = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")


def copied(x):
    try:
        return copy_specialized(x)
    except RuntimeError as error:
        if "PassManager" in str(error):
            pytest.skip("this GPU's compiler does not take the loop")
        raise


def test_copy(h):
    """Nothing, one element, a prime, around a block, more blocks than programs (16 in the interpreter), no vector."""
    for shape in [(0,), (1,), (997,), (COPY_BLOCK + 1,), (40 * COPY_BLOCK + 3,), (3, 5, 7), ()]:
        x = h.randn(*(shape or (1,)), dtype=h.half).reshape(shape)
        h.check(copied, torch.Tensor.double, x, terms=0, constant_ok=x.numel() < 2)
    bits = torch.arange(-(2**15), 2**15, device=h.device).to(torch.int16)  # NaN, infinities, -0.0, subnormals, the rest
    assert torch.equal(copied(bits.view(torch.float16)).view(torch.int16), bits)


@pytest.mark.gpu
def test_copy_near_and_beyond_what_an_int32_counts(h, gpu_gib):
    """Just below 2**31 elements the next start of a 32-bit loop would already be negative."""
    gpu_gib(20)
    x = torch.empty(2**31 + 5000, dtype=torch.bfloat16, device=h.device).normal_()
    for n in (2**31 - 1, 2**31 - COPY_BLOCK, x.numel()):
        assert torch.equal(copied(x[:n]), x[:n])


def test_an_elementwise_loop_is_never_specialized():
    (kernel,) = compile_for(copy_specialized, (X.view(-1),), sms=(120,))
    ignored = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    assert outcome(kernel) == ("ignored, 4 warps" if ignored else "not supported")


def test_a_lesson_out_of_date_is_an_error(h, monkeypatch):
    form = next(form for form, became in FORMS.items() if became == "specialized" and form[1] == "k")
    monkeypatch.setattr(technique, "FORMS", {form: "ignored"})
    with pytest.raises(CodegenError, match=r"sm_90 k, .*; the lesson says ignored"):
        show_forms(h)


@pytest.mark.parametrize(("loop", "block_m", "times"), [("k", 64, 2), ("tiles", 128, 1)])
def test_what_hopper_makes_of_a_tile(loop, block_m, times):
    """One that is not split is multiplied twice. What the sanitizer complains of: barriers initialized where tiles are
    loaded to, in the columns it names."""
    ptx = dump(matmul_specialized, (X, X, loop, True, block_m, 4, "kernel"), sm=90)["ptx"]
    assert share_of_mma(ptx, block_m) == times
    assert ptx.count("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group") == 2, "both store"
    found = re.findall(r"mov\.b32 \s*(%r\d+), global_smem;", ptx)
    (base,) = {r for r in found if f"init.shared::cta.b64 [{r}]" in ptx}
    steps = re.findall(rf"add\.s32 \s*(%r\d+), {base}, (\d+);", ptx)
    offset = {base: 0} | {r: int(by) for r, by in steps}
    barriers = [offset[r] for r in re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", ptx)]
    block_n, stages = BLOCKS[block_m]
    assert "mbarrier.inval" not in ptx
    ring = stages * (block_m + block_n) * 64 * 2
    assert {at for at in barriers if at < ring} == {8 * stage for stage in range(stages)}
    assert sum(at < ring for at in barriers) > stages, "initialized twice: what synccheck says"


def test_programs_on_a_hopper_sm():
    """Against NVIDIA's occupancy calculator for compute capability 9.0."""
    for registers, shared_kib, warps, programs in [
        (32, 0, 8, 8),  # warps: 64 are all an SM has
        (128, 0, 4, 4),  # registers: 128 * 128 * 4 are all of them
        (129, 0, 4, 3),  # handed out as 136
        (168, 0, 12, 1),  # the specialized kernel: 64512 registers
        (64, 113, 4, 2),  # shared memory: 1 KiB more for the system
        (64, 114, 4, 1),
    ]:
        kernel = Kernel("m", 90, registers=registers, shared=shared_kib * 1024, warps=warps)
        assert programs_per_sm(kernel) == programs
