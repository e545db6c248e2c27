"""autotune: every configuration on poisoned outputs, what pruning keeps, and the search itself, by a made-up clock.

A search needs a GPU to time on, but not to be right: in a process whose Triton compiles and never launches it runs as
it is, over times that the test makes up.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from harness.codegen import compile_for
from harness.hardware import SHARED_LIMIT, device_limits

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from examples.triton.autotune import (
    CANDIDATES,
    DTYPES,
    FIXED,
    LARGE,
    PER_TILE,
    SMALL,
    SPILLS,
    _config,
    _launch,
    ask_second_process,
    candidates,
    label,
    loaded_per_sm,
    matmul_config,
    matmul_tuned,
    matmul_tuned_kernel,
    new_cache,
    numbers,
    reference,
    shared_bytes,
    time_config,
    tune,
    tuner,
)

ROOT = Path(__file__).resolve().parents[3]
TILE = numbers(_config(64, 32, 64, 4, 3))
SHAPES = [(1, 1, 1), (37, 53, 61), (65, 33, 64), (64, 32, 65), (1, 300, 40), (300, 1, 40), (5, 7, 0), (0, 5, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(h, shape):
    M, N, K = shape
    a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
    h.check(lambda a, b: matmul_config(a, b, *TILE), reference, a, b, terms=K, what=f"{M}x{N}x{K}")


@given(M=st.integers(0, 150), N=st.integers(0, 150), K=st.integers(0, 150))
def test_any_shape(M, N, K):
    from harness.catalog import Needs
    from harness.session import Harness

    h = Harness("test", Needs.parse("triton"))
    a, b = h.randn(M, K, dtype=torch.float16), h.randn(K, N, dtype=torch.float16)
    h.check(lambda a, b: matmul_config(a, b, *TILE), reference, a, b, terms=K, what=f"{M}x{N}x{K}")


def test_the_tuned_wrapper(h):
    """In the interpreter a space of one; on a GPU the whole search, on poisoned outputs."""
    h.check(matmul_tuned, reference, h.randn(130, 70, dtype=h.half), h.randn(70, 200, dtype=h.half), terms=70)


# Warps and stages mean nothing to the interpreter: there each tile is checked once.
TILES = sorted({numbers(config)[:3] for config in LARGE})


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "x".join(map(str, tile)))
def test_every_tile(h, tile):
    if shared_bytes(_config(*tile, 8, 3), 2, h.machine.sm or 90) > device_limits(h.device).shared_bytes:
        pytest.skip("does not fit shared memory")
    a, b = h.randn(70, 140, dtype=h.half), h.randn(140, 130, dtype=h.half)
    h.check(lambda a, b: matmul_config(a, b, *tile, 8, 3), reference, a, b, terms=140, what=f"tile {tile}")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 2048, 1024), (300, 520, 777), (2048, 2048, 512)])
def test_every_configuration_that_a_search_times(h, shape):
    M, N, K = shape
    a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
    sm, shared = h.machine.sm, h.machine.shared_bytes
    kept = candidates(LARGE, M, N, 2, sm, h.machine.sms, shared) + candidates(SMALL, M, N, 2, sm, h.machine.sms, shared)
    for config in kept:
        h.check(lambda a, b, c=config: matmul_config(a, b, *numbers(c)), reference, a, b, terms=K, what=label(config))


def test_strides(h):
    a, b = h.randn(96, 160, dtype=h.half), h.randn(160, 320, dtype=h.half)
    for left, right in (
        (a[:, :150], b[:150, :100]),  # padded rows
        (a[::2, 1:], b[1:, 3:50]),  # every second row, starts that are not aligned
        (a[:1].expand(70, 160), b),  # a row stride of 0
        (a[:, :1], b[:1]),  # one column
    ):
        check = lambda a, b: matmul_config(a, b, *TILE)  # noqa: E731
        h.check(check, reference, left, right, terms=left.shape[1], what=f"{left.stride()} {right.stride()}")


def test_extremes(h):
    """Large and tiny values keep their scale; NaN and infinity reach what torch says they reach, and nothing else."""
    a, b = h.randn(40, 70, dtype=h.half), h.randn(70, 50, dtype=h.half)
    run = lambda a, b: matmul_config(a, b, *TILE)  # noqa: E731
    h.check(run, reference, a * 64, b * 4, terms=70, what="large")
    h.check(run, reference, a * 2.0**-6, b * 2.0**-4, terms=70, what="tiny")
    h.check(run, reference, a * 2000, b * 2000, terms=70, what="beyond float16: infinite as the reference rounded")
    a[3, 5], a[7, 11], b[2, 9] = float("nan"), float("inf"), float("-inf")
    h.check(run, reference, a, b, terms=70, what="NaN and infinities")


@pytest.mark.parametrize("sm", sorted(SHARED_LIMIT))
@pytest.mark.parametrize("shape", [(1, 1), (16, 8192), (512, 512), (4096, 8192), (100_000, 3)])
def test_pruning_keeps_a_few_that_fit(sm, shape):
    for configs in (LARGE, SMALL, [FIXED]):
        kept = candidates(configs, *shape, 2, sm, 132, SHARED_LIMIT[sm])
        assert bool(kept) == any(shared_bytes(c, 2, sm) <= SHARED_LIMIT[sm] for c in configs)
        assert len(kept) == len(set(kept)) <= CANDIDATES
        assert all(shared_bytes(config, 2, sm) <= SHARED_LIMIT[sm] for config in kept)
        tiles = [numbers(config)[:2] for config in kept]
        assert all(tiles.count(tile) <= PER_TILE for tile in tiles)
        loads = [loaded_per_sm(config, *shape, 132) for config in kept]
        assert loads == sorted(loads)


def test_pruning_follows_the_shape():
    kept = {M: candidates(LARGE, M, 8192, 2, 90, 132, SHARED_LIMIT[90]) for M in (16, 4096)}
    assert numbers(kept[16][0])[:2] == (16, 64)  # 128 programs for 132 SMs
    assert FIXED in kept[4096]
    assert not set(kept[16]) & set(kept[4096])


def test_spaces_are_what_they_say():
    assert len(LARGE) == len(set(LARGE)) == 4 * 4 * 2 * 2 * 3
    assert set(SMALL) <= set(LARGE)
    assert matmul_tuned_kernel.configs[0] in LARGE


PREDICTED = [FIXED, SMALL[3], _config(64, 32, 128, 4, 5)]


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
@pytest.mark.parametrize("config", PREDICTED, ids=label)
def test_shared_memory_is_what_the_compiler_takes(sm, config):
    meta = [torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")] * 2
    (kernel,) = compile_for(matmul_config, (*meta, *numbers(config)), sms=(sm,))
    assert kernel.error is None
    assert 0 <= shared_bytes(config, 2, sm) - kernel.shared <= 1024
    assert kernel.found["cp.async"]
    rows = config.kwargs["BLOCK_M"]
    assert kernel.found["mma.sync" if rows < 64 or sm in (80, 120) else "wgmma" if sm == 90 else "tcgen05.mma"]


def test_a_spilling_configuration_spills_where_sums_are_in_registers():
    meta = [torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")] * 2
    on_90, on_100 = compile_for(matmul_config, (*meta, 128, 256, 64, 4, 3), sms=(90, 100))
    assert on_90.spills > 500
    assert on_100.spills == 0
    (with_8_warps,) = compile_for(matmul_config, (*meta, *numbers(FIXED)), sms=(90,))
    assert with_8_warps.spills == 0


# The search as it is, in a process that compiles for sm_90 and launches nothing. Its clock likes little shared memory,
# and what a driver would say of spills is read from the cubin.
OFFLINE = """
import json, re, subprocess, sys, tempfile
from types import SimpleNamespace

from harness import hardware
from harness.codegen import _OfflineDriver

import torch
import triton
from triton.compiler.compiler import CompiledKernel
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

hardware.OFFLINE_SM = 90
triton.runtime.driver.set_active(_OfflineDriver())
torch.cuda.synchronize = lambda: None

from examples.triton import autotune

class OnGpu(torch.Tensor):
    is_cuda = True

launched = []
jit_run = JITFunction.run

def compile_only(self, *args, grid, warmup, **kwargs):
    kernel = jit_run(self, *args, grid=grid, warmup=True, **kwargs)
    if not warmup:
        launched.append(kernel)
    return kernel

def load(self, grid):
    if self.metadata.shared > hardware.SHARED_LIMIT[90]:
        raise OutOfResources(self.metadata.shared, hardware.SHARED_LIMIT[90], "shared memory")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(self.asm["cubin"])
        file.flush()
        usage = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(usage, capture_output=True, text=True, check=True).stdout
    self.n_spills = int(re.search(r"STACK:(\\d+)", said)[1]) // 4

def clock(fn, rep, quantiles):
    fn()
    return [float(launched[-1].metadata.shared)] * 3

JITFunction.run, CompiledKernel.__getitem__ = compile_only, load
triton.testing.do_bench_cudagraph = clock

def inputs(M, N, K):
    return [torch.empty(shape, dtype=torch.bfloat16, device="meta").as_subclass(OnGpu) for shape in ((M, K), (K, N))]
"""


def offline(code: str, cache: Path) -> dict:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE + code], capture_output=True, text=True, timeout=120,
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_search_drops_what_spills_and_a_second_process_repeats_nothing(tmp_path):
    """All compile, those with more sums than registers go, the others are timed once, and only what is kept counts."""
    space = [FIXED, _config(128, 256, 64, 4, 3), _config(64, 64, 128, 4, 4), _config(256, 64, 64, 4, 4)]
    search = f"""
space = [autotune._config(*numbers) for numbers in {[numbers(config) for config in space]}]
a, b = inputs(4096, 8192, 8192)
kernel, cost = autotune.tune(space, a, b)
timed = [autotune.numbers(config) for config in kernel.configs_timings]
_, alone = autotune.tune(space, a, b, cache_results=False)
print(json.dumps({{"first": cost, "timed": timed, "alone": alone}}))
"""
    first = offline(search, tmp_path)
    assert (first["first"]["compiled"], first["first"]["timed"]) == (4, 3)
    assert {tuple(config) for config in first["timed"]} == {numbers(config) for config in space if config != space[1]}
    assert first["first"]["chosen"] == label(space[2])  # by the clock above: the least shared memory
    # The same process, with its compiled kernels forgotten: they come from disk, and only results kept save timing.
    assert (first["alone"]["compiled"], first["alone"]["timed"]) == (0, 3)

    second = offline(search, tmp_path)
    assert (second["first"]["compiled"], second["first"]["timed"]) == (0, 0)
    assert second["first"]["chosen"] == first["first"]["chosen"]


def test_what_a_new_key_is(tmp_path):
    """A size that is in the key tunes once per value, a bucket once per power of two, one that is not in it never."""
    steps = """
def calls(kernel):
    steps = []
    for M in (16, 16, 13, 17, 64):
        autotune.time_config.calls = 0
        autotune._launch(kernel, *inputs(M, 128, 256))
        steps.append((autotune.time_config.calls, len(kernel.cache)))
    return steps

kernel = autotune.matmul_tuned_kernel.fn
two = autotune.SMALL[2:]
print(json.dumps({
    "bucket": calls(autotune.tuner(two, cache_results=False)(kernel)),
    "exact": calls(autotune.tuner(two, key=("M", "N", "K"), cache_results=False)(kernel)),
    "without": calls(autotune.tuner(two, key=("N", "K"), cache_results=False)(kernel)),
    "one": calls(autotune.tuner(two[:1])(kernel)),
}))
"""
    assert offline(steps, tmp_path) == {
        "bucket": [[2, 1], [0, 1], [0, 1], [2, 2], [2, 3]],
        "exact": [[2, 1], [0, 1], [2, 2], [2, 3], [2, 4]],
        "without": [[2, 1], [0, 1], [0, 1], [0, 1], [0, 1]],
        "one": [[0, 0]] * 5,
    }


def test_when_everything_spills_the_least_is_kept(tmp_path):
    least = """
autotune.SPILLS = -1
space = [autotune._config(16, 256, 64, 4, 3), autotune._config(64, 64, 64, 4, 3)]  # 2 values on the stack, and none
kernel, cost = autotune.tune(space, *inputs(128, 256, 256), parallel=False)
print(json.dumps([autotune.numbers(config) for config in kernel.configs_timings]))
"""
    assert offline(least, tmp_path) == [[64, 64, 64, 4, 3]]


@pytest.mark.gpu
def test_a_second_process_does_not_tune_again(h):
    M, N, K = 16, 1024, 512
    a, b = h.randn(M, K, dtype=torch.bfloat16), h.randn(K, N, dtype=torch.bfloat16)
    with new_cache() as cache:
        _, first = tune(LARGE, a, b)
        later = ask_second_process(cache, M, N, K)
    assert 0 < first["timed"] <= first["compiled"] <= CANDIDATES
    assert (later["results kept"]["compiled"], later["results kept"]["timed"]) == (0, 0)
    assert later["results kept"]["chosen"] == first["chosen"]
    assert (later["kernels alone"]["compiled"], later["kernels alone"]["timed"]) == (0, first["timed"])


@pytest.mark.gpu
def test_a_search_keeps_nothing_that_spills(h):
    M = N = K = 4096
    a, b = h.randn(M, K, dtype=torch.bfloat16), h.randn(K, N, dtype=torch.bfloat16)
    kernel, _ = tune(LARGE, a, b, cache_results=False)
    for config in candidates(LARGE, M, N, 2, h.machine.sm, h.machine.sms, h.machine.shared_bytes):
        compiled = matmul_tuned_kernel.fn.warmup(
            a, b, a, M, N, K, M, K, N, N, EVEN_K=True, grid=(1,), **config.all_kwargs()
        )
        compiled[(1,)]
        assert (compiled.n_spills <= SPILLS) == (config in kernel.configs_timings), label(config)
    assert all(time != float("inf") for times in kernel.configs_timings.values() for time in times)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_tuning_by_shape_beats_one_configuration(h, dtype):
    """Sixteen rows: 128x256 tiles leave three quarters of an H200 idle. A ratio within one run, with a margin."""
    a, b = h.randn(16, 8192, dtype=dtype), h.randn(8192, 8192, dtype=dtype)
    tuned = tuner(SMALL, cache_results=False)(matmul_tuned_kernel.fn)
    _launch(tuned, a, b)
    ms = {numbers(config): times[0] for config, times in tuned.configs_timings.items()}
    assert min(ms.values()) < 0.8 * ms[numbers(FIXED)]
    assert tuned.best_config != FIXED


def test_the_clock_counts():
    """What the facts call "timed" is counted where it happens."""
    calls, time_config.calls = time_config.calls, 0
    saved, triton.testing.do_bench_cudagraph = triton.testing.do_bench_cudagraph, lambda fn, rep, quantiles: [1.0] * 3
    try:
        assert time_config(lambda: None, quantiles=(0.5, 0.2, 0.8)) == [1.0] * 3
        assert time_config.calls == 1
    finally:
        time_config.calls, triton.testing.do_bench_cudagraph = calls, saved


def _bad(device):
    a = torch.randn(4, 8, dtype=torch.float16, device=device)
    b = torch.randn(8, 5, dtype=torch.float16, device=device)
    tile = numbers(FIXED)
    return {
        "no tensor": (([1.0], b, *tile), TypeError, r"expected a torch\.Tensor, got list"),
        "integers": ((a.int(), b.int(), *tile), TypeError, r"torch\.int32"),
        "float32": ((a.float(), b.float(), *tile), TypeError, r"torch\.float32"),
        "two dtypes": ((a, b.float(), *tile), TypeError, r"torch\.float16 and torch\.float32"),
        "a vector": ((a, b[:, 0], *tile), ValueError, r"shapes \(4, 8\) and \(8,\); need \[M, K\] and \[K, N\]"),
        "a batch": ((a.reshape(1, 4, 8), b.reshape(1, 8, 5), *tile), ValueError, "need"),
        "inner sizes": ((a, b.t().contiguous(), *tile), ValueError, r"shapes \(4, 8\) and \(5, 8\)"),
        "columns apart": (
            (a[:, ::2], b[:4], *tile),
            ValueError,
            r"strides \(8, 2\) and \(5, 1\).*contiguous\(\) first",
        ),
        "requires grad": ((a.clone().requires_grad_(), b, *tile), RuntimeError, "no backward"),
        "two devices": ((a, b.to("meta"), *tile), ValueError, "move them to one device"),
        "a device without kernels": ((a.to("meta"), b.to("meta"), *tile), RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    (a, b, *tile), error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"matmul_config: .*{message}"):
        matmul_config(a, b, *tile)
    with pytest.raises(error, match=f"matmul_tuned: .*{message}"):
        matmul_tuned(a, b)


@pytest.mark.parametrize("wrong", ["64", 64.0, True, None])
def test_a_configuration_of_other_than_ints(h, wrong):
    a, b = h.randn(4, 8, dtype=h.half), h.randn(8, 5, dtype=h.half)
    with pytest.raises(TypeError, match=r"matmul_config: a configuration is five ints, got \("):
        matmul_config(a, b, wrong, 64, 64, 4, 3)


def test_a_configuration_that_does_not_fit(h):
    a, b = h.randn(4, 8, dtype=h.half), h.randn(8, 5, dtype=h.half)
    with pytest.raises(ValueError, match=r"matmul_config: 256x256x128, 8 warps, 5 stages need \d+ bytes.*fewer stages"):
        matmul_config(a, b, 256, 256, 128, 8, 5)


@pytest.mark.parametrize("tile", [(32, 64, 64, 4, 3), (64, 64, 64, 4, 1), (64, 64, 64, 3, 3)])
def test_an_unknown_configuration(h, tile):
    a, b = h.randn(4, 8, dtype=h.half), h.randn(8, 5, dtype=h.half)
    with pytest.raises(ValueError, match=r"matmul_config: no configuration \(BLOCK_M.*choose from BLOCK_M 16, 64"):
        matmul_config(a, b, *tile)
