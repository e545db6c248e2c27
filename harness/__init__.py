"""The harness: everything a technique file imports besides torch and triton.

    from harness import Harness, Work, require_triton_device, run

Import it before triton. Where there is no GPU the harness switches Triton's interpreter on, and triton
reads that switch once, when it is imported. Names are resolved on first use, so that `--list` does not
pay for importing torch.
"""

from importlib import import_module

_HOME = {
    "Harness": "harness.session",
    "Skip": "harness.hardware",
    "Work": "harness.compare",
    "dequantize_reference": "harness.fp8",
    "fp8_max": "harness.fp8",
    "quantize_reference": "harness.fp8",
    "require_fp8": "harness.fp8",
    "require_scales": "harness.fp8",
    "autotune_configs": "harness.hardware",
    "device_limits": "harness.hardware",
    "gluon_descriptor": "harness.hardware",
    "interpreted": "harness.hardware",
    "require_tma_layout": "harness.hardware",
    "require_triton_device": "harness.hardware",
    "run": "harness.cli",
    "tma_descriptor": "harness.hardware",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'harness' has no attribute {name!r}; it has {', '.join(__all__)}")
    import_module("harness.hardware")  # decides about the interpreter before any caller imports triton
    if name == "run":  # a technique file is being imported, or run: in the second case this may be its end
        import_module("harness.cli").skip_without_packages()
    return getattr(import_module(_HOME[name]), name)
