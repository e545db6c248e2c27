"""Study of blockwise_matmul: another tensor-core instruction than FP8's is found, and errors are over the rms."""

from types import SimpleNamespace

from harness.codegen import CodegenError

import pytest
import torch

from studies.fp8.blockwise_matmul import error_of, show_code


def test_anything_but_fp8_that_multiplies_is_found(h, monkeypatch):
    kernel = SimpleNamespace(sm=90, found={"wgmma": 8, "mma f8": 4})
    monkeypatch.setattr(h, "codegen", lambda *args, **kwargs: [kernel])
    with pytest.raises(CodegenError, match=r"tiles on sm_90: \{'wgmma': 8\}, FP8 only in 4"):
        show_code(h)
    kernel.found["wgmma"] = 4
    show_code(h)


def test_error_of():
    want = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)  # rms 2.5
    assert error_of(want.float(), want) == [0.0, 0.0]
    got = want + torch.tensor([[0.0, 0.0], [0.0, -1.0]])
    assert error_of(got.float(), want) == [0.2, 0.4]
