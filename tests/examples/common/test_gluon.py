"""Gluon's common pieces: where wgmma can run. What the pipelines' pieces do is tested with the kernels they are in."""

from harness.codegen import compile_for

import pytest
import torch

from examples.common import gluon
from examples.common.gluon import gluon_architecture, require_wgmma


def test_there_is_no_gluon_in_the_interpreter():
    assert {gluon_architecture(torch.device(name)) for name in ("cpu", "meta")} == {None}
    with pytest.raises(RuntimeError, match=r"probe: needs sm_90, .*Gluon kernels are not interpreted\): use that"):
        require_wgmma("probe", torch.device("cpu"), "that")


def asks(x):
    raise RuntimeError(f"it is compiled for {gluon_architecture(x.device)}")


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
def test_it_needs_sm_90(monkeypatch, sm):
    (kernel,) = compile_for(asks, (torch.empty(1, device="meta"),), sms=(sm,))
    assert kernel.error == f"RuntimeError: it is compiled for {sm}"
    monkeypatch.setattr(gluon, "gluon_architecture", lambda device: sm)
    if sm == 90:
        return require_wgmma("probe", torch.device("cuda"), "that")
    with pytest.raises(RuntimeError, match=rf"probe: needs sm_90, for its wgmma \(this is sm_{sm}\): use that"):
        require_wgmma("probe", torch.device("cuda"), "that")
