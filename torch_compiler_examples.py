"""torch.compile: what the compiler does for a model, when it helps, when it does not, and how to find out why.

First what it is worth: the modes of one model (modes), the same model from launch-bound to compute-bound with the
roofline that predicts the outcome (when_it_helps), and models of 1 and 40 billion parameters (large_models). Then what
keeps it from working: code it cannot trace (graph_breaks), sizes that change (dynamic_shapes), everything else that
changes (recompilation), and how a server refuses to compile at the wrong moment (stances). What it costs to launch
kernels and to compile them: cuda_graphs, regional_compilation, caching. What it cannot see into (custom_ops), what it
does to training (training_step) and to the result (numerics). Last, its own voice (logging_and_hints) and the other
compilers behind the same call (backends).

    python torch_compiler_examples.py                     all of them, sized for this machine
    python torch_compiler_examples.py modes stances       only these
    python torch_compiler_examples.py --list              what there is
"""

from harness.cli import main

TECHNIQUES = [
    "examples/compiler/modes.py",
    "examples/compiler/when_it_helps.py",
    "examples/compiler/large_models.py",
    "examples/compiler/graph_breaks.py",
    "examples/compiler/dynamic_shapes.py",
    "examples/compiler/recompilation.py",
    "examples/compiler/stances.py",
    "examples/compiler/cuda_graphs.py",
    "examples/compiler/regional_compilation.py",
    "examples/compiler/caching.py",
    "examples/compiler/custom_ops.py",
    "examples/compiler/training_step.py",
    "examples/compiler/numerics.py",
    "examples/compiler/logging_and_hints.py",
    "examples/compiler/backends.py",
    "examples/compiler/custom_backend.py",
]
TOUR = ("graph_breaks",)

if __name__ == "__main__":
    main(__file__)
