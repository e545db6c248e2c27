"""Study of decode attention: when to split, how many queries are free, which pages cost, and what a program takes.

1. The code for tiles of 16, 32 and 64 rows, contiguous and paged: registers, spills, shared memory.
2. One sequence to many, 1024 to 131072 keys: the call without options beside other numbers of parts, and torch.
3. FlexAttention tuned by max-autotune, at one size.
4. More queries, and more query heads per head of keys, until the tensor cores take longer than memory.
5. Pages of 1 to 256 keys, keys of a head adjacent in memory or not; lengths of which most are short.
6. The keys and values read and added up, by a kernel that does nothing else: a few tens of MiB do not reach the speed
   of a long copy.
"""

from __future__ import annotations

from functools import partial

from harness import Harness, Table, Work

import torch
import triton
import triton.language as tl
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from examples.common.attention import attention_budget, attention_flops
from examples.triton.decode_attention import TILES, count_splits, decode_attention, reference
from examples.triton.decode_attention_operands import any_order, flex, in_pages, inputs, libraries

HEADS = (32, 8, 128)  # of queries, of keys, and their size


def compare(h: Harness, title: str, case: str, calls: dict, q, k, v, *lengths, read: int = 0) -> Table:
    """One table, with the first call as its baseline; `read` counts the keys that are read, where these are not all."""
    part = read / (k.shape[0] * k.shape[2]) if read else 1
    moved, flops = int(2 * part * k.nbytes) + 2 * q.nbytes, int(part * attention_flops(q, k, False))
    work = Work(bytes=moved, flops=flops, dtype=h.half)
    return h.compare(
        calls, reference, q, k, v, *lengths, baseline=next(iter(calls)), default="triton", work=work, title=title,
        case=case, **attention_budget(h.half, k.shape[2]),
    )  # fmt: skip


def parts(h: Harness, B: int, S: int) -> None:
    """The parts that count_splits chooses, half and twice as many, and none."""
    q, k, v = inputs(h, B, *HEADS[:2], 1, S, HEADS[2])
    chosen = count_splits(h.device, B * HEADS[1], S)
    others = {1, max(1, chosen // 2), 2 * chosen} - {chosen}
    calls = libraries(h, q, k, v) | {"triton": decode_attention}
    calls |= {f"in {n} parts": partial(decode_attention, splits=n) for n in sorted(others)}
    compare(h, "parts", f"{B}x{S} keys, {chosen} parts", calls, q, k, v)


def tuned_flex(h: Harness, B: int, S: int) -> None:
    q, k, v = inputs(h, B, *HEADS[:2], 1, S, HEADS[2])
    silent = {"autotune_num_choices_displayed": 0, "max_autotune_report_choices_stats": False}
    options = torch._inductor.list_mode_options("max-autotune-no-cudagraphs") | silent
    calls = {"FlexAttention": h.compiled(flex(q, k)), "triton": decode_attention}
    calls["FlexAttention, tuned"] = torch.compile(flex(q, k), dynamic=False, options=options)
    compare(h, "FlexAttention, tuned", f"{B}x{S} keys", calls, q, k, v)


def queries(h: Harness, B: int, S: int, S_q: int, H: int) -> Table:
    """S_q query positions, each attending to the keys up to its own; beside FlexAttention, or torch's call on a CPU."""
    q, k, v = inputs(h, B, H, HEADS[1], S_q, S, HEADS[2])
    if h.device.type == "cuda":
        mask = create_block_mask(lambda b, h, i, j: j <= i + S - S_q, None, None, S_q, S, device=h.device)
        calls = {"FlexAttention": h.compiled(partial(flex_attention, block_mask=mask, enable_gqa=True))}
    else:
        seen = torch.arange(S) <= torch.arange(S_q)[:, None] + S - S_q
        calls = {"torch": partial(scaled_dot_product_attention, attn_mask=seen, enable_gqa=True)}
    case = f"{B}x{S} keys, {S_q} queries, {H // HEADS[1]} heads to one of keys"
    return compare(h, "queries", case, calls | {"triton": decode_attention}, q, k, v)


def pages(h: Harness, B: int, S: int) -> Table:
    """The same keys contiguous and in pages of several sizes; last, a head's keys of a page adjacent in memory."""
    q, k, v = inputs(h, B, *HEADS[:2], 1, S, HEADS[2])

    def paged(page: int):
        table = any_order(h, B, S // page)
        return lambda q, k, v: decode_attention(q, in_pages(k, page), in_pages(v, page), block_table=table)

    calls = {"triton": decode_attention} | {f"pages of {page}": paged(page) for page in (1, 16, 64, 256)}
    by_head = [in_pages(x).contiguous() for x in (k, v)]
    table = any_order(h, B, S // 16)
    calls["pages of 16, by head"] = lambda q, k, v: decode_attention(q, *by_head, block_table=table)
    return compare(h, "pages", f"{B}x{S} keys", calls, q, k, v)


def ragged(h: Harness, B: int, S: int) -> None:
    """Most sequences short, one as long as the cache: their keys are read, and no others."""
    q, k, v = inputs(h, B, *HEADS[:2], 1, S, HEADS[2])
    lengths = torch.full((B,), S // 8, dtype=torch.int32, device=h.device)
    lengths[0] = S
    calls = {"triton": decode_attention, "in 1 part": partial(decode_attention, splits=1)}
    case = f"{B} sequences: 1x{S}, {B - 1}x{S // 8} keys"
    compare(h, "lengths", case, calls, q, k, v, lengths, read=S + (B - 1) * (S // 8))


@triton.jit
def read_kernel(k_ptr, v_ptr, out_ptr, tiles, TILE: tl.constexpr):
    """Of each program the sum of its tiles in out_ptr, float32; k_ptr and v_ptr have tiles * TILE elements each."""
    acc = tl.zeros((TILE,), tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=4):
        at = tile * TILE + tl.arange(0, TILE)
        acc += tl.load(k_ptr + at).to(tl.float32) + tl.load(v_ptr + at).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0), tl.sum(acc, 0))


def reading(h: Harness, B: int, S: int) -> None:
    """K and V summed by programs that stride over tiles, with few other instructions: what reading alone takes."""
    k, v = (h.randn(B, HEADS[1], S, HEADS[2], dtype=h.half) for _ in range(2))
    programs, tile = h.pick(interpreted=8, quick=256, full=256), 4096

    def read(k, v):
        sums = torch.empty(programs, device=k.device)
        read_kernel[(programs,)](k, v, sums, k.numel() // tile, tile)
        return sums

    def sums(k, v):
        return (k.double() + v.double()).view(-1, programs, tile).sum((0, 2))

    h.compare(
        {"read": read}, sums, k, v, baseline="read", title="reading alone", case=f"{B}x{S} keys",
        work=Work(bytes=2 * k.nbytes, flops=2 * k.numel(), dtype=torch.float32), terms=2 * k.numel() // programs,
        dtype=torch.float32,
    )  # fmt: skip


def study(h: Harness) -> None:
    code = {}
    for D in TILES:
        for H, S_q in ((32, 1), (64, 4), (64, 8)):
            q, k, pool = h.meta(16, H, S_q, D), h.meta(16, 8, 16384, D), h.meta(16384, 16, 8, D).transpose(1, 2)
            table = h.meta(16, 1024, dtype=torch.int32)
            for cache, args in {"contiguous": (q, k, k), "paged": (q, pool, pool, None, table)}.items():
                kernels = h.codegen(decode_attention, *args, find={90: ("cp.async",)})
                code |= {
                    f"{H // 8 * S_q} rows, head dim {D}, {cache}": {
                        "registers": each.registers, "spill bytes": each.spills, "shared KiB": each.shared // 1024
                    }
                    for each in kernels if each.kernel == "decode_attention_kernel"
                }  # fmt: skip
    if code:
        h.table("code for sm_90", code)

    full = [(B, S) for S in (1024, 4096, 16384, 131072) for B in (1, 8, 64) if B * S <= 2**21]
    for B, S in h.pick(interpreted=[(1, 640)], quick=[(1, 4096), (8, 16384)], full=full):
        parts(h, B, S)
    for B, S in h.pick(interpreted=[(1, 64)], quick=[(1, 16384)], full=[(1, 16384), (16, 16384), (1, 131072)]):
        reading(h, B, S)
    B, S = h.pick(interpreted=(1, 256), quick=(8, 4096), full=(16, 16384))
    if h.device.type == "cuda":
        tuned_flex(h, B, S)
    full = [(n, H) for H in (32, 64) for n in (1, 2, 4, 8, 16)]
    shapes = h.pick(interpreted=[(2, 16)], quick=[(1, 32), (16, 64)], full=full)
    tables = [queries(h, B, S, *shape) for shape in shapes]
    paged = pages(h, B, S)
    ragged(h, B, S)
    if all(tables) and paged:
        one, last = tables[0]["triton"].ms, tables[-1]["triton"].ms
        slowest = max((row for row in paged.rows), key=lambda row: row.ms)
        h.say(
            f"{tables[-1].case}: {last / one:.2f} times as long as {tables[0].case}; of the layouts {slowest.variant} "
            f"takes longest, {slowest.ms / paged['triton'].ms:.2f} times as long as a contiguous cache"
        )
