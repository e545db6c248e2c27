"""The study of llama_block: the least work of its parts, and which part a kernel belongs to."""

from dataclasses import replace

import pytest

from examples.common.transformer import TINY, WIDE, pieces
from studies.fp8.llama_block import BETWEEN, LINEARS, choices, least, make, part_of


@pytest.mark.parametrize("config", [TINY, WIDE])
def test_the_least_work_is_that_of_the_transformer_with_one_layer(config):
    one = replace(config, layers=1, vocab=1)
    steps = {piece.name: piece for piece in pieces(one, 3, 64, 2)}
    work = least(one, 3, 64, "prefill")
    products = [steps[name] for name in LINEARS]
    assert work["products"] == (sum(piece.bytes for piece in products), sum(piece.flops for piece in products))
    assert work["attention"][0] == steps["attention"].bytes
    assert work["attention"][1] == pytest.approx(steps["attention"].flops, rel=0.02)  # it has no diagonal
    # A norm of two passes and a last residual of three instead of the embedding and the head.
    row = 2 * 3 * 64 * config.width
    between = steps["rotate"].bytes + steps["residual, norm"].bytes + steps["silu"].bytes
    assert work[BETWEEN] == (between + 5 * row, 0)
    assert least(one, 3, 64, "training")["products"] == tuple(3 * each for each in work["products"])


def test_kernels_belong_to_parts():
    for name, part in (
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "products"),
        ("cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<...>>", "products"),
        ("linear_warp_specialized_kernel", "products"),
        ("triton_tem_fused_mm_t_0", "products"),
        ("fp8_matmul_warp_specialized_kernel", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3f_128x128x128", "attention"),
        ("pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("flash_attention_hopper_kernel", "attention"),
        ("triton_red_fused__to_copy_abs_amax_clamp_div_mul_2", BETWEEN),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_cat_3", BETWEEN),
        ("quantize_transposed_kernel", BETWEEN),
        ("swiglu_quantize_kernel", BETWEEN),
        ("layer_norm_quantize_rows_kernel", BETWEEN),
    ):
        assert part_of(name) == part, name


@pytest.mark.parametrize("phase", ["prefill", "training"])
def test_each_choice_of_the_lesson_is_among_those_of_the_study(h, phase):
    from examples.fp8.llama_block import USE

    names = [name for name, *_ in choices(make(h, TINY, 1, 16)[0], phase)]
    for step, use in USE[phase].items():
        assert f"{step}: {', '.join(use) or 'none'}" in names
