"""SPMD: the collectives that each cut costs, exactly; what the devices hold; every refusal; and no SPMD left behind."""

import pytest
import torch
from torch_xla import runtime

from examples.common import xla
from examples.xla import spmd
from examples.xla.spmd import PRODUCTS, make_mesh, shard
from examples.xla.spmd_collectives import collectives
from examples.xla.spmd_sharding import require_cut
from studies.xla import spmd as study
from studies.xla.spmd import LAYERS, LAYOUTS
from tests.quiet import ran


@pytest.fixture(scope="module")
def facts():
    h = ran(spmd.demo, needs="torch_xla>=2.9")
    studied = ran(study.study, needs="torch_xla>=2.9", lesson=[])
    assert not runtime.is_spmd()  # it is for a whole process, and was for the children's only
    assert (len(h.record.checks), len(studied.record.checks)) == (len(PRODUCTS), len(LAYOUTS))
    return h.record.facts | studied.record.facts


def test_products(facts):
    m, k, n = 72, 88, 104
    told = facts["communication of a product, bytes"]

    def row(made: str, theory: str, size: int, sent: int, wanted: int) -> dict:
        return {"collectives": made, "by theory": theory, "bytes": 4 * size, "sent / by theory": [sent, wanted]}

    # XLA for a CPU sums the whole and cuts: twice what the reduce-scatter of theory sends.
    cut = row("1 all-reduce", "1 reduce-scatter", m * n, 6 * m * n, 3 * m * n)
    assert told == {
        **dict.fromkeys(list(PRODUCTS)[:3], row("none", "the same", 0, 0, 0)),
        "rows of a, columns of b, one axis": row("1 all-gather", "the same", m * k, 3 * m * k, 3 * m * k),
        "the summed dimension": row("1 all-reduce", "the same", m * n, 6 * m * n, 6 * m * n),
        "the summed dimension, rows of the result": cut,
    }
    held = facts["what each of 4 devices holds of 72x88 @ 88x104, by what is sharded"]
    assert held["rows of a"] == {"a": "18x88", "b": "88x104", "c": "18x104"}
    assert held["the summed dimension"] == {"a": "72x22", "b": "22x104", "c": "72x104"}
    assert held["the summed dimension, rows of the result"]["c"] == "18x104"
    assert held["rows of a, columns of b, two axes"]["c"] == "36x52"


def test_training(facts):
    rows, width, hidden = 72, 56, 104
    weights = 4 * 2 * LAYERS * width * hidden
    told = facts[f"communication of a training step, bytes; the weights are {weights}"]
    for name in ("data parallel", "tensor parallel", "data and tensor parallel"):
        assert told[name]["by theory"] == "the same"
        assert told[name]["sent / by theory"][0] == told[name]["sent / by theory"][1]
    assert told["data parallel"]["collectives"] == f"{2 * LAYERS + 1} all-reduce"
    assert told["tensor parallel"]["collectives"] == f"{2 * LAYERS - 1} all-reduce"
    each, both = 4 * width * hidden, (2 * LAYERS - 1) * 4 * rows // 2 * width + weights // 2 + 4
    fsdp = told["sharded weights"]
    assert set(fsdp["collectives"].split(", ")) == {f"{4 * LAYERS - 1} all-gather", f"{2 * LAYERS + 1} all-reduce"}
    assert fsdp["sent / by theory"][1] == pytest.approx(0.75 * ((4 * LAYERS - 1) * each + weights) + 6, abs=1)
    assert {name: row["bytes"] for name, row in told.items()} == {
        "data parallel": weights + 4, "tensor parallel": (2 * LAYERS - 1) * 4 * rows * width,
        "data and tensor parallel": both, "sharded weights": (4 * LAYERS - 1) * each + weights + 4,
    }  # fmt: skip
    held = facts["weights and momentum that a device holds"]
    assert all(row["compiles by step"] == "[1, 1, 0]" for row in held.values())
    assert [row["bytes"] for row in held.values()] == [2 * weights, weights // 2, weights, weights // 2]


def test_collectives():
    """Of other groups, dtypes and tuples than those that the products and the steps compile to."""
    for line, found in (
        ("ROOT %g = bf16[10]{0} all-gather(%p), replica_groups={{0,2},{1,3}}, dimensions={0}", ("all-gather", 2, 20)),
        ("%r = (f32[8]{0}, s8[3,2]{1,0}) all-reduce(%a, %b), replica_groups=[2,4]<=[8]", ("all-reduce", 4, 38)),
        ("%c = pred[] collective-permute(%p), source_target_pairs={{0,1},{2,0}}", ("collective-permute", 2, 1)),
        ("%s = f64[2,5]{1,0} reduce-scatter(%p), replica_groups={{0,1}}, to_apply=%add", ("reduce-scatter", 2, 80)),
    ):
        text = f"ENTRY %main {{\n  %p = f32[4]{{0}} parameter(0)\n  {line}\n}}\n"
        assert list(collectives(text)) == [found], line


def test_bad_specs():
    for spec, message in (
        (("x",), "for a tensor"),
        (("x", "z"), "names"),
        (("x", "x"), "uses an axis twice"),
        ((None, "x"), "4 does not divide by the 8 devices"),
    ):
        with pytest.raises(ValueError, match=message):
            require_cut((8, 4), spec, {"x": 8})
    require_cut((8, 4), ("x", None), {"x": 8})


def test_bad_meshes(monkeypatch):
    with pytest.raises(RuntimeError, match=r"make_mesh: SPMD is off; call torch_xla\.runtime\.use_spmd\(\)"):
        make_mesh((1,), ("x",))
    monkeypatch.setattr(runtime, "is_spmd", lambda: True)
    with pytest.raises(ValueError, match=r"make_mesh: shape \(3, 2\) is 6 devices, and there are 1; .*CPU_NUM_DEVICES"):
        make_mesh((3, 2), ("x", "y"))
    for names in (("x",), ("x", "x")):
        with pytest.raises(ValueError, match="give each axis one name of its own"):
            make_mesh((1, 1), names)
    mesh = make_mesh((1,), ("x",))
    with pytest.raises(TypeError, match="shard: the tensor is on cpu; move it to"):
        shard(torch.ones(2, 2), mesh, ("x", None))
    with pytest.raises(ValueError, match="for a tensor"):
        shard(torch.ones(2, 2, device=xla.device()), mesh, ("x",))
    xla.settle()
