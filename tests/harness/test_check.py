"""The check must fail what is wrong: each kind of wrong output."""

import math

from harness.check import GUARD, CheckError, VacuousCheck, check, judge, poisoned_outputs

import pytest
import torch

INF, NAN = math.inf, math.nan


def double(x):
    return x.double() * 2


@pytest.fixture
def x():
    return torch.randn(7, 33, generator=torch.Generator().manual_seed(0))


def run(fn, x, reference=double, **kwargs):
    return check(fn, reference, x, what="probe", **kwargs)


def judged(got, want, dtype=torch.float16, **budget):
    want = torch.as_tensor(want, dtype=torch.float64)
    return judge(torch.as_tensor(got, dtype=dtype), want, what="probe", dtype=dtype, **budget)


def forgets_last_row(x):
    out = torch.empty_like(x)
    out[:-1] = x[:-1] * 2
    return out


def writes_past_the_end(x):
    out = torch.empty_like(x)
    out.copy_(x * 2)
    out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1.0)
    return out


def writes_past_zeros(x):
    out = torch.zeros_like(x)
    out += x * 2
    out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1.0)
    return out


def writes_before_the_start(x):
    out = torch.empty(x.shape)
    out.copy_(x * 2)
    out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(1.0)
    return out


def one_off_by_1e_5(x):
    out = x * 2
    out[3, 5] *= 1.00001
    return out


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (torch.zeros_like, "elements are wrong"),
        (lambda x: torch.full_like(x, (2 * x).mean().item()), "elements are wrong"),
        (lambda x: (2 * x).mean(-1, keepdim=True).expand_as(x).contiguous(), "elements are wrong"),
        (lambda x: torch.full_like(x, NAN), "231 of 231 elements are wrong"),
        (lambda x: torch.full_like(x, INF), "231 of 231 elements are wrong"),
        (one_off_by_1e_5, r"1 of 231 elements are wrong, the worst at \[3, 5\]"),
        (lambda x: (x * 2).index_fill_(1, torch.tensor([32]), NAN), "7 of 231 elements are wrong"),
        (lambda x: (x.half() * 2).float(), "elements are wrong"),
        (forgets_last_row, r"33 of 231 elements.*\[6, 0\].*33 are NaN"),
        (lambda x: x.double() * 2, r"dtype is torch\.float64, expected torch\.float32"),
        (lambda x: x.t() * 2, r"shape is \(33, 7\), expected \(7, 33\)"),
        (lambda x: (x * 2, x), "returned 2 tensors, expected 1"),
        (writes_past_the_end, f"4 bytes outside its output were written .within {GUARD}"),
        (writes_before_the_start, "outside its output"),
        (writes_past_zeros, f"4 bytes outside its output were written .within {GUARD}"),
        (lambda x: x.mul_(2), "changed its input 0"),
    ],
)
def test_what_is_wrong_fails_and_is_named(x, fn, message):
    with pytest.raises(CheckError, match=message):
        run(fn, x, terms=0)


def test_each_output_of_several_is_judged(x):
    def reference(x):
        return x.double() * 2, x.double() * 3

    assert 0 < check(lambda x: (x * 2, x * 3 * (1 + 2e-7)), reference, x, what="pair") <= 1
    with pytest.raises(CheckError, match="pair output 1"):
        check(lambda x: (x * 2, x * 2), reference, x, what="pair")
    with pytest.raises(TypeError, match="must be float64"):
        run(lambda x: x * 2, x, reference=lambda x: x * 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64])
def test_inputs_of_every_layout_are_compared_byte_by_byte(dtype):
    """A single column is contiguous for torch whatever its strides; a scalar has no dimension to view bytes in."""
    base = torch.randn(1, 160, generator=torch.Generator().manual_seed(0)).mul_(100).to(dtype)
    if dtype.is_floating_point:
        base[0, 5] = NAN
    column, scalar = base.t(), base[0, 3]
    for view in (column, scalar, base.as_strided((1, 160), (7, 1)), base[:, ::3], base[:, :0], base.expand(4, 160)):
        before = view.clone()
        run(lambda x: x * 2, view, dtype=dtype)
        assert torch.equal(view.nan_to_num(), before.nan_to_num())

    def changes_its_input(x):
        out = x * 2
        x[7 if x.ndim else ()] += 1
        return out

    for view in (column, scalar):
        with pytest.raises(CheckError, match="changed its input 0"):
            run(changes_its_input, view)


def test_a_check_that_proves_nothing_is_refused():
    """What the mean or zeros would pass; a few large elements lend their size to the budget of the many small ones."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.full((4, 64), 1e-3) + torch.randn(4, 64, generator=generator) * 1e-9
    peaked = torch.softmax(torch.randn(8, 4096, generator=generator) * 6, -1)
    with pytest.raises(VacuousCheck, match="the mean would pass in 256 of 256"):
        run(lambda x: x * 2, flat, terms=64)
    with pytest.raises(VacuousCheck, match="zeros would pass in"):
        run(lambda x: x * 2, torch.randn(4, 64, generator=generator), acc=1.0)
    with pytest.raises(VacuousCheck, match="zeros would pass in"):
        run(lambda x: x * 2, peaked, terms=4096)
    run(lambda x: x * 2, peaked, terms=0)
    run(lambda x: x * 2, flat, terms=64, constant_ok=True)
    for exactly_constant in (torch.ones(3, 5), torch.zeros(3, 5), torch.randn(1)):
        run(lambda x: x * 2, exactly_constant)


def test_nan_and_infinities_must_be_where_the_reference_has_them():
    special = torch.tensor([NAN, INF, -INF, 1.0, -2.0])
    assert run(lambda x: x * 2, special) == 0
    for i, wrong in ((0, 0.0), (1, -INF), (2, NAN), (3, INF), (4, NAN)):
        with pytest.raises(CheckError, match=rf"1 of 5 elements are wrong, the worst at \[{i}\]"):
            run(lambda x, i=i, wrong=wrong: (x * 2).index_fill_(0, torch.tensor([i]), wrong), special)
    for values in ([INF, 0.0], [INF, INF], [INF, -INF, 0.0], [INF, 1.0, 2.0]):  # right, and no vacuous check
        assert judged(values, values, torch.float32) == 0
    for got, want in (
        ([INF, 500.0, -7.0, 3e4], [1e30, 1.0, 2.0, 3.0]),  # an infinity in the row must not widen the budget
        ([NAN, 0.0, 0.0, 5.0], [NAN, 1e-3, 1e-3, 5.0]),  # nor a NaN excuse the others
        ([INF, 0.0, -INF], [INF, 1.0, -INF]),
    ):
        with pytest.raises(CheckError):
            judged(got, want)


def test_the_ends_of_the_range():
    big = torch.tensor([60000.0, -60000.0, 2.0], dtype=torch.float16)
    assert run(lambda x: x * 2, big) == 0
    with pytest.raises(CheckError):
        run(lambda x: (x * 2).clamp(-65504, 65504), big)
    for got, want in ((65504.0, 65520.001), (INF, 65519.99), (-65504.0, -65521.0)):  # rounding may go either way
        judged([got, 1.0, 2.0], [want, 1.0, 2.0], terms=0)
    with pytest.raises(CheckError):
        judged([-65504.0, 1.0, 2.0], [65520.0, 1.0, 2.0], terms=0)
    for dtype, most in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        cast = torch.tensor(4 * most, dtype=torch.float64).to(dtype).item()
        judged([most, cast, 1.0, 2.0], [4 * most, 4 * most, 1.0, 2.0], dtype, terms=0)  # saturated, or as torch casts
        with pytest.raises(CheckError):
            judged([-most, 2.0, 1.0, 2.0], [4 * most, 2.0, 1.0, 2.0], dtype, terms=0)
    tiny = torch.tensor([6e-8, 1.2e-7, 1.0], dtype=torch.float16)  # held to one subnormal
    run(lambda x: x * 2, tiny, terms=0)
    with pytest.raises(CheckError):
        run(lambda x: torch.where(x < 1e-6, 4 * x, 2 * x), tiny, terms=0)


def test_one_rounding_is_allowed_and_a_second_has_to_be_asked_for():
    """bfloat16 from float32: rounded once, rounded twice, truncated."""
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(2))
    want = x.double() * 3
    truncated = (x * 3).view(torch.int32).bitwise_and(-65536).view(torch.float32).bfloat16()
    twice = (x.bfloat16() * 3).double()
    assert 0.9 < judged((x * 3).bfloat16(), want, torch.bfloat16, terms=0) <= 1
    for wrong in (truncated, twice):
        with pytest.raises(CheckError, match="elements are wrong"):
            judged(wrong, want, torch.bfloat16, terms=0)
    assert judged(twice, want, torch.bfloat16, terms=0, stores=2) <= 1
    with pytest.raises(CheckError, match=r"their gain is 0\.99"):  # within the budget of a library, and yet no rounding
        judged(truncated, want, torch.bfloat16, terms=0, stores=2)


def test_noise_hides_no_wrong_factor():
    """Every row counts alike: one large row's gain is not that of the others."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    x[0] *= 1e4
    want = x.double()
    rough = {"dtype": torch.bfloat16, "operand_eps": 2.0**-5}  # a quarter of the row's size
    assert judged(x * (1 + 1e-4), want, **rough) <= 1
    for factor in (1.02, 0.98):
        wrong = x * factor
        wrong[0] = x[0]
        with pytest.raises(CheckError, match="a factor is wrong"):
            judged(wrong, want, **rough)
        assert judged(wrong, want, **rough, gain=0.03) <= 1


def test_a_result_that_is_wrong_on_purpose_must_not_pass(x):
    shifted = {"shifted by a row": lambda x: 2 * x.double().roll(1, 0)}
    assert run(lambda x: x * 2, x, terms=0, wrong=shifted) <= 1
    for fault in (lambda x: 2 * x.double() * (1 + 1e-9), 2 * x.double()):
        with pytest.raises(VacuousCheck, match="a result nearly right would pass"):
            run(lambda x: x * 2, x, terms=0, wrong={"nearly right": fault})


def test_empty_scalar_and_integer_outputs():
    assert run(lambda x: x * 2, torch.empty(0, 5)) == 0
    run(lambda x: x * 2, torch.tensor(1.5))
    ints = torch.arange(10)
    assert run(lambda x: x * 2, ints) == 0
    assert judged([2**53], [2.0**53], torch.int64) == 0
    with pytest.raises(CheckError, match="1 of 1 elements"):
        judged([2**53 + 1], [2.0**53], torch.int64)
    with pytest.raises(CheckError, match=r"1 of 10 elements are wrong, the first at \[9\]"):
        run(lambda x: (x * 2).index_fill_(0, torch.tensor([9]), 0), ints)


def test_an_error_in_the_last_chunk_of_a_large_tensor_is_found(monkeypatch):
    monkeypatch.setattr("harness.check.CHUNK", 4096)
    n = 3 * 4096 + 1000
    want = torch.ones(n, dtype=torch.float64)
    want[::2] = -3
    got = want.float()
    assert judge(got, want, what="large", dtype=torch.float32) == 0
    got[-1] += 1
    with pytest.raises(CheckError, match=rf"1 of {n} elements are wrong, the worst at \[{n - 1}\]"):
        judge(got, want, what="large", dtype=torch.float32)


def test_budget_grows_with_terms_and_accumulator():
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(1))
    got, want = x.half().float().sum(-1), x.double().sum(-1)
    with pytest.raises(CheckError):
        judged(got, want, torch.float32, terms=4096)
    assert judged(got, want, torch.float32, terms=64, acc=torch.float16) < 1


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
        assert torch.equal(torch.full((3, 2), 7), torch.tensor([[7, 7]] * 3))
        assert not x.new_zeros(5).any()
