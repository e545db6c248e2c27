"""The study of autotune: the search itself, by a made-up clock, and what a later process repeats of it.

A search needs a GPU to time on, but not to be right: in a process whose Triton compiles and never launches it runs as
it is, over times that the test makes up.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.triton.autotune import DTYPES, FIXED, launch, matmul_tuned_kernel, tuner
from examples.triton.autotune_pruned import CANDIDATES, LARGE, SPILLS, candidates, configuration, label, numbers
from studies.triton.autotune import SMALL, ask_second_process, new_cache, tune

ROOT = Path(__file__).resolve().parents[3]

# The search as it is, in a process that compiles for sm_90 and launches nothing. Its clock likes little shared memory,
# and what a driver would say of spills is read from the cubin.
OFFLINE = """
import json, re, subprocess, sys, tempfile

from harness.codegen import OfflineDriver
from examples.common.device import SHARED_LIMIT

import torch
import triton
from triton.compiler.compiler import CompiledKernel
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

triton.runtime.driver.set_active(OfflineDriver())
torch.cuda.synchronize = lambda: None

from examples.triton import autotune
from examples.triton import autotune_pruned as pruned
from studies.triton import autotune as study

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
    if self.metadata.shared > SHARED_LIMIT[90]:
        raise OutOfResources(self.metadata.shared, SHARED_LIMIT[90], "shared memory")
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
    space = [
        FIXED,
        configuration(128, 256, 64, 4, 3),
        configuration(64, 64, 128, 4, 4),
        configuration(256, 64, 64, 4, 4),
    ]
    search = f"""
space = [pruned.configuration(*numbers) for numbers in {[numbers(config) for config in space]}]
a, b = inputs(4096, 8192, 8192)
kernel, cost = study.tune(space, a, b)
timed = [pruned.numbers(config) for config in kernel.configs_timings]
_, alone = study.tune(space, a, b, cache_results=False)
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
def calls(configs, **options):
    steps, timed = [], []
    kernel = autotune.tuner(configs, do_bench=study.counting(timed), **options)
    for M in (16, 16, 13, 17, 64):
        timed.clear()
        autotune.launch(kernel, *inputs(M, 128, 256))
        steps.append((len(timed), len(kernel.cache)))
    return steps

two = study.SMALL[2:]
print(json.dumps({
    "bucket": calls(two, cache_results=False),
    "exact": calls(two, key=("M", "N", "K"), cache_results=False),
    "without": calls(two, key=("N", "K"), cache_results=False),
    "one": calls(two[:1]),
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
pruned.SPILLS = -1
space = [pruned.configuration(*tile, 4, 3) for tile in ((16, 256, 64), (64, 64, 64))]  # 2 values on the stack, none
kernel, cost = study.tune(space, *inputs(128, 256, 256), parallel=False)
print(json.dumps([pruned.numbers(config) for config in kernel.configs_timings]))
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
        compiled = matmul_tuned_kernel.warmup(
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
    tuned = tuner(SMALL, cache_results=False)
    launch(tuned, a, b)
    ms = {numbers(config): times[0] for config, times in tuned.configs_timings.items()}
    assert min(ms.values()) < 0.8 * ms[numbers(FIXED)]
    assert tuned.best_config != FIXED
