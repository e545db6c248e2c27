"""studies/compiler/regional_compilation: what shares a graph, and a block of another class."""

import torch

from examples.compiler.regional_compilation import WAYS
from studies.compiler.regional_compilation import one_block_of_another_class, what_shares


@torch.no_grad()
def test_what_shares_a_graph(h):
    what_shares(h, layers=10)
    told, limit = h.record.facts["10 blocks"], torch._dynamo.config.recompile_limit
    for kind in ("equal blocks", "a tensor of its own"):
        assert told[f"{kind}, each"] == {"graphs": 1}
        assert told[f"{kind}, region"] == {"subgraphs": 1, "calls of them": 10}
    assert told["an int of its own, each"]["graphs"] == limit
    assert told["an int of its own, each"]["why again"].startswith("block.scale == ")
    assert h.record.facts["guards on which weight object a block has"] == 0


@torch.no_grad()
def test_one_block_of_another_class(h):
    one_block_of_another_class(h)
    told = h.record.facts["one block of three is of another class"]
    assert {told[name] for name in WAYS} == {"right"}
