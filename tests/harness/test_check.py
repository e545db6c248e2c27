"""The check must fail what is wrong: each kind of wrong output, one test."""

from harness.check import CHUNK, GUARD, CheckError, VacuousCheck, check, judge, poisoned_outputs

import pytest
import torch


def row_sum(x):
    return x.sum(-1)


def double(x):
    return x.double() * 2


@pytest.fixture
def x():
    return torch.randn(7, 33, generator=torch.Generator().manual_seed(0))


def run(fn, x, reference=double, **kwargs):
    return check(fn, reference, x, what="probe", **kwargs)


def test_right_output_passes_with_its_error(x):
    assert 0 <= run(lambda x: x * 2, x) <= 1
    assert 0 < run(lambda x: x * 2 * (1 + 2e-7), x) <= 1


def one_off_by_1e_5(x):
    out = x * 2
    out[3, 5] *= 1.00001
    return out


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("zeros", torch.zeros_like),
        ("the mean", lambda x: torch.full_like(x, (2 * x).mean().item())),
        ("the row mean", lambda x: (2 * x).mean(-1, keepdim=True).expand_as(x).contiguous()),
        ("NaN", lambda x: torch.full_like(x, float("nan"))),
        ("infinity", lambda x: torch.full_like(x, float("inf"))),
        ("one element off by 1e-5 of itself", one_off_by_1e_5),
        ("one NaN", lambda x: (x * 2).index_fill_(1, torch.tensor([32]), float("nan"))),
        ("float16 arithmetic", lambda x: (x.half() * 2).float()),
    ],
)  # fmt: skip
def test_wrong_values_fail(name, fn, x):
    with pytest.raises(CheckError, match="elements are wrong"):
        run(fn, x, terms=0)


def test_a_row_left_unwritten_fails_and_is_named(x):
    def forgets_last_row(x):
        out = torch.empty_like(x)
        out[:-1] = x[:-1] * 2
        return out

    with pytest.raises(CheckError, match=r"33 of 231 elements.*\[6, 0\].*33 are NaN"):
        run(forgets_last_row, x)


def test_wrong_dtype_and_shape_fail(x):
    with pytest.raises(CheckError, match=r"dtype is torch\.float64, expected torch\.float32"):
        run(lambda x: x.double() * 2, x)
    with pytest.raises(CheckError, match=r"shape is \(33, 7\), expected \(7, 33\)"):
        run(lambda x: x.t() * 2, x)


def test_number_of_outputs_must_match(x):
    with pytest.raises(CheckError, match="returned 2 tensors, expected 1"):
        run(lambda x: (x * 2, x), x)


def test_each_output_of_several_is_judged(x):
    def reference(x):
        return x.double() * 2, x.double() * 3

    check(lambda x: (x * 2, x * 3), reference, x, what="pair")
    with pytest.raises(CheckError, match="pair output 1"):
        check(lambda x: (x * 2, x * 2), reference, x, what="pair")


def test_a_write_past_the_end_fails(x):
    def writes_past_the_end(x):
        out = torch.empty_like(x)
        out.copy_(x * 2)
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1.0)
        return out

    with pytest.raises(CheckError, match=f"4 bytes outside its output were written .within {GUARD}"):
        run(writes_past_the_end, x)


def test_a_write_before_the_start_fails(x):
    def writes_before_the_start(x):
        out = torch.empty(x.shape)
        out.copy_(x * 2)
        out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(1.0)
        return out

    with pytest.raises(CheckError, match="outside its output"):
        run(writes_before_the_start, x)


def test_a_changed_input_fails(x):
    with pytest.raises(CheckError, match="changed its input 0"):
        check(lambda x: x.mul_(2), lambda x: x.double() * 2, x, what="in place")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64])
def test_inputs_of_every_layout_are_compared_byte_by_byte(dtype):
    """A single column is contiguous for torch whatever its strides; a scalar has no dimension to view bytes in."""
    base = torch.randn(1, 160, generator=torch.Generator().manual_seed(0)).mul_(100).to(dtype)
    if dtype.is_floating_point:
        base[0, 5] = float("nan")
    for view in (
        base.t(),
        base.as_strided((1, 160), (7, 1)),
        base[:, ::3],
        base[0, 3],
        base[:, :0],
        base.expand(4, 160),
    ):
        before = view.clone()
        run(lambda x: x * 2, view, lambda x: x.double() * 2, dtype=dtype)
        assert torch.equal(view.nan_to_num(), before.nan_to_num())

    def changes_its_input(x):
        out = x * 2
        x[7 if x.ndim else ()] += 1
        return out

    for view in (base.t(), base[0, 3]):
        with pytest.raises(CheckError, match="changed its input 0"):
            run(changes_its_input, view, lambda x: x.double() * 2)


def test_a_reference_in_float32_is_refused(x):
    with pytest.raises(TypeError, match="must be float64"):
        run(lambda x: x * 2, x, reference=lambda x: x * 2)


def test_a_check_that_zeros_would_pass_is_refused():
    flat = torch.full((4, 64), 1e-3) + torch.randn(4, 64) * 1e-9
    with pytest.raises(VacuousCheck, match="the mean would pass in 256 of 256"):
        check(lambda x: x * 2, double, flat, what="flat", terms=64)
    with pytest.raises(VacuousCheck, match="zeros would pass in"):
        check(lambda x: x * 2, double, torch.randn(4, 64), what="loose", acc=1.0)
    check(lambda x: x * 2, double, flat, what="flat", terms=64, constant_ok=True)


def test_an_exactly_constant_answer_is_no_vacuous_check():
    check(lambda x: x * 2, double, torch.ones(3, 5), what="ones")
    check(lambda x: x * 2, double, torch.zeros(3, 5), what="zeros")
    check(lambda x: x * 2, double, torch.randn(1), what="one element")


def test_nan_and_infinities_must_be_where_the_reference_has_them():
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0, -2.0])
    assert run(lambda x: x * 2, special) == 0
    for i, wrong in ((0, 0.0), (1, -float("inf")), (2, float("nan")), (3, float("inf")), (4, float("nan"))):
        with pytest.raises(CheckError, match=rf"1 of 5 elements are wrong, the worst at \[{i}\]"):
            run(lambda x, i=i, wrong=wrong: (x * 2).index_fill_(0, torch.tensor([i]), wrong), special)


def test_a_result_beyond_the_range_of_float16_is_infinite():
    big = torch.tensor([60000.0, -60000.0, 2.0], dtype=torch.float16)
    assert run(lambda x: x * 2, big) == 0
    with pytest.raises(CheckError):
        run(lambda x: (x * 2).clamp(-65504, 65504), big)


@pytest.mark.parametrize(
    ("got", "want"),
    [
        ([float("inf"), 500.0, -7.0, 3e4], [1e30, 1.0, 2.0, 3.0]),  # an infinity in the row must not widen the budget
        ([float("nan"), 0.0, 0.0, 5.0], [float("nan"), 1e-3, 1e-3, 5.0]),  # nor a NaN excuse the others
        ([float("inf"), 0.0, -float("inf")], [float("inf"), 1.0, -float("inf")]),
    ],
)
def test_non_finite_values_do_not_excuse_finite_ones(got, want):
    got, want = torch.tensor(got, dtype=torch.float16), torch.tensor(want, dtype=torch.float64)
    with pytest.raises(CheckError):
        judge(got, want, what="row", dtype=torch.float16)


def test_right_infinities_are_no_vacuous_check():
    inf = float("inf")
    for values in ([inf, 0.0], [inf, inf], [inf, -inf, 0.0], [inf, 1.0, 2.0]):
        assert judge(torch.tensor(values), torch.tensor(values).double(), what="inf", dtype=torch.float32) == 0


def test_at_the_end_of_the_range_rounding_may_go_either_way():
    for got, want in ((65504.0, 65520.001), (float("inf"), 65519.99), (-65504.0, -65521.0)):
        probe = torch.tensor([got, 1.0, 2.0], dtype=torch.float16)
        judge(probe, torch.tensor([want, 1.0, 2.0], dtype=torch.float64), what="edge", dtype=torch.float16, terms=0)
    probe = torch.tensor([-65504.0, 1.0, 2.0], dtype=torch.float16)
    with pytest.raises(CheckError):
        judge(probe, torch.tensor([65520.0, 1.0, 2.0], dtype=torch.float64), what="edge", dtype=torch.float16, terms=0)


def test_a_check_that_most_zeros_would_pass_is_refused():
    """A few large elements in each row lend their size to the budget of the many small ones."""
    peaked = torch.softmax(torch.randn(8, 4096, generator=torch.Generator().manual_seed(0)) * 6, -1)
    with pytest.raises(VacuousCheck, match="zeros would pass in"):
        check(lambda x: x * 2, double, peaked, what="peaked", terms=4096)
    check(lambda x: x * 2, double, peaked, what="peaked", terms=0)


def test_the_smallest_numbers_are_held_to_one_subnormal():
    tiny = torch.tensor([6e-8, 1.2e-7, 1.0], dtype=torch.float16)
    run(lambda x: x * 2, tiny, terms=0)
    with pytest.raises(CheckError):
        run(lambda x: torch.where(x < 1e-6, 4 * x, 2 * x), tiny, terms=0)


def test_empty_scalar_and_integer_outputs():
    assert run(lambda x: x * 2, torch.empty(0, 5)) == 0
    run(lambda x: x * 2, torch.tensor(1.5))
    ints = torch.arange(10)
    assert run(lambda x: x * 2, ints) == 0
    assert judge(torch.tensor([2**53]), torch.tensor([2.0**53], dtype=torch.float64), what="i", dtype=torch.int64) == 0
    with pytest.raises(CheckError, match="1 of 1 elements"):
        judge(torch.tensor([2**53 + 1]), torch.tensor([2.0**53], dtype=torch.float64), what="i", dtype=torch.int64)
    with pytest.raises(CheckError, match=r"1 of 10 elements are wrong, the first at \[9\]"):
        run(lambda x: (x * 2).index_fill_(0, torch.tensor([9]), 0), ints)


def test_an_error_in_the_last_chunk_of_a_large_tensor_is_found():
    n = CHUNK + 1000
    want = torch.ones(n, dtype=torch.float64)
    want[::2] = -3
    got = want.float()
    assert judge(got, want, what="large", dtype=torch.float32) == 0
    got[-1] += 1
    with pytest.raises(CheckError, match=rf"1 of {n} elements are wrong, the worst at \[{n - 1}\]"):
        judge(got, want, what="large", dtype=torch.float32)


def test_budget_grows_with_terms_and_accumulator():
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(1))
    exact = x.double().sum(-1)

    def error(**budget):
        return judge(x.half().float().sum(-1), exact, what="sum", dtype=torch.float32, **budget)

    with pytest.raises(CheckError):
        error(terms=4096)
    assert error(terms=64, acc=torch.float16) < 1


def test_poison_reaches_every_way_to_allocate():
    x = torch.randn(4, 6)
    with poisoned_outputs("probe"):
        made = [
            torch.empty(3), torch.empty(2, 3, dtype=torch.float16), torch.empty_like(x), torch.empty_like(x.t()),
            torch.empty_strided((2, 2), (2, 1)), x.new_empty(5), x.new_empty_strided((2,), (1,)),
            torch.empty((0, 4)), torch.empty(3, dtype=torch.bfloat16),
        ]  # fmt: skip
        assert all(torch.isnan(t).all() for t in made)
        assert (torch.empty(4, dtype=torch.int32) == -1).all()
        assert made[3].stride() == torch.empty_like(x.t()).stride()
