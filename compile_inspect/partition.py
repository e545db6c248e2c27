"""AOTAutograd's partitioners: what forward keeps for backward, and what backward computes again."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Split:
    """What a partitioner makes of a joint graph. Operations are counted without the getitems that unpack tuples.

    `saved` are the tensors that forward keeps for backward alone: neither parameters nor inputs, each memory once.
    """

    joint: int
    forward: int
    backward: int
    backward_matmuls: int  # matrix products and attention
    saved: int
    saved_bytes: int


def splits(fn: Callable, *inputs, cases: dict[str, tuple[str, float]]) -> dict[str, Split]:
    """AOTAutograd's joint graph of fn, cut in two in each of `cases`: name -> (partitioner, activation memory budget).

    The partitioner is "default" or "min-cut". fn is traced once, as one graph, with Inductor's decompositions. Raises
    ValueError for another partitioner, and for an fn without a gradient.
    """
    from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._inductor.decomposition import select_decomp_table

    partitioners = {"default": default_partition, "min-cut": min_cut_rematerialization_partition}
    for name, (partitioner, _) in cases.items():
        if partitioner not in partitioners:
            raise ValueError(f"splits: {name}: partitioner {partitioner!r} is not one of {list(partitioners)}")
    found = {}

    def cut(joint, joint_inputs, **options):
        for name, (partitioner, budget) in cases.items():
            # copy.deepcopy of a graph walks a tree of torch's with an old name, which warns.
            with config.patch(activation_memory_budget=budget), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                found[name] = _split(joint, *partitioners[partitioner](copy.deepcopy(joint), joint_inputs, **options))
        return min_cut_rematerialization_partition(joint, joint_inputs, **options)

    def as_it_is(graph, _):
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=cut, decompositions=select_decomp_table()
    )
    torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    if cases and not found:
        raise ValueError(f"splits: {fn!r} has no gradient: no input or parameter requires grad, or grad mode is off")
    return found


def _split(joint, forward, backward) -> Split:
    def operations(graph) -> list[str]:
        return [
            str(node.target) for node in graph.graph.nodes
            if node.op == "call_function" and "getitem" not in str(node.target)
        ]  # fmt: skip

    def memory(graph) -> dict[int, int]:  # each storage that comes in, and its bytes
        values = [
            node.meta["val"] for node in graph.graph.nodes
            if node.op == "placeholder" and not node.name.startswith("tangents")
        ]  # fmt: skip
        storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
        return {storage._cdata: storage.nbytes() for storage in storages}

    given, wanted = memory(forward), memory(backward)
    saved = [size for storage, size in wanted.items() if storage not in given]
    ran = operations(backward)
    matmuls = sum(re.search(r"\b(mm|addmm|bmm|baddbmm)\b|attention", name) is not None for name in ran)
    return Split(len(operations(joint)), len(operations(forward)), len(ran), matmuls, len(saved), sum(saved))
