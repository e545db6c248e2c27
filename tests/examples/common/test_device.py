"""What a wrapper is told of its device: its architecture, its limits, and whether anything is only compiled."""

from harness.codegen import OfflineDriver

import pytest
import torch
import triton

from examples.common import device
from examples.common.device import (
    SHARED_LIMIT,
    architecture,
    autotune_configs,
    compiling_for,
    device_limits,
    interpreted,
)

CPU, META, GPU = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 0)


@pytest.fixture
def offline(monkeypatch):
    """A driver that compiles for an architecture, which the test chooses, and launches nothing."""
    driver = OfflineDriver()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return driver


def test_without_a_gpu_nothing_is_compiled_for(h):
    assert compiling_for() is None
    if h.machine.mode == "interpreted":
        assert (interpreted(), architecture(CPU), architecture(META)) == (True, 90, 90)
        assert device_limits(CPU) == device_limits(META) == (4, SHARED_LIMIT[90])  # persistent kernels loop there too
    assert autotune_configs([1, 2, 3]) == ([1] if interpreted() else [1, 2, 3])


@pytest.mark.parametrize("sm", [80, 90, 120])
def test_what_is_compiled_for_counts_for_meta_tensors_alone(offline, sm):
    offline.sm = sm
    assert (compiling_for(), architecture(META), architecture(CPU)) == (sm, sm, 90)
    assert device_limits(META) == (132, SHARED_LIMIT[sm])
    assert device_limits(CPU) == (4, SHARED_LIMIT[90])
    device.require_triton_device("f", torch.empty(3, device="meta", dtype=torch.bfloat16))
    offline.compile_only = False  # a driver of a GPU
    assert (compiling_for(), architecture(META)) == (None, 90)


def test_a_gpu_says_its_own_and_has_few_sms_under_a_sanitizer(monkeypatch):
    monkeypatch.setattr(device, "_properties", lambda index: (100, 148, 227 * 1024))
    assert architecture(GPU) == 100
    assert device_limits(GPU) == (148, 227 * 1024)
    monkeypatch.setattr(device, "FEW_SMS", 5)
    assert device_limits(GPU) == (5, 227 * 1024)
