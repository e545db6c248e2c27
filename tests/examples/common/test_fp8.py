"""The quantizer that kernels are held to, by its definition, and the checks of formats and scales."""

import pytest
import torch

from examples.common.fp8 import E4M3, E5M2, FLOOR, dequantize_reference, quantize_reference, require_fp8, require_scales

BLOCKS = {"tensor": (70, 300), "row": (1, 300), "group": (1, 128), "block": (128, 128)}


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_each_group_has_the_scale_of_its_largest(h, block, dtype):
    x = h.randn(70, 300) * torch.logspace(-8, 8, 300, device=h.device)
    q, scale = quantize_reference(x, block, dtype)
    assert q.dtype is dtype
    assert q.shape == x.shape
    assert scale.shape == (-(-70 // block[0]), -(-300 // block[1]))
    most = torch.finfo(dtype).max
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            group = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            assert scale[i, j] == x[group].abs().max() / torch.tensor(most, device=h.device)
            assert q[group].float().abs().max() == most
    error = (dequantize_reference(q, scale, block) - x.double()).abs()
    spacing = torch.finfo(dtype).eps * x.double().abs() + scale.double().max() * torch.finfo(dtype).smallest_normal
    assert (error <= spacing / 2 * 1.001).all()


def test_zeros_nan_and_infinity_stay_in_their_group():
    x = torch.ones(4, 256)
    x[0], x[1, 3], x[2, 200] = 0.0, float("nan"), float("inf")
    q, scale = quantize_reference(x, (1, 128))
    assert scale[0, 0] == torch.tensor(FLOOR) / 448
    back = dequantize_reference(q, scale, (1, 128))
    assert not back[0].any()
    assert back.isnan().sum(dim=1).tolist() == [0, 128, 128, 0]
    for whole in (back[1, 128:], back[2, :128], back[3]):  # 448 times a scale that float32 rounds
        assert ((whole - 1).abs() < 2**-23).all()


def test_what_cannot_be_used_is_refused():
    """What test_wrappers does not have: AMD's formats, scales that are no scales, no block."""
    require_fp8("f", a=torch.ones(2).to(E4M3), b=torch.ones(2).to(E5M2))
    with pytest.raises(TypeError, match=r"a is torch\.float8_e4m3fnuz; the fnuz formats are AMD's"):
        require_fp8("f", a=torch.ones(2).to(torch.float8_e4m3fnuz))
    data = torch.ones(3)
    require_scales("f", data, scale=(torch.ones(3), [(), (3,)]))
    require_scales("f", data, False, scale=(torch.zeros(()), [()]))  # values are looked at only when asked for
    for values in ([1.0, 0.0, -1.0], [float("nan"), float("inf"), 1.0]):
        with pytest.raises(ValueError, match="f: scale has 2 of 3 values that are not positive and finite"):
            require_scales("f", data, scale=(torch.tensor(values), [(), (3,)]))
    for block in ((0, 5), (5, 0)):
        with pytest.raises(ValueError, match=r"quantize_reference: block is .*at least one row and one column"):
            quantize_reference(torch.ones(4, 5), block)
