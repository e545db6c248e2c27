"""One-shot all-reduce by mailboxes: 4 bytes of the message and the number of the call in one 8-byte word.

A rank writes its message into a mailbox in every peer's memory. An aligned store of 8 bytes is indivisible: whoever
sees the call's number has the 4 bytes beside it. So there is no barrier, and no fence that waits until the peers have
received all writes; a message takes one trip over NVLink, of twice its bytes. NCCL's protocol LL does the same.
docs/memory_ordering.md, "Ranks that wait for each other", says why two boxes for each sender are enough.

This file also has what the lesson's two kernels share: the workspace and the checks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from examples.common.device import require_triton_device, sms_to_wait_on
from examples.common.operands import check_choice
from examples.common.rows import ASSEMBLY
from examples.common.symmetric import Symmetric, pointer, symmetric

DTYPES = (torch.bfloat16, torch.float16)
VARIANTS = ("pull", "mailbox")
PER_SM = 2  # programs that wait, on an eighth of the SMs (sms_to_wait_on): the warps of both kernels leave room
MAILBOX_WARPS = 8
MAILBOX_BLOCK = MAILBOX_WARPS * 32 * 4  # words of 4 bytes a program sends at a time: four a thread, for _receive
MOST = 2**28  # elements: 32 bits hold the offsets into up to 16 ranks' boxes, and one block past the end
MAILBOX_BYTES = 256 * 1024  # the message times its peers, up to which mailboxes are faster: they send every byte twice


class Workspace(NamedTuple):
    """Memory for one shape of message. `calls` counts the calls of each variant and program, on the GPU."""

    data: Symmetric  # [2, n] of the message's dtype: pull's two halves
    signals: Symmetric  # int32 [programs, ranks]: the last call that a rank's program has signalled
    mail: Symmetric  # int64 [2, ranks, n / 2]: a box for each sender and for even and odd calls
    calls: torch.Tensor  # int64 [2, programs]
    shape: torch.Size

    def programs(self, n: int, block: int) -> int:
        return min(triton.cdiv(n, block), self.calls.shape[1])


def workspace(x: torch.Tensor, group=None) -> Workspace:
    """What one_shot_allreduce needs for messages like x, on the ranks of `group`. A collective.

    Raises what check_message and symmetric() do.
    """
    check_message("workspace", x)
    world = torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1
    programs = PER_SM * sms_to_wait_on(x.device)
    return Workspace(
        symmetric("workspace", (2, x.numel()), x.dtype, x.device, group),
        symmetric("workspace", (programs, world), torch.int32, x.device, group),
        symmetric("workspace", (2, world, x.numel() // 2), torch.int64, x.device, group),
        torch.zeros(2, programs, dtype=torch.int64, device=x.device),
        x.shape,
    )


def check_message(name: str, *tensors: torch.Tensor) -> None:
    """Raises what require_triton_device does; TypeError for a dtype that is not one of DTYPES; ValueError for a layout
    that is not contiguous, a start that is no multiple of 16 bytes, or a number of elements that is 0, no multiple of
    8, or more than MOST."""
    require_triton_device(name, *tensors)
    for x in tensors:
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: dtype {x.dtype} is not one of {DTYPES}")
        if not x.is_contiguous():
            raise ValueError(f"{name}: strides {x.stride()}; call x.contiguous() first")
        if x.numel() % 8 or not x.numel() or x.data_ptr() % 16:
            raise ValueError(
                f"{name}: {x.numel()} elements that start {x.data_ptr() % 16} bytes past a multiple of 16; need 8 or "
                "more, a multiple of 8, that start at a multiple of 16 bytes: pad x, or clone it"
            )
        if x.numel() > MOST:
            raise ValueError(f"{name}: {x.numel()} elements, at most {MOST}; call NCCL, or split x")


def check_operands(
    name: str, x: torch.Tensor, work: Workspace, out: torch.Tensor | None, variant: str | None
) -> torch.Tensor:
    """The checks of one_shot_allreduce, and its output."""
    check_choice(name, (None, *VARIANTS), variant=variant)
    check_message(name, x, *([] if out is None else [out]))
    for label, each in (("x", x), ("out", x if out is None else out)):
        if each.shape != work.shape or each.dtype != work.data.own.dtype or each.device != work.calls.device:
            raise ValueError(
                f"{name}: {label} is {tuple(each.shape)} {each.dtype} on {each.device}, the workspace is for "
                f"{tuple(work.shape)} {work.data.own.dtype} on {work.calls.device}; call workspace(x) in every rank"
            )
    if out is None:
        return torch.empty_like(x)
    held = [x] * (out.data_ptr() != x.data_ptr()) + [work.data.own, work.signals.own, work.mail.own, work.calls]
    if any(overlap(out, each) for each in held):
        raise ValueError(f"{name}: out overlaps x in part, or the workspace; pass x itself or memory of its own")
    return out


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def mailbox_is_faster(x: torch.Tensor, work: Workspace) -> bool:
    return x.nbytes * (work.data.world - 1) <= MAILBOX_BYTES


@triton.jit
def _send(ptrs, bits, call, inside):
    """Store each 4 bytes with the low half of the call's number above them; relaxed, 8 bytes at a time."""
    words = (call.to(tl.int32).to(tl.int64) << 32) | (bits.to(tl.int64) & 0xFFFFFFFF)
    if ASSEMBLY:
        tl.inline_asm_elementwise(
            """{
            .reg .pred inside;
            setp.ne.s32 inside, $3, 0;
            @inside st.relaxed.sys.global.b64 [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,l,r", [ptrs.to(tl.int64), words, inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(ptrs, words, mask=inside)


@triton.jit
def _receive(ptrs, call, inside):
    """The 4 bytes of each word, once it is this call's. Every thread waits for its own words, and reads four at a time:
    one after the other, each would take its own trip to L2."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred inside<4>, other;
            .reg .b32 number<4>;
            .reg .b64 word<4>;
            setp.ne.s32 inside0, $12, 0;
            setp.ne.s32 inside1, $13, 0;
            setp.ne.s32 inside2, $14, 0;
            setp.ne.s32 inside3, $15, 0;
            mov.b64 word0, 0;
            mov.b64 word1, 0;
            mov.b64 word2, 0;
            mov.b64 word3, 0;
            again:
            @inside0 ld.relaxed.sys.global.b64 word0, [$4];
            @inside1 ld.relaxed.sys.global.b64 word1, [$5];
            @inside2 ld.relaxed.sys.global.b64 word2, [$6];
            @inside3 ld.relaxed.sys.global.b64 word3, [$7];
            mov.b64 {$0, number0}, word0;
            mov.b64 {$1, number1}, word1;
            mov.b64 {$2, number2}, word2;
            mov.b64 {$3, number3}, word3;
            setp.ne.and.s32 other, number0, $8, inside0;
            @other bra again;
            setp.ne.and.s32 other, number1, $8, inside1;
            @other bra again;
            setp.ne.and.s32 other, number2, $8, inside2;
            @other bra again;
            setp.ne.and.s32 other, number3, $8, inside3;
            @other bra again;
            }""",
            "=&r,=&r,=&r,=&r,l,l,l,l,r,r,r,r,r,r,r,r", [ptrs.to(tl.int64), call.to(tl.int32), inside.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        words = tl.load(ptrs, mask=inside, other=0)
        while tl.max(((words >> 32).to(tl.int32) != call.to(tl.int32)).to(tl.int32) * inside.to(tl.int32), axis=0) > 0:
            words = tl.load(ptrs, mask=inside, other=0)
        return words.to(tl.int32)


@triton.jit
def _halves(bits, dtype: tl.constexpr):
    """The two 16-bit numbers in each 32 bits, as float32."""
    low, high = (bits & 0xFFFF).to(tl.uint16), ((bits >> 16) & 0xFFFF).to(tl.uint16)
    return low.to(dtype, bitcast=True).to(tl.float32), high.to(dtype, bitcast=True).to(tl.float32)


# Each access of a warp is to adjacent words. If each thread read 16 bytes of the message, as its alignment allows,
# words would have to move between threads, through shared memory.
@triton.jit(do_not_specialize_on_alignment=["x_ptr", "y_ptr"])
def one_shot_allreduce_mailbox_kernel(
    x_ptr, y_ptr, mail, calls_ptr, words,  # mail: the addresses of every rank's boxes
    RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    first = program * BLOCK + tl.arange(0, BLOCK)
    # Before the number of the call: what is sent needs both, and so they come from memory at once.
    bits = tl.load(x_ptr + first, mask=first < words, other=0)
    call = tl.load(calls_ptr + program) + 1
    box = (call % 2) * WORLD * words
    for start in range(program * BLOCK, words, programs * BLOCK):
        at = start + tl.arange(0, BLOCK)
        for step in tl.static_range(1, WORLD):  # each rank begins with another peer
            peer = pointer(mail[(RANK + step) % WORLD], tl.int64)
            _send(peer + box + RANK * words + at, bits, call, at < words)
        at += programs * BLOCK
        bits = tl.load(x_ptr + at, mask=at < words, other=0)

    tl.debug_barrier()  # y may be x: all threads have read what they send before one stores over it
    own = pointer(mail[RANK], tl.int64) + box
    for start in range(program * BLOCK, words, programs * BLOCK):
        at = start + tl.arange(0, BLOCK)
        low, high = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(WORLD):
            if rank == RANK:
                bits = tl.load(x_ptr + at, mask=at < words, other=0)
            else:
                bits = _receive(own + rank * words + at, call, at < words)
            more_low, more_high = _halves(bits, DTYPE)
            low, high = low + more_low, high + more_high
        low_bits = low.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.int32)
        high_bits = high.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.int32)
        tl.store(y_ptr + at, (high_bits << 16) | low_bits, mask=at < words)
    tl.debug_barrier()  # all threads have read the number of the call
    tl.store(calls_ptr + program, call)


def launch_mailbox(x: torch.Tensor, y: torch.Tensor, work: Workspace) -> None:
    words = x.numel() // 2
    one_shot_allreduce_mailbox_kernel[(work.programs(words, MAILBOX_BLOCK),)](
        x.view(-1).view(torch.int32), y.view(-1).view(torch.int32), work.mail.addresses, work.calls[1], words,
        RANK=work.data.rank, WORLD=work.data.world, BLOCK=MAILBOX_BLOCK,
        DTYPE=tl.bfloat16 if x.dtype is torch.bfloat16 else tl.float16, num_warps=MAILBOX_WARPS,
    )  # fmt: skip
