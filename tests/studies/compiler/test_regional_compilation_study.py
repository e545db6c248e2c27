"""studies/compiler/regional_compilation: when the whole model is ahead, sharing, a block of another class."""

from harness.bench import Row, Table

import torch

from examples.compiler.regional_compilation import EACH, EAGER, NESTED, WAYS, WHOLE
from studies.compiler import regional_compilation as study
from studies.compiler.regional_compilation_sharing import one_block_of_another_class, why_one_serves_all


def test_when_the_whole_model_is_ahead(h):
    times = {EAGER: 4.0, WHOLE: 2.0, EACH: 3.0, NESTED: 2.0}
    rows = [Row(n, False, 5.0 if n == WHOLE else 1.0, 0.0, ms=t, speedup=4.0 / t) for n, t in times.items()]
    study.steady(h, Table("4 layers, forward", "1x64", EAGER, rows))
    each, region = h.record.conclusions
    assert "+4.0 s saved over the whole model cold, each call takes +50%: the whole model is ahead after 4,000" in each
    assert "ahead" not in region


def test_what_shares_a_graph(h):
    with torch.no_grad():
        why_one_serves_all(h, layers=10)
    told, limit = h.record.facts["10 blocks"], torch._dynamo.config.recompile_limit
    for kind in ("equal blocks", "a tensor of its own"):
        assert told[f"{kind}, each"] == {"graphs": 1}
        assert told[f"{kind}, region"] == {"subgraphs": 1, "calls of them": 10}
    assert told["an int of its own, each"]["graphs"] == limit
    assert ".scale ==" in told["an int of its own, each"]["why again"]
    assert told["a float of its own, each"]["graphs"] == 2
    assert h.record.facts["a block's graph takes in"] == {"tensors": 9, "weights among them": 6}
    assert h.record.facts["its guards"]["on which weight object it is"] == 0


def test_one_block_of_another_class(h):
    with torch.no_grad():
        one_block_of_another_class(h)
    told = h.record.facts["one block of three is of another class"]
    assert {told[name] for name in WAYS} == {"right"}
