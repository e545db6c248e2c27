"""Study of what_is_tma: the loops compute the same bits, and a kernel that is not what it says fails the study."""

import functools

from harness.codegen import CodegenError, compile_for

import pytest
import torch

from examples.tma.what_is_tma import BLOCK_BYTES, BLOCK_M, DTYPES, reference
from studies.tma import what_is_tma as study
from studies.tma.what_is_tma import (
    PROOFS,
    machine_code,
    scale_descriptors_ahead,
    scale_pointers_ahead,
    show_code,
    telling_lines,
)

AHEAD = (scale_pointers_ahead, scale_descriptors_ahead)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("fn", AHEAD)
def test_any_stages(h, fn, stages):
    # More tiles than a few programs of the interpreter's four SMs take at once; tails; nothing.
    for M, N in [(400, 140), (67, 389), (1, 1), (0, 8)]:
        x = h.randn(M, (N // 8 + 2) * 8, dtype=h.half)[:, :N]
        h.check(functools.partial(fn, num_stages=stages), reference, x, 2.5, what=f"{M}x{N}", terms=0, roundings=1)


@pytest.mark.parametrize(("sm", "dtype"), [(80, DTYPES[1]), (90, DTYPES[0]), (90, DTYPES[2]), (100, DTYPES[1])])
def test_which_loop_is_tma(sm, dtype):
    x = torch.empty(4096, 4096, dtype=dtype, device="meta")
    pointers, descriptors = (compile_for(fn, (x, 2.5), sms=(sm,))[0] for fn in AHEAD)
    assert (pointers.error, descriptors.error, pointers.spills) == (None, None, 0)
    assert pointers.found["cp.async"]
    assert "cp.async.bulk.tensor" not in pointers.found
    assert pointers.shared == 3 * BLOCK_M * BLOCK_BYTES
    if sm >= 90:
        assert descriptors.found["cp.async.bulk.tensor"] > 2
        assert descriptors.spills == 0


def test_telling_lines_and_machine_code():
    ptx = "\t@%p1 ld.global.v4.b32 { %r1 }, [ %rd1 ];\n\t@!%p2 ld.global.v4.b32 { %r2 }, [%rd2];\n\tadd.s32 %r1, 1;\n"
    assert telling_lines(ptx + "\tcp.async.commit_group; // note") == {
        "@%p1 ld.global.v4.b32 { %r1 }, [ %rd1 ]": 2, "cp.async.commit_group": 1,
    }  # fmt: skip
    sass = (
        "Function:k\n--:-:1:-:8\tLDC R1, c[0x0];\n--:-:-:-:1\t@!P1 LDG.E.128 R4, desc[UR4];\nLBB0:\n--:-:-:-:0\tNOP;\n"
    )
    assert machine_code(sass + "--:-:-:-:5\t@P0 EXIT;\n") == {"LDC": 1, "LDG.E.128": 1, "EXIT": 1}


def test_a_kernel_that_is_not_what_it_says_fails_the_study(h, monkeypatch):
    hint = PROOFS["evict_last"][0]
    for claim in [("cp.async.bulk.tensor", "UTMALDG"), ("ld.global", "UTMALDG"), ("cp.async.bulk.tensor", "LDG")]:
        monkeypatch.setattr(study, "PROOFS", {"evict_last": (hint, *claim)})
        with pytest.raises(CodegenError, match="evict_last on sm_90: expected"):
            show_code(h)


def test_what_the_code_shows(h):
    show_code(h)
    facts = h.record.facts
    rows = facts["machine code of each kernel: a thread's instructions, a loop's counted once"]
    assert [name for name, row in rows.items() if any("UTMALDG" in load for load in row["loads"])] == [
        "descriptor, sm_90", "descriptor, ahead, sm_90",
    ]  # fmt: skip
    pointers, one = rows["pointers, sm_90"], rows["descriptor, sm_90"]
    assert one["integer"] < pointers["integer"]
    assert one["registers"] < pointers["registers"]
    assert pointers["shared bytes"] == 0 < one["shared bytes"]
    assert all(row["instructions"] > row["integer"] > 0 for row in rows.values())
    assert any("cp.async.bulk.tensor" in line for line in facts["PTX of descriptor, sm_90"])
    assert not any("cp.async" in line or "mbarrier" in line for line in facts["PTX of evict_last, sm_90"])


@pytest.mark.gpu
@pytest.mark.parametrize("fn", AHEAD)
def test_more_elements_than_an_int32_counts(h, gpu_gib, fn):
    gpu_gib(20)
    x = torch.empty(2**31 // 8192 + 65, 8192, dtype=torch.bfloat16, device=h.device).normal_()
    assert torch.equal(fn(x, 2.0), torch.mul(x, 2.0))
