"""Offline compilation: from a wrapper's own launch, for GPUs that are not here, in a process that may die."""

import os
import queue
import re
import subprocess
import sys
import textwrap

from harness import codegen
from harness.catalog import ROOT, load_module
from harness.codegen import STAGES, CodegenError, Kernel, compile_for, dump
from harness.hardware import SHARED_LIMIT

import pytest
import torch

pytest.importorskip("triton")


def technique(tmp_path, body):
    path = tmp_path / f"probe_{len(list(tmp_path.iterdir()))}.py"
    path.write_text(
        "from harness import require_triton_device\nimport torch\nimport triton\nimport triton.language as tl\n"
        + textwrap.dedent(body)
    )
    return load_module(path)


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


@pytest.fixture
def probe(tmp_path):
    return technique(tmp_path, COPY)


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
def test_every_architecture_compiles(probe, sm):
    (kernel,) = compile_for(probe.copy, (torch.empty(4096, device="meta"),), sms=(sm,))
    assert kernel.error is None
    assert (kernel.kernel, kernel.sm, kernel.spills, kernel.shared) == ("copy_kernel", sm, 0, 0)
    assert 8 <= kernel.registers <= 64
    assert kernel.shared_limit == SHARED_LIMIT[sm]
    assert kernel.found["ld.global.v4"] == kernel.found["st.global.v4"]


def test_the_specialisation_is_that_of_the_launch(probe):
    """A size that 16 does not divide loses the wide accesses, as it does on a GPU."""
    (even,) = compile_for(probe.copy, (torch.empty(4096, device="meta"),), sms=(90,))
    (odd,) = compile_for(probe.copy, (torch.empty(4097, device="meta"),), sms=(90,))
    assert even.found.get("ld.global.v4") == 2
    assert "ld.global.v4" not in odd.found


def test_the_alignment_of_a_view_is_that_of_the_launch(probe):
    """A view that starts four bytes into its storage cannot be read 16 bytes at a time."""
    (kernel,) = compile_for(probe.copy, (torch.empty(4112, device="meta")[1:4097],), sms=(90,))
    assert kernel.found == {"st.global.v4": 2}


def test_keyword_arguments_and_a_second_compile_report_registers_too(probe):
    x = torch.empty(4096, device="meta")
    first, second = (compile_for(probe.copy, (x,), {"block": 2048}, sms=(90,))[0] for _ in range(2))
    assert first.registers == second.registers
    assert first.found == second.found


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_a_dump_holds_every_stage_of_the_same_kernel(probe, sm):
    texts = dump(probe.copy, (torch.empty(4096, device="meta"),), sm=sm)
    assert set(texts) == {*STAGES, "log"}
    assert "tt.load" in texts["ttir"]
    assert "sizePerThread" not in texts["ttir"]
    assert f'ttg.target = "cuda:{sm}"' in texts["ttgir"]
    assert "sizePerThread = [4]" in texts["ttgir"]
    assert "@copy_kernel" in texts["llir"]
    assert texts["ptx"].count("ld.global.v4") == 2
    assert texts["sass"].count("LDG.E.128") == 2
    (kernel,) = compile_for(probe.copy, (torch.empty(4096, device="meta"),), sms=(sm,))
    assert f"Used {kernel.registers} registers" in texts["log"]


def test_a_dump_has_what_was_printed_also_the_second_time(tmp_path):
    body = COPY.replace("        i =", '        tl.static_print("a block of", BLOCK)\n        i =')
    module = technique(tmp_path, body)
    x = torch.empty(64, device="meta")
    first, second = (dump(module.copy, (x,), {"block": 256}, sm=90) for _ in range(2))
    assert "a block of 256\n" in first["log"]
    assert first == second
    assert "a block of 512\n" in dump(module.copy, (x,), {"block": 512}, sm=90)["log"]


def test_a_dump_of_several_kernels_wants_a_name(tmp_path):
    module = technique(
        tmp_path,
        """
        @triton.jit
        def one_kernel(x_ptr):
            tl.store(x_ptr, 1.0)

        @triton.jit
        def two_kernel(x_ptr):
            tl.store(x_ptr, 2.0)

        def both(x):
            one_kernel[(1,)](x)
            two_kernel[(1,)](x)

        def neither(x):
            pass
        """,
    )
    x = torch.empty(16, device="meta")
    for name in ("one_kernel", "two_kernel"):
        assert f"@{name}" in dump(module.both, (x,), sm=90, kernel=name)["ttir"]
    for name in ("", "three_kernel"):
        with pytest.raises(ValueError, match=f"both launches one_kernel, two_kernel; .* kernel='{name}' does not"):
            dump(module.both, (x,), sm=90, kernel=name)
    with pytest.raises(ValueError, match="neither launches none"):
        dump(module.neither, (x,), sm=90)


def test_a_dump_of_what_does_not_compile_says_why(tmp_path):
    module = technique(tmp_path, COPY.replace("tl.load(", "tl.lode("))
    with pytest.raises(CodegenError, match=r"dump: copy on sm_90: .*lode"):
        dump(module.copy, (torch.empty(64, device="meta"),), sm=90)


def test_a_compilation_error_is_an_answer(tmp_path):
    module = technique(
        tmp_path,
        """
        @triton.jit
        def bad_kernel(x_ptr, BLOCK: tl.constexpr):
            tl.store(x_ptr + tl.arange(0, BLOCK), tl.no_such_function(0))

        def bad(x):
            bad_kernel[(1,)](x, BLOCK=16)
        """,
    )
    (kernel,) = compile_for(module.bad, (torch.empty(16, device="meta"),), sms=(90,))
    assert "no_such_function" in kernel.error


def test_a_compiler_that_dies_is_an_answer_and_the_next_request_is_served(tmp_path, probe):
    module = technique(
        tmp_path,
        """
        import os, sys

        def dies(x):
            print("LLVM ERROR: Cannot select", file=sys.stderr, flush=True)
            os.abort()
        """,
    )
    (kernel,) = compile_for(module.dies, (torch.empty(16, device="meta"),), sms=(90,))
    assert "status -6" in kernel.error
    assert "Cannot select" in kernel.error
    (kernel,) = compile_for(probe.copy, (torch.empty(64, device="meta"),), sms=(90,))
    assert kernel.error is None


def test_a_compiler_that_hangs_is_given_up(tmp_path, monkeypatch):
    worker = codegen._Worker()
    alone = queue.LifoQueue()
    alone.put(worker)
    monkeypatch.setattr(codegen, "_idle", alone)
    monkeypatch.setattr(codegen, "TIMEOUT_S", 6)
    module = technique(tmp_path, "import time\ndef hangs(x):\n    time.sleep(1000)\n")
    (kernel,) = compile_for(module.hangs, (torch.empty(16, device="meta"),), sms=(90,))
    assert "gave up after 6 s" in kernel.error
    assert worker.process is None
    assert not os.path.exists(worker.cache)  # its folder goes with it


def test_a_printing_technique_does_not_break_the_protocol(tmp_path):
    module = technique(tmp_path, COPY + "\n    def noisy(x):\n        print('not json')\n        return copy(x)\n")
    (kernel,) = compile_for(module.noisy, (torch.empty(64, device="meta"),), sms=(90,))
    assert kernel.error is None


def test_what_cannot_be_passed_is_refused(probe):
    with pytest.raises(TypeError, match="cannot pass a list"):
        compile_for(probe.copy, ([1],), sms=(90,))


def test_shared_memory_beyond_the_limit_is_said():
    assert Kernel("k", 80, shared=163 * 1024, shared_limit=163 * 1024).fits
    over = Kernel("k", 80, shared=164 * 1024, shared_limit=163 * 1024)
    assert not over.fits
    assert over.too_much == "164.0 KiB of shared memory, and there are 163"
    assert Kernel("k", 100, shared=0, shared_limit=1, tensor_memory=512).fits
    over = Kernel("k", 100, shared=0, shared_limit=1, tensor_memory=544)
    assert over.too_much == "544 columns of tensor memory, and there are 512"


DOT = """
    @triton.jit
    def dot_kernel(x_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr):
        rows, cols, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, 64)
        acc = tl.dot(tl.load(x_ptr + rows * 64 + k[None, :]), tl.load(x_ptr + k[:, None] * N + cols))
        tl.store(y_ptr + rows * N + cols, acc)

    def dot(x, n):
        require_triton_device("dot", x)
        y = torch.empty(128, n, device=x.device)
        dot_kernel[(1,)](x, y, 128, n)
        return y
"""


@pytest.mark.parametrize("n", [64, 256])
def test_tensor_memory_is_what_the_program_allocates(tmp_path, n):
    """A float32 accumulator of 128 rows has a column of tensor memory for each of its columns."""
    module, x = technique(tmp_path, DOT), torch.empty(256 * 64, dtype=torch.float16, device="meta")
    hopper, blackwell, desk = compile_for(module.dot, (x, n), sms=(90, 100, 120))
    assert blackwell.found["tcgen05.alloc"] == 1
    assert {"tcgen05.mma", "tcgen05.ld", "tcgen05.commit"} <= set(blackwell.found)
    (allocated,) = re.findall(r"tcgen05\.alloc\S+ \[%r\d+\], (\d+);", dump(module.dot, (x, n), sm=100)["ptx"])
    assert blackwell.tensor_memory == int(allocated) == n
    assert (hopper.tensor_memory, desk.tensor_memory) == (None, None)


def test_a_kernel_of_a_record_from_before_tensor_memory_still_loads():
    old = Kernel("k", 90, registers=1).record()
    del old["tensor_memory"]
    assert Kernel(**old) == Kernel("k", 90, registers=1)


def test_a_missing_instruction_fails_the_technique(h, probe):
    with pytest.raises(CodegenError, match="copy on sm_90: no wgmma: it is not in the PTX"):
        h.codegen(probe.copy, torch.empty(64, device="meta"), find={90: ("wgmma",)})
    assert h.record.codegen[0]["kernel"] == "copy_kernel"


def test_the_record_tells_one_call_from_the_next(h, probe):
    x = torch.empty(64, device="meta")
    h.codegen(probe.copy, x, find={90: (), 100: ()})
    h.codegen(probe.copy, x, find={90: ()})
    assert [(entry["call"], entry["sm"]) for entry in h.record.codegen] == [(1, 90), (1, 100), (2, 90)]


@pytest.mark.parametrize(
    ("name", "ptx", "count"),
    [
        ("ld.global.v4", "ld.global.L1::evict_last.v4.b32 {%r1}; ld.global.b32 %r2;", 1),
        ("cp.async", "cp.async.cg.shared.global [%r1]; cp.async.bulk.tensor.2d; cp.async.commit_group;", 1),
        ("cp.async.bulk.tensor", "cp.async.bulk.tensor.2d.shared::cluster; cp.async.bulk.commit_group;", 1),
        ("wgmma", "wgmma.mma_async.sync.aligned.m64n256k16; wgmma.fence.sync; wgmma.commit_group", 1),
        ("tcgen05.mma", "tcgen05.mma.cta_group::1.kind::f16 [%r]; tcgen05.commit; tcgen05.ld", 1),
        ("mma.sync", "mma.sync.aligned.m16n8k16; wgmma.mma_async.sync.aligned", 1),
        ("ld.global.v4", "ld.global.v4.b16 {%r1}; ld.global.v2.b64 {%r}; ld.global.v8.b32 {%r}", 2),
        ("mma f8", "cvt.rn.satfinite.e4m3x2.f32 %r; wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%f};", 1),
        ("mma f8", "tcgen05.mma.cta_group::1.kind::f8f6f4 [%r];", 1),
        ("mma tf32", "cvt.rna.tf32.f32 %r; mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f};", 1),
        ("fma.f32", "fma.rn.f32 %f; fma.rn.ftz.f32 %f; fma.rn.f32x2 %f; fma.rn.f64 %d;", 3),
        ("setmaxnreg", "setmaxnreg.inc.sync.aligned.u32 240;", 1),
        ("tcgen05.alloc", "tcgen05.alloc.cta_group::1.sync.aligned [%r], 512; tcgen05.dealloc.cta_group::1 %r;", 1),
        ("tcgen05.ld", "tcgen05.ld.sync.aligned.32x32b.x64.b32 {%r}; tcgen05.wait::ld.sync.aligned;", 1),
        ("tcgen05.commit", "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r];", 1),
        ("tcgen05.cp", "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r], %rd; tcgen05.commit.cta_group::1;", 1),
        ("cta_group::2", "tcgen05.mma.cta_group::2.kind::f16 [%r]; tcgen05.mma.cta_group::1.kind::f16 [%r];", 1),
    ],
)
def test_patterns_count_the_instruction_and_not_its_neighbours(name, ptx, count):
    assert len(re.findall(codegen.INSTRUCTIONS[name], ptx)) == count


def test_a_file_that_compiles_while_it_is_imported_starts_no_workers_of_its_own(tmp_path):
    path = tmp_path / "careless.py"
    path.write_text(
        "from harness import require_triton_device\nfrom harness.codegen import compile_for\nimport torch\n\n"
        "def wrapper(x):\n    return x\n\n"
        "print(compile_for(wrapper, (torch.empty(4),), sms=(90,)))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment, timeout=120)
    assert "was asked for while its file was being imported" in done.stdout, done.stdout + done.stderr
