"""Rows that a group of persistent programs shares: who has which columns, and the mailbox in which they meet.

Each program of a group owns a slice of the columns, and the group takes row after row. For each row a program knows two
numbers of its slice, such as maximum and sum, and needs those of the others. It sends its own as one 64-bit word, which
is its own signal, so there is neither a counter nor a fence:

    who writes    Each row and program has a word, which that program alone writes, once (`send`).
    who waits     All programs of the group, for all words of a row, an iteration or two after they sent (`peek`,
                  `receive`); until there is such a row, for those of the group's first row.
    what clears   Nothing within a launch: each has a mailbox of its own, filled beforehand with empty words, -1, which
                  no two numbers that are sent look like (`new_mailbox`).
    no deadlock   A program sends before it waits, and all programs of a group are resident at once: a row has no more
                  slices than an eighth of the SMs hold (`split_max_cols`), and a program that starts takes the next
                  place of a group, by a ticket from the mailbox's first word.

The proof is in docs/memory_ordering.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits, sms_to_wait_on
from examples.common.rows import ASSEMBLY

SLICE_BYTES = 16384  # of a row in a program: 16 registers a thread at 8 warps


@triton.jit
def pack(x):
    """x to be kept in registers, two 16-bit values in each; the compiler would give each value its own."""
    if x.dtype == tl.float32 or not ASSEMBLY:
        return x
    else:
        low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), (x.shape[0] // 2, 2)))
        return tl.inline_asm_elementwise(
            "mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def unpack(packed, dtype: tl.constexpr):
    """What pack was given, of that dtype, in float32."""
    if dtype == tl.float32 or not ASSEMBLY:
        return packed.to(tl.float32)
    elif dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r", [packed], dtype=(tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
        return tl.reshape(tl.join(low, high), (2 * packed.shape[0],))
    else:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=f,=f,r", [packed], dtype=(tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
        return tl.reshape(tl.join(low, high), (2 * packed.shape[0],))


@triton.jit
def send(ptr, first, second, mask):
    """Publish two sums as one 64-bit word, never that of an empty one, -1 (docs/memory_ordering.md, "A mailbox")."""
    low = first.to(tl.uint32, bitcast=True).to(tl.uint64)
    high = second.to(tl.uint32, bitcast=True).to(tl.uint64)
    tl.atomic_xchg(ptr, ((high << 32) | low).to(tl.int64, bitcast=True), mask=mask, sem="relaxed")


@triton.jit
def peek(ptr):
    """The words at ptr, empty or not: a load that is in flight while the program does something else."""
    return tl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b64 $0, [$1];", "=l,l", [ptr.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def receive(ptr, peeked):
    """The two sums in each word at ptr, once all are there.

    Assembly, because a loop of Triton's own would be one within the row loop, and Triton pipelines innermost loops
    only.
    """
    word = tl.inline_asm_elementwise(
        """{
        .reg .pred empty;
        mov.b64 $0, $2;
        again:
        setp.eq.s64 empty, $0, -1;
        @empty ld.relaxed.gpu.global.b64 $0, [$1];
        @empty bra again;
        }""",
        "=&l,l,l", [ptr.to(tl.int64), peeked], dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip
    first = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    second = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return first, second


def slice_cols(*tensors: torch.Tensor) -> int:
    """Columns that a program owns, of tensors with a value for each: SLICE_BYTES of the widest."""
    return SLICE_BYTES // max(tensor.element_size() for tensor in tensors)


def split_max_cols(device: torch.device, block_n: int, per_sm: int = 1) -> int:
    """Longest row of which programs that own block_n columns, per_sm of them to an SM, can wait for each other.

    An eighth of the SMs must hold them all. So they finish beside kernels that hold the other SMs (NCCL's, or such
    launches on other streams), and in a context that is given an eighth; with less, call a kernel that does not wait.
    """
    return block_n * per_sm * sms_to_wait_on(device)


def shares(x: torch.Tensor, block_n: int, per_sm: int = 1) -> tuple[int, int]:
    """(parts of a row of x [n_rows, n_cols], groups of as many programs), of which the SMs hold per_sm each."""
    parts = triton.cdiv(x.shape[1], block_n)
    return parts, max(1, min(x.shape[0], per_sm * device_limits(x.device).sms // parts))


def new_mailbox(x: torch.Tensor, parts: int) -> torch.Tensor:
    """One empty word per row of x and part, after one from which tickets are drawn: one fill for both."""
    return torch.full((1 + x.shape[0] * parts,), -1, dtype=torch.int64, device=x.device)
