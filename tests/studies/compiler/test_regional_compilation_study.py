"""studies/compiler/regional_compilation: width against depth, sharing, a block of another class, training."""

from dataclasses import replace

from harness.bench import Row, Table

import torch

from compile_inspect import guards
from examples.common.transformer import Transformer
from examples.compiler.regional_compilation import EACH, EAGER, NESTED, WAYS, WHOLE, call_block
from studies.compiler import regional_compilation as study
from studies.compiler.regional_compilation_sharing import (
    MINI,
    one_block_of_another_class,
    why_one_serves_all,
)


def test_as_many_blocks_of_another_width_have_more_parameters(h, monkeypatch):
    monkeypatch.setattr(study, "TINY", MINI)
    monkeypatch.setattr(study, "SMALL", replace(MINI, width=128))
    monkeypatch.setattr(study, "whole", lambda model: torch.compile(model, backend="eager", fullgraph=True))
    study.by_width(h, MINI, 1, h.randint(MINI.vocab, 1, 8))
    rows = h.record.facts["compiling the whole model"]
    assert list(rows) == ["1 layers of width 64", "1 layers of width 128", "2 layers of width 64"]
    narrow, wide, deep = (row["parameters"] for row in rows.values())
    assert wide > 2 * narrow
    assert narrow < deep < wide


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
    region = told["an int of its own, region"]  # torch 2.13 gives up, 2.11 does not
    assert region == {"subgraphs": 10, "calls of them": 10} or "maximum reuse entries" in region["raises"]
    assert h.record.facts["a block's graph takes in"] == {"tensors": 9, "weights among them": 6}
    assert h.record.facts["its guards"]["on which weight object it is"] == 0
    # Which is not 0 because no guard is written so.
    model = Transformer.random(replace(MINI, layers=3), h.device, torch.float32)
    x = torch.ones(1, 4, 64, device=h.device)
    torch.compile(call_block, backend="eager")(model.blocks[0], x, model.cos[:4], model.sin[:4])
    assert any("ID_MATCH" in line for line in guards(call_block)[0])


def test_training(h):
    study.training(h)
    assert h.record.facts["graphs that each block compiled needs in training"] == {
        "all weights": 1, "embedding frozen": 2,
    }  # fmt: skip


def test_one_block_of_another_class(h):
    with torch.no_grad():
        one_block_of_another_class(h)
    told = h.record.facts["one block of three is of another class"]
    assert {told[name] for name in WAYS} == {"right"}
    assert told["region marked on a function"] == "right" or not torch.__version__.startswith("2.11.")
