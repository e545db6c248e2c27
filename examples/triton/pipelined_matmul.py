"""Pipelined loads: the same matmul with num_stages 1 to 5, what a stage costs and where one more stops helping.

Technique  A step of the loop loads a tile of A and one of B and multiplies them. With one stage the program waits for
           memory in every step. With num_stages = s the compiler copies ahead: s - 1 steps are on their way to shared
           memory (cp.async) while the tensor cores work on one, so a load has s - 1 steps to arrive. That is enough
           once it covers the latency; from there a stage only takes shared memory, and with it the place of a
           second program on the SM, which hides latency too. Nothing changes here but num_stages.
Question   How many stages does a matmul need, and what is lost with one more?
Needs      triton
Shapes     a [M, K], b [K, N], any strides, any sizes (0 too) -> c [M, N], contiguous, dtype of a.
Dtypes     float16, bfloat16, both the same; sums are float32.
Errors     TypeError for another dtype or two dtypes; ValueError for rank, inner sizes that differ, num_stages outside
           1 to 5, block_n other than 128 or 256, or stages that do not fit shared memory; RuntimeError for a device
           without Triton or an input that requires grad.
Wins when  each step of a loop loads and computes; never by the last stage that fits: time the counts, as autotune does.
Source     chapter section "Software pipelining"; num_stages of triton.Config.
Run        python examples/triton/pipelined_matmul.py
"""

from __future__ import annotations

import itertools

from harness import Harness, Work, device_limits, interpreted, require_triton_device, run
from harness.hardware import SHARED_LIMIT

import torch
import triton
import triton.language as tl

DTYPES = (torch.float16, torch.bfloat16)
STAGES = (1, 2, 3, 4, 5)
BLOCK_M, BLOCK_K, NUM_WARPS = 128, 64, 8
BLOCK_NS = (128, 256)  # 32 and 48 KiB a stage: five of the second fit no GPU there is


@triton.jit
def matmul_pipelined_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Bands of 8 rows of tiles, so that neighbours in time share inputs in L2: see matmul.py.
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = pid // (8 * tiles_n) * 8
    band = min(tiles_m - first_m, 8)
    pid_m = first_m + pid % (8 * tiles_n) % band
    pid_n = pid % (8 * tiles_n) // band

    # Rows and columns past the edge wrap around: they load something valid, and the store drops what it makes.
    rows = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    cols = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None].to(tl.int64) * stride_am + inner[None, :].to(tl.int64) * stride_ak
    b_ptrs = b_ptr + inner[:, None].to(tl.int64) * stride_bk + cols[None, :].to(tl.int64) * stride_bn
    step_a, step_b = BLOCK_K * tl.cast(stride_ak, tl.int64), BLOCK_K * tl.cast(stride_bk, tl.int64)

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # The loop that num_stages is about. Its loads depend on nothing that it computes, so they can run ahead.
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=inner[None, :] < K - k, other=0.0)
            b = tl.load(b_ptrs, mask=inner[:, None] < K - k, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += step_a
        b_ptrs += step_b

    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    c_ptrs = c_ptr + rows[:, None].to(tl.int64) * stride_cm + cols[None, :].to(tl.int64) * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def shared_bytes(num_stages: int, block_n: int, sm: int) -> int:
    """Shared memory of the loop on architecture `sm`, for values of two bytes.

    mma.sync has read its operands into registers when the next copy starts, so s stages need s - 1 buffers. wgmma
    (sm_90) and tcgen05 (sm_100) read shared memory while the program runs on: the buffer of the last step
    is still theirs, so s stages need s. One stage copies nothing ahead and still needs a place for its operands.
    """
    reads_later = sm // 10 in (9, 10, 11)
    buffers = max(1, num_stages - (not reads_later))
    barriers = 8 * min(num_stages, 2) if sm // 10 in (10, 11) else 0
    return (BLOCK_M + block_n) * BLOCK_K * 2 * buffers + barriers


def stages_that_fit(block_n: int, sm: int, shared: int) -> tuple[int, ...]:
    return tuple(s for s in STAGES if shared_bytes(s, block_n, sm) <= shared)


def _sm() -> int:
    return 90 if interpreted() else triton.runtime.driver.active.get_current_target().arch


def matmul_pipelined(a: torch.Tensor, b: torch.Tensor, num_stages: int = 3, block_n: int = 128) -> torch.Tensor:
    """a @ b in tiles of 128 x block_n x 64 with a pipeline of num_stages; limits are in the module docstring."""
    require_triton_device("matmul_pipelined", a, b)
    if a.dtype not in DTYPES or b.dtype != a.dtype:
        raise TypeError(f"matmul_pipelined: dtypes {a.dtype} and {b.dtype}; both must be the same one of {DTYPES}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"matmul_pipelined: shapes {tuple(a.shape)} and {tuple(b.shape)}; need [M, K] and [K, N]")
    if type(num_stages) is not int or num_stages not in STAGES:
        raise ValueError(f"matmul_pipelined: num_stages is {num_stages!r}; take one of {STAGES}")
    if type(block_n) is not int or block_n not in BLOCK_NS:
        raise ValueError(f"matmul_pipelined: block_n is {block_n!r}; take one of {BLOCK_NS}")
    need, limit = shared_bytes(num_stages, block_n, _sm()), device_limits(a.device).shared_bytes
    if need > limit:
        raise ValueError(
            f"matmul_pipelined: {num_stages} stages of 128x{block_n}x64 tiles need {need} bytes of shared memory, and "
            f"a program may have {limit} here; take one of {stages_that_fit(block_n, _sm(), limit)}"
        )
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if M and N:
        matmul_pipelined_kernel[(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, block_n),)](
            a, b, c, M, N, K, a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
            EVEN_K=K % BLOCK_K == 0, BLOCK_M=BLOCK_M, BLOCK_N=block_n, BLOCK_K=BLOCK_K,
            num_warps=NUM_WARPS, num_stages=num_stages,
        )  # fmt: skip
    return c


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def programs_per_sm(shared: int, registers: int, shared_limit: int) -> int:
    """How many programs of 8 warps an SM holds: by shared memory, of which each loses 1 KiB, or by registers."""
    registers_per_program = triton.cdiv(registers, 8) * 8 * 32 * NUM_WARPS  # handed out in eights
    return min((shared_limit + 1024) // (shared + 1024), 65536 // registers_per_program)


def matmul_each_stages(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """a @ b once per count of stages that fits here."""
    fitting = stages_that_fit(128, _sm(), device_limits(a.device).shared_bytes)
    return tuple(matmul_pipelined(a, b, num_stages) for num_stages in fitting)


def show_code(h: Harness) -> dict[int, int]:
    """What each count of stages compiles to; returns how many of its programs an SM of this GPU holds."""
    find = {80: ("cp.async", "mma.sync"), 90: ("cp.async", "wgmma"), 100: ("cp.async", "tcgen05.mma")}
    here = h.machine.sm if h.machine.sm in SHARED_LIMIT else 90
    find.setdefault(here, ("cp.async",))
    kernels = h.codegen(matmul_each_stages, h.meta(8192, 8192), h.meta(8192, 8192), find=find)
    programs = {}
    for sm in find:
        counts = [(s, kernel) for s, kernel in zip(STAGES, (k for k in kernels if k.sm == sm), strict=False)]
        room = {s: programs_per_sm(k.shared, k.registers, SHARED_LIMIT[sm]) for s, k in counts}
        programs = room if sm == here else programs
        if counts:
            facts = {
                "stages": list(room),
                "shared bytes, predicted": [shared_bytes(s, 128, sm) for s in room],
                "compiled": [kernel.shared for _, kernel in counts],
                "cp.async": [kernel.found.get("cp.async", 0) for _, kernel in counts],
                "registers": [kernel.registers for _, kernel in counts],
                "programs per SM": list(room.values()),
            }
            h.fact(f"128x128x64 on sm_{sm}", facts)
    return programs


def show_gains(h: Harness, n: int, ms: dict[int, float], programs: dict[int, int]) -> None:
    """Where a stage stops helping, and whether the wait for a load, estimated from the same times, says so too."""
    tiles_per_sm = triton.cdiv(triton.cdiv(n, BLOCK_M) * triton.cdiv(n, 128), device_limits(h.device).sms)
    step_ns = {s: 1e6 * t / tiles_per_sm / triton.cdiv(n, BLOCK_K) for s, t in ms.items()}
    least = min(step_ns.values())
    # Programs that share an SM take turns: a step of one lasts as many of the SM's steps. With one stage it contains
    # the whole wait for a load, with s stages a load has s - 1 such steps to arrive.
    turns = {s: min(programs[s], tiles_per_sm) for s in ms}
    wait = max(turns[1] * step_ns[1] - least, 0.0)
    covered = {s: min((s - 1) * turns[s] * least / wait, 9.99) if wait else 1.0 for s in ms}
    facts = {
        "stages": list(ms),
        "ns per step of an SM": [round(t) for t in step_ns.values()],
        "programs on it": list(turns.values()),
        "ns a load takes, estimated": round(wait),
        "covered": [round(share, 2) for share in covered.values()],
    }
    h.fact(f"where the time goes, n = {n}", facts)
    h.say("; ".join(f"{s} stages are {ms[s - 1] / ms[s]:.2f}x as fast as {s - 1}" for s in ms if s > 1))
    enough = next(s for s in ms if all(ms[more] > 0.98 * ms[s] for more in ms if more > s))
    predicted = next((s for s in ms if covered[s] >= 1), None)
    h.say(
        f"more than {enough} gain less than 2 %; a load of {wait:.0f} ns is covered by "
        + (f"{predicted} stages" if predicted else f"none of {len(ms)} counts")
        + f" in SM steps of {least:.0f} ns; the last count leaves {turns[max(ms)]} of {turns[1]} programs on an SM"
    )


def demo(h: Harness) -> None:
    counts = stages_that_fit(128, _sm(), device_limits(h.device).shared_bytes)
    edges = [(1, 1, 1), (37, 53, 61), (129, 257, 65), (130, 70, 320), (5, 7, 0)]
    for (M, N, K), num_stages in zip(edges, itertools.cycle(counts), strict=False):
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        what = f"matmul_pipelined {M}x{N}x{K}, stages: {num_stages}"
        h.check(lambda a, b, s=num_stages: matmul_pipelined(a, b, s), reference, a, b, terms=K, what=what)

    fits = {f"sm_{sm}": {f"128x{n}x64": max(stages_that_fit(n, sm, SHARED_LIMIT[sm])) for n in BLOCK_NS}
            for sm in (80, 89, 90, 100, 120)}  # fmt: skip
    h.fact(f"stages that fit, of {len(STAGES)}", fits)
    programs = show_code(h)

    for n in h.pick(interpreted=(192,), quick=(2048,), full=(4096, 8192)):
        n = h.fit(n, bytes_each=60 * n)
        a, b = h.randn(n, n, dtype=h.half), h.randn(n, n, dtype=h.half)
        names = {s: f"triton {s} stage{'s' if s > 1 else ''}" for s in counts}
        variants = {"cuBLAS" if a.is_cuda else "torch": torch.matmul}
        variants |= {name: lambda a, b, s=s: matmul_pipelined(a, b, s) for s, name in names.items()}
        work = Work(bytes=3 * a.nbytes, flops=2 * n**3, dtype=h.half)
        case = f"{n}x{n}x{n} {str(h.half).removeprefix('torch.')}"
        table = h.compare(variants, reference, a, b, baseline=next(iter(variants)), work=work, case=case, terms=n)
        if table and table.rows[-1].ms:
            show_gains(h, n, {s: row.ms for s, row in zip(counts, table.rows[1:], strict=True)}, programs)


if __name__ == "__main__":
    run(demo)
