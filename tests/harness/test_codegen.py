"""Offline compilation: from a wrapper's own launch, for GPUs that are not here, in a process that may die."""

import os
import queue
import re
import textwrap
from types import SimpleNamespace

from harness import codegen
from harness.catalog import load_module
from harness.codegen import STAGES, CodegenError, Kernel, compile_for, dump

import pytest
import torch

pytest.importorskip("triton")

HEAD = """
from examples.common.device import require_triton_device
import os, sys, time, torch, triton
import triton.language as tl
"""
COPY = """
@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)

def copy(x, block=1024):
    require_triton_device("copy", x)
    y = torch.empty_like(x)
    copy_kernel[(triton.cdiv(x.numel(), block),)](x, y, x.numel(), BLOCK=block)
    return y
"""
OTHERS = """
@triton.jit
def one_kernel(x_ptr):
    tl.store(x_ptr, 1.0)

@triton.jit
def two_kernel(x_ptr):
    tl.store(x_ptr, 2.0)

@triton.jit
def bad_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), tl.no_such_function(0))

@triton.jit
def dot_kernel(x_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, cols, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, 64)
    acc = tl.dot(tl.load(x_ptr + rows * 64 + k[None, :]), tl.load(x_ptr + k[:, None] * N + cols))
    tl.store(y_ptr + rows * N + cols, acc)

@triton.jit
def says_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.static_print("a block of", BLOCK)
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)

def both(x):
    one_kernel[(1,)](x)
    two_kernel[(1,)](x)

def neither(x):
    print("not json")

def bad(x):
    bad_kernel[(1,)](x, BLOCK=16)

def dot(x, n):
    dot_kernel[(1,)](x, torch.empty(128, n, device=x.device), 128, n)

def says(x, block):
    says_kernel[(1,)](x, block)

def dies(x):
    print("LLVM ERROR: Cannot select", file=sys.stderr, flush=True)
    os.abort()

def hangs(x):
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def technique(tmp_path_factory):
    folder = tmp_path_factory.mktemp("codegen")

    def write(name, body):
        path = folder / f"{name}.py"
        path.write_text(HEAD + textwrap.dedent(body))
        return load_module(path)

    return write


@pytest.fixture(scope="module")
def probe(technique):
    return technique("probe_of_a_test", COPY)


@pytest.fixture(scope="module")
def others(technique):
    return technique("others_of_a_test", OTHERS)


X = torch.empty(4096, device="meta")


def test_every_architecture_compiles_and_a_dump_holds_every_stage_of_it(probe):
    from examples.common.device import SHARED_LIMIT

    kernels = compile_for(probe.copy, (X,), sms=(80, 120))
    for kernel, sm in zip(kernels, (80, 120), strict=True):
        assert (kernel.kernel, kernel.sm, kernel.error) == ("copy_kernel", sm, None)
        assert (kernel.spills, kernel.shared, kernel.shared_limit) == (0, 0, SHARED_LIMIT[sm])
        assert 8 <= kernel.registers <= 64
        assert kernel.found["ld.global.v4"] == kernel.found["st.global.v4"] == 2
        texts = dump(probe.copy, (X,), sm=kernel.sm)
        assert set(texts) == {*STAGES, "log"}
        assert ("tt.load" in texts["ttir"], "sizePerThread" in texts["ttir"]) == (True, False)
        assert f'ttg.target = "cuda:{kernel.sm}"' in texts["ttgir"]
        assert "sizePerThread = [4]" in texts["ttgir"]
        assert "@copy_kernel" in texts["llir"]
        assert texts["ptx"].count("ld.global.v4") == texts["sass"].count("LDG.E.128") == 2
        assert f"Used {kernel.registers} registers" in texts["log"]


def test_the_specialisation_and_the_alignment_are_those_of_the_launch(probe):
    """A size that 16 does not divide loses the wide accesses, and so does a view that starts four bytes later."""
    odd, view = torch.empty(4097, device="meta"), torch.empty(4112, device="meta")[1:4097]
    (odd,), (view,) = (compile_for(probe.copy, (x,), sms=(90,)) for x in (odd, view))
    assert "ld.global.v4" not in odd.found
    assert view.found == {"st.global.v4": 2}
    first, second = (compile_for(probe.copy, (X,), {"block": 2048}, sms=(90,))[0] for _ in range(2))
    assert (first.registers, first.found) == (second.registers, second.found)  # the second is found in memory


def test_two_programs_are_told_apart_by_their_instructions_alone(technique, probe):
    def hashes(name, *changes):
        body = COPY
        for old, new in changes:
            assert old in body
            body = body.replace(old, new)
        module = technique(f"{name}_of_a_test", body)
        return [kernel.ptx_hash for kernel in compile_for(module.copy, (X,), sms=(80, 90))]

    ours = [kernel.ptx_hash for kernel in compile_for(probe.copy, (X,), sms=(80, 90))]
    assert len(set(ours)) == 2
    moved = ("    i = tl", "    # moved\n\n    i = tl")
    same = hashes("renamed", ("copy_kernel", "another_kernel"), moved, ("x_ptr", "z"))
    assert same == ours
    assert not set(hashes("other", ("mask=i < n)\n", "mask=i <= n)\n"))) & set(ours)


def test_a_dump_has_what_was_printed_also_the_second_time_and_wants_a_name_among_several(others):
    first, second, other = (dump(others.says, (X, block), sm=90)["log"] for block in (256, 256, 512))
    assert "a block of 256\n" in first
    assert first == second
    assert "a block of 512\n" in other
    for name in ("one_kernel", "two_kernel"):
        assert f"@{name}" in dump(others.both, (X,), sm=90, kernel=name)["ttir"]
    for name in ("", "three_kernel"):
        with pytest.raises(ValueError, match=f"both launches one_kernel, two_kernel; .* kernel='{name}' does not"):
            dump(others.both, (X,), sm=90, kernel=name)
    with pytest.raises(ValueError, match="neither launches none"):  # and what it prints is not the answer
        dump(others.neither, (X,), sm=90)
    with pytest.raises(CodegenError, match=r"dump: bad on sm_90: .*no_such_function"):
        dump(others.bad, (X,), sm=90)


def test_a_compiler_that_fails_dies_or_hangs_is_an_answer_and_the_next_request_is_served(others, probe, monkeypatch):
    worker, alone = codegen._Worker(), queue.LifoQueue()
    alone.put(worker)
    monkeypatch.setattr(codegen, "_idle", alone)
    (failed,), (died,) = (compile_for(fn, (X,), sms=(90,)) for fn in (others.bad, others.dies))
    assert "no_such_function" in failed.error
    assert "status -6" in died.error
    assert "Cannot select" in died.error
    assert compile_for(probe.copy, (X,), sms=(90,))[0].error is None
    monkeypatch.setattr(codegen, "TIMEOUT_S", 1)
    (hung,) = compile_for(others.hangs, (X,), sms=(90,))
    assert "status -9: out of memory, or not ready after 1 s" in hung.error
    assert worker.process is None
    assert not os.path.exists(worker.folder.name)  # its cache goes with it


def test_what_a_program_takes_too_much_of_is_said():
    for shared, columns, too_much in [
        (163, 512, None),
        (164, 512, "164.0 KiB of shared memory, and there are 163"),
        (0, 544, "544 columns of tensor memory, and there are 512"),
    ]:
        kernel = Kernel("k", 100, shared=shared * 1024, shared_limit=163 * 1024, tensor_memory=columns)
        assert kernel.too_much == too_much


def test_spills_are_those_of_the_assemblers_report():
    made = SimpleNamespace(shared=0, num_warps=4, tmem_size=0)
    kernel = SimpleNamespace(hash="of a test", asm={"ptx": ""}, metadata=made)
    log = "Used 24 registers\n8 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
    found = codegen._read(SimpleNamespace(fn=compile_for), kernel, log, "", 90)
    assert (found.registers, found.spills) == (24, 8)


def test_tensor_memory_is_what_the_program_allocates(others):
    """A float32 accumulator of 128 rows has a column of tensor memory for each of its columns."""
    x = torch.empty(256 * 64, dtype=torch.float16, device="meta")
    hopper, blackwell, desk = compile_for(others.dot, (x, 64), sms=(90, 100, 120))
    assert blackwell.found["tcgen05.alloc"] == 1
    assert {"tcgen05.mma", "tcgen05.ld", "tcgen05.commit"} <= set(blackwell.found)
    ptx = dump(others.dot, (x, 64), sm=100)["ptx"]
    (allocated,) = re.findall(r"tcgen05\.alloc\S+ \[%r\d+\], (\d+);", ptx)
    assert blackwell.tensor_memory == int(allocated) == 64
    assert (hopper.tensor_memory, desk.tensor_memory) == (None, None)
    assert compile_for(others.dot, (x, 256), sms=(100,))[0].tensor_memory == 256


def test_patterns_count_the_instruction_and_not_its_neighbours():
    for name, ptx, count in [
        ("ld.global.v4", "ld.global.L1::evict_last.v4.b32 {%r1}; ld.global.b32 %r2;", 1),
        ("ld.global.v4", "ld.global.v4.b16 {%r1}; ld.global.v2.b64 {%r}; ld.global.v8.b32 {%r}", 2),
        ("cp.async", "cp.async.cg.shared.global [%r1]; cp.async.bulk.tensor.2d; cp.async.commit_group;", 1),
        ("cp.async.bulk.tensor", "cp.async.bulk.tensor.2d.shared::cluster; cp.async.bulk.commit_group;", 1),
        ("wgmma", "wgmma.mma_async.sync.aligned.m64n256k16; wgmma.fence.sync; wgmma.commit_group", 1),
        ("mma.sync", "mma.sync.aligned.m16n8k16; wgmma.mma_async.sync.aligned", 1),
        ("mma f8", "cvt.rn.satfinite.e4m3x2.f32 %r; wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%f};", 1),
        ("mma f8", "tcgen05.mma.cta_group::1.kind::f8f6f4 [%r];", 1),
        ("mma tf32", "cvt.rna.tf32.f32 %r; mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f};", 1),
        ("fma.f32", "fma.rn.f32 %f; fma.rn.ftz.f32 %f; fma.rn.f32x2 %f; fma.rn.f64 %d;", 3),
        ("tcgen05.mma", "tcgen05.mma.cta_group::1.kind::f16 [%r]; tcgen05.commit; tcgen05.ld", 1),
        ("tcgen05.alloc", "tcgen05.alloc.cta_group::1.sync.aligned [%r], 512; tcgen05.dealloc.cta_group::1 %r;", 1),
        ("tcgen05.ld", "tcgen05.ld.sync.aligned.32x32b.x64.b32 {%r}; tcgen05.wait::ld.sync.aligned;", 1),
        ("tcgen05.cp", "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r], %rd; tcgen05.commit.cta_group::1;", 1),
        ("cta_group::2", "tcgen05.mma.cta_group::2.kind::f16 [%r]; tcgen05.mma.cta_group::1.kind::f16 [%r];", 1),
    ]:
        assert len(re.findall(codegen.INSTRUCTIONS[name], ptx)) == count, name


def test_a_file_that_compiles_while_it_is_imported_starts_no_workers_of_its_own(technique, probe):
    """The worker that imports it refuses, and that is the answer."""
    body = f"from harness.codegen import compile_for\n{COPY}\nif os.environ.get('TRITON_INTERPRET') == '0':\n"
    careless = technique("careless_of_a_test", f"{body}    compile_for(copy, (torch.empty(4),), sms=(90,))\n")
    (kernel,) = compile_for(careless.copy, (X,), sms=(90,))
    assert "was asked for while its file was being imported" in kernel.error
