"""PyTorch/XLA: record, compile, run: what a lazy backend does with ordinary torch code, and what it asks in return.

First how it works: operations are recorded until something needs a value (lazy_tensors), or torch.compile hands over
whole graphs (openxla_backend). Then what it asks for: sizes that do not change (static_shapes) and no glance at a value
on the way (graph_boundaries). Training with it (training_loop), compile time that does not grow with depth
(scan_layers), and one program over several devices (spmd). Last, the same model through every compiler there is here
(compare).

    make xla                                              its own environment, .venv-xla, and all of the topic
    .venv-xla/bin/python torch_xla_examples.py spmd       only this
    python torch_xla_examples.py --list                   what there is
"""

from harness.cli import main

TECHNIQUES = [
    "examples/xla/lazy_tensors.py",
    "examples/xla/openxla_backend.py",
    "examples/xla/static_shapes.py",
    "examples/xla/graph_boundaries.py",
    "examples/xla/training_loop.py",
    "examples/xla/scan_layers.py",
    "examples/xla/spmd.py",
    "examples/xla/compare.py",
]
TOUR = ("lazy_tensors",)

if __name__ == "__main__":
    main(__file__)
