"""What TMA can load: a layout it cannot is named and refused, one it can becomes the descriptor Triton wants."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.tma import require_tma_layout, tma_descriptor

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_that_pass(dtype):
    rows = torch.zeros(40, 64, dtype=dtype)
    for x in (
        rows[:, 16:32],  # rows apart, and a start 16 elements later
        rows[::3, :5],  # a width that is no multiple of anything: only strides count
        rows[0],
        rows[:1, :3].as_strided((1, 3), (7, 1)),  # a stride nobody steps by
        rows.view(5, 8, 64).transpose(0, 1),
        rows.as_strided((30, 16), (16, 1)),
        rows.as_strided((40, 1), (64, 9)),  # a last dimension of one element
        rows[:0].t(),  # nothing will be loaded
    ):
        require_tma_layout("probe", x=x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_that_are_refused(dtype):
    rows = torch.zeros(40, 64, dtype=dtype)
    size = dtype.itemsize
    for x, said in (
        (rows.t(), r"shape \(64, 40\), strides \(1, 64\) and starts 0"),
        (rows[:, ::2], r"strides \(64, 2\)"),
        (rows.view(-1)[1:], f"starts {size} bytes past"),
        (rows.as_strided((3, 8), (8 // size, 1)), rf"strides \({8 // size}, 1\)"),
        (rows.as_strided((3, 4, 8), (64, 9, 1)), r"strides \(64, 9, 1\)"),
        (rows[:1].expand(5, 64), r"strides \(0, 1\)"),
    ):
        pad = f"pad the last dimension to a multiple of {16 // size}, and " if x.shape[-1] % (16 // size) else ""
        with pytest.raises(ValueError, match=rf"probe: x has .*{said}.* elsewhere; {pad}call x\.clone\("):
            require_tma_layout("probe", x=x)


def test_the_argument_at_fault_is_named_and_the_way_out_works():
    good, bad = torch.zeros(4, 8), torch.zeros(8, 4).t()
    with pytest.raises(ValueError, match="probe: b has"):
        require_tma_layout("probe", a=good, b=bad, c=good)
    with pytest.raises(ValueError, match=r"call b\.t\(\)\.clone\(.*\)\.t\(\)$"):  # b again, not its transpose
        require_tma_layout("probe", **{"b.t()": bad})
    padded = torch.nn.functional.pad(torch.zeros(6, 50, dtype=torch.float16), (0, 6))  # as the message says
    require_tma_layout("probe", x=padded, part=padded[:, :50], shape=padded.to("meta"))
    with pytest.raises(ValueError, match="strides"):  # wrappers run on meta tensors for another GPU
        require_tma_layout("probe", x=padded.to("meta").t())


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=5), data=st.data())
def test_what_passes_triton_accepts_too(shape, data):
    """Every layout, however strange: either it is refused by name or triton's own assertions hold."""
    steps = st.sampled_from([0, 1, 2, 7, 8, 16, 24, 64])
    strides = [data.draw(steps) for _ in shape]
    if data.draw(st.booleans()):
        strides[-1] = 1
    extent = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    offset = data.draw(st.sampled_from([0, 0, 1, 8]))
    x = torch.zeros(extent + offset, dtype=torch.float16).as_strided(shape, strides, offset)
    try:
        require_tma_layout("probe", x=x)
    except ValueError:
        return
    descriptor = tma_descriptor(x, [1] * (len(shape) - 1) + [8])
    assert descriptor.base is x
    assert descriptor.shape == shape
    for n, given_step, step in zip(shape, strides, descriptor.strides, strict=True):
        assert n == 1 or step == given_step


def test_a_descriptor_for_dimensions_of_one():
    x = torch.zeros(80, dtype=torch.float16).as_strided((1, 5, 1, 3), (7, 16, 5, 1))
    assert tma_descriptor(x, [1, 4, 1, 8]).strides == [16, 16, 16, 1]
    assert tma_descriptor(x.as_strided((5, 1), (16, 9)), [4, 8]).strides == [16, 1]
