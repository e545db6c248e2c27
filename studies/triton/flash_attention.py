"""Study of flash attention: training, what FlexAttention gains by tuning, and where wgmma finds its left operand.

Forward + backward is one call: 3.5 times the FLOPs of forward, of which backward alone is 2.5. Backward computes 7
products where one kernel needs 5 (flash_attention_backward.py), so that every run gives the same bits. The tensor cores
then do 1.4 times the TFLOP/s that the rows of backward show.

FlexAttention's own options and torch.compile's max-autotune take some 10 s of compiling per case, so they are timed
here, at one size, and not in the lesson. The generated code shows how many programs share an SM, and whether the left
operands of their wgmma lie in registers or in shared memory: the weights come from registers, and at a head dim of 64
the queries too (the kernel adds 0 to them). At 128 the queries would spill.
"""

from __future__ import annotations

import functools
import itertools
import re

from harness import Harness, Work
from harness.codegen import Kernel, dump

import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import FlexKernelOptions, create_block_mask, flex_attention

from examples.common.attention import attention_budget, attention_flops, sdpa
from examples.common.training import forward_backward
from examples.triton.flash_attention import TILES, flash_attention, reference, variants
from examples.triton.flash_attention_backward import reference_backward


def programs_per_sm(kernel: Kernel) -> int:
    """How many programs the registers (65536), shared memory (228 KiB) and threads (2048) of a Hopper SM hold."""
    # Registers are dealt to a warp in units of 256; each program takes 1 KiB of shared memory for the system.
    by_registers = 65536 // (-(-32 * kernel.registers // 256) * 256 * kernel.warps)
    return min(by_registers, 228 * 1024 // (kernel.shared + 1024), 2048 // (32 * kernel.warps))


def left_operands(*args) -> dict[str, int]:
    """How many wgmma of the variant "tiles" take their left operand from registers, and from shared memory."""
    ptx = dump(flash_attention, args, {"variant": "tiles"}, sm=90)["ptx"]
    first = re.findall(r"wgmma\.mma_async\.sync\.aligned\.\S+\s*\{[^}]*\},\s*(\{|%)", ptx)
    return {"left in registers": first.count("{"), "left in memory": first.count("%")}


def tuned_flex(h: Harness, B: int, H: int, S: int, D: int, causal: bool) -> None:
    """FlexAttention as it comes, with what its options may promise here, and tuned, beside cuDNN and this kernel."""
    q, k, v = (h.randn(B, H, S, D, dtype=h.half) for _ in range(3))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device=h.device) if causal else None
    # What holds with this mask and without one: each row sees a key of the first block that it meets, and no block
    # between others is skipped. FlexAttention drops USE_TMA where a tensor does not allow it.
    promises = ("USE_TMA", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS")
    promises = {name: True for name in promises if name in FlexKernelOptions.__annotations__}
    flex = functools.partial(flex_attention, block_mask=mask)
    promised = functools.partial(flex, kernel_options=promises)
    silent = {"autotune_num_choices_displayed": 0, "max_autotune_report_choices_stats": False}
    tuned = torch._inductor.list_mode_options("max-autotune-no-cudagraphs") | silent
    h.compare(
        {
            "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION, causal), "FlexAttention": h.compiled(flex),
            "FlexAttention, options": h.compiled(promised),
            "FlexAttention, tuned": h.compiled(promised, options=tuned),
            "triton": functools.partial(flash_attention, causal=causal),
        },
        functools.partial(reference, causal=causal), q, k, v, baseline="FlexAttention", title="FlexAttention, tuned",
        case=f"{B}x{H}x{S}x{D}{' causal' * causal}",
        work=Work(bytes=4 * q.nbytes, flops=attention_flops(q, k, causal), dtype=h.half), **attention_budget(h.half, S),
    )  # fmt: skip


def gradient_budget(dtype: torch.dtype, terms: int) -> dict:
    """Of gradients in blocks_of_rows: weights, their gradients, and o, of which delta is made, are rounded first. For
    these roundings harness.check allows 8 eps of the rms of a block, beside the rounding of the result."""
    return {"terms": terms, "operand_eps": torch.finfo(dtype).eps}


def blocks_of_rows(x: torch.Tensor) -> torch.Tensor:
    """[B, H, S, D] as [B, H, blocks, 16 * D], the last row repeated, so that an error is measured against 16 rows: a
    causal row may cancel to the rounding of o, and gradients shrink with their position. Of whole blocks this is a
    view, which costs a timed call nothing, unless the gradients are [B, S, H, D] in memory: then they are copied."""
    if x.shape[-2] % 16:
        x = x[..., torch.arange(-(-x.shape[-2] // 16) * 16, device=x.device).clamp(max=x.shape[-2] - 1), :]
    return x.unflatten(-2, (-1, 16)).flatten(-2)


def in_blocks(fn):
    return lambda *args: tuple(map(blocks_of_rows, fn(*args)))


def training(h: Harness, B: int, H: int, S: int, D: int, causal: bool) -> None:
    """Forward + backward beside cuDNN, torch's flash attention and FlexAttention."""
    q, k, v, do = (h.randn(B, H, S, D, dtype=h.half) for _ in range(4))
    calls = variants(h, S, causal)
    h.compare(
        {name: in_blocks(forward_backward(fn)) for name, fn in calls.items()},
        in_blocks(functools.partial(reference_backward, causal=causal)), q, k, v, do, baseline=next(iter(calls)),
        title="forward + backward", case=f"{B}x{H}x{S}x{D}{' causal' * causal}", default="triton",
        work=Work(bytes=12 * q.nbytes, flops=7 * attention_flops(q, k, causal) // 2, dtype=h.half),
        **gradient_budget(h.half, S),
    )  # fmt: skip


def backward(h: Harness, B: int, H: int, S: int, D: int, causal: bool) -> None:
    """The backward alone, of graphs built once: cuDNN, torch's flash attention and ours. FlexAttention's graph is gone
    after its first call. The reference alone reads q, k and v; the graphs have copies."""
    q, k, v, do = (h.randn(B, H, S, D, dtype=h.half) for _ in range(4))

    def gradients(fn):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        o = fn(*inputs)
        return in_blocks(lambda do, *_: torch.autograd.grad(o, inputs, do, retain_graph=True))

    calls = {name: fn for name, fn in variants(h, S, causal).items() if name != "FlexAttention"}
    h.compare(
        {name: gradients(fn) for name, fn in calls.items()},
        in_blocks(lambda do, q, k, v: reference_backward(q, k, v, do, causal)[1:]), do, q, k, v,
        baseline=next(iter(calls)), title="backward", case=f"{B}x{H}x{S}x{D}{' causal' * causal}", default="triton",
        work=Work(bytes=8 * q.nbytes, flops=5 * attention_flops(q, k, causal) // 2, dtype=h.half),
        **gradient_budget(h.half, S),
    )  # fmt: skip


def study(h: Harness) -> None:
    full = [(4, 32, 4096, 64), (4, 32, 4096, 128), (1, 32, 16384, 128)]
    cases = h.pick(interpreted=[(1, 2, 130, 64)], quick=[(1, 16, 4096, 128)], full=full)
    for case, causal in itertools.product(cases, (False, True)):
        training(h, *case, causal)
        backward(h, *case, causal)
    if h.device.type == "cuda":
        for causal in (False, True):
            tuned_flex(h, *h.pick(quick=(1, 16, 4096, 128), full=(4, 32, 4096, 128)), causal)
    code = {}
    for D, causal in itertools.product(TILES, (False, True)):
        x = h.meta(4, 32, 4096, D)
        for kernel in h.codegen(flash_attention, x, x, x, causal, variant="tiles", find={90: ("wgmma",)}):
            code[f"head dim {D}{' causal' * causal}"] = {
                "programs/SM": programs_per_sm(kernel), "registers": kernel.registers, "spill bytes": kernel.spills,
                **left_operands(x, x, x, causal),
            }  # fmt: skip
    if code:
        h.table("code for sm_90, and where its wgmma have their left operands", code)
