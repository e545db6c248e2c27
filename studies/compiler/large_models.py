"""large_models, measured: whole models of 10 and 40 B, and what max-autotune takes for a block of 40 B."""

from __future__ import annotations

from harness import Harness, Skip, Timing, Work

import torch

from compile_inspect import fresh_compiler, warm_up, watch
from examples.common.transformer import FORTY_BILLION, Config, Transformer, steps
from examples.compiler.large_models import EAGER, WHOLE, compiled_blocks, models, one_size

TEN_BILLION = Config(width=4096, layers=44, heads=32, kv_heads=8, hidden=14336, vocab=32000)  # 9.7: Llama 3 8B's blocks
CHAPTER_S = {"10 B": "30-60 s", "40 B": "2-5 min"}  # what the chapter says of compiling them
TUNED = "torch.compile one block, max-autotune-no-cudagraphs"


def tuned_block(h: Harness, name: str, model: Transformer) -> None:
    """One block with every matrix product tuned: regional compilation makes that possible for 60 layers."""
    ids = h.randint(model.config.vocab, 1, 512)
    with fresh_compiler(), torch._inductor.config.patch(autotune_num_choices_displayed=0):
        tuned = compiled_blocks(model, mode="max-autotune-no-cudagraphs")
        with h.progress("tuning one block"), watch() as seen:
            tuned(ids)
            torch.cuda.synchronize()
        table = h.compare(
            {EAGER: model, "torch.compile one block": compiled_blocks(model), TUNED: tuned}, model.float64, ids,
            baseline=EAGER, title="large_models, tuned", case=f"{name}, 1x512 tokens",
            work=Work.in_steps(steps(model.config, 1, 512, 2), torch.bfloat16),
            timing=Timing(end_to_end=True, first_calls={TUNED: seen.seconds}),
            max_error_ratio=2.0, dtype=torch.bfloat16,
        )  # fmt: skip
        if table.timed:
            h.say(
                f"{name}, one block by max-autotune: {seen.seconds:.0f} s (the chapter: 2-5 min for all), "
                f"{table.by_host('torch.compile one block', TUNED)} the default mode"
            )


@torch.no_grad()
def study(h: Harness) -> None:
    if h.device.type != "cuda" or not h.full:
        raise Skip("needs a GPU at full size: models of 10 and 40 billion parameters")
    warm_up(h.device)
    for asked, name, model in models(h, {"10 B": TEN_BILLION, "40 B": FORTY_BILLION}, torch.bfloat16):
        table = one_size(h, name, model, tokens=1, whole=True)
        if table.timed:
            seconds = f"{table[WHOLE].first_call_s:.0f} s to compile"
            h.say(f"{name}, whole: {seconds}; the chapter says {CHAPTER_S[asked]} of {asked}")
        if asked == "40 B":
            tuned_block(h, name, model)
        del model
