"""PyTorch/XLA watched: exact counts on graphs of sizes that nothing else uses, errors, graphs as text."""

import gc
import os

from harness.process import Child, report

import pytest
import torch

# It imports torch_xla, after it has chosen the device.
xla = pytest.importorskip("examples.common.xla", reason="torch_xla has an environment of its own: make test-xla")

TOO_MUCH = 2**45  # elements: 128 TiB of float32, more than any machine's address space


sizes = iter(range(101, 10_000, 2))


@pytest.fixture(autouse=True)
def clean():
    xla.start_clean()
    yield
    xla.start_clean()


@pytest.fixture
def x():
    """A matrix on the device, of a width that no other test has: its graphs are compiled for the first time."""
    return torch.randn(3, next(sizes)).to(xla.device())


def test_a_graph_is_compiled_once_and_then_found(x):
    for first in (True, False, False):
        with xla.watch() as ran:
            y = (x @ x.t()).relu()
            xla.settle()
        assert (ran.compiles, ran.reused) == ((1, 0) if first else (0, 1))
        assert (ran.executions, ran.syncs, ran.to_device, ran.from_device) == (1, 1, 0, 0)
        assert ran.fallbacks == {}
        assert (ran.compile_s > 0) == first
        assert ran.compile_s < ran.seconds
    torch.testing.assert_close(y.cpu(), (x.cpu() @ x.cpu().t()).relu())


def test_a_glance_at_a_value_is_an_execution_without_a_sync_and_what_xla_cannot_do_is_named(x):
    for i, look in enumerate((lambda y: y.item(), bool)):
        with xla.watch() as ran:
            look((x + i).sum())
        assert (ran.executions, ran.syncs, ran.from_device) == (1, 0, 1)
        assert ran.fallbacks == {"aten::_local_scalar_dense": 1}
    square = torch.randn(7, 7).to(xla.device())
    with xla.watch() as ran:
        torch.linalg.eigvals(square)
    assert ran.fallbacks == {"aten::linalg_eig": 1}
    assert ran.from_device > 0


def test_one_watch_within_another_and_an_error_within_both(x):
    with pytest.raises(KeyError), xla.watch() as outer:  # noqa: PT012
        y = x.cos()
        with xla.watch() as inner:  # runs y first, which is the outer's
            xla.waited(y.tan)()
            raise KeyError
    assert [(ran.compiles, ran.executions) for ran in (outer, inner)] == [(2, 2), (1, 1)]


def test_waited_runs_to_the_end_and_returns_what_the_function_does(x):
    def scaled(a, by=1.0):
        return a * by

    assert xla.waited(scaled).__name__ == "scaled"
    with xla.watch() as ran:
        y = xla.waited(scaled)(x, by=2.0)
    assert (ran.executions, ran.syncs, xla.hlo(y)) == (1, 1, "")  # it is data
    assert torch.equal(y.cpu(), x.cpu() * 2)


# --- after an error


def test_an_error_comes_once_more_unless_it_is_forgotten(x):
    runs_out = xla.waited(lambda: torch.empty(TOO_MUCH, device=xla.device()) + 1)
    for again in (runs_out, xla.settle, runs_out):  # the second is what forget_pending() is for
        with pytest.raises(RuntimeError, match="Out of memory allocating 140737488355328 bytes"):
            again()
    xla.forget_pending()
    with xla.watch() as ran:
        y = x + 1
        xla.settle()
    assert (ran.executions, torch.equal(y.cpu(), x.cpu() + 1)) == (1, True)
    with xla.watch() as ran:
        z = x.atanh()
        xla.forget_pending()  # which runs nothing
        xla.settle()
    assert ran.executions == 0
    del z  # hollow: reading it would end the process


def test_start_clean_runs_what_can_be_run_and_drops_the_rest(x):
    y = x * 3
    xla.start_clean()
    assert xla.hlo(y) == ""
    assert torch.equal(y.cpu(), x.cpu() * 3)  # its value is there
    held = torch.empty(TOO_MUCH, device=xla.device()) + 1
    xla.start_clean()
    xla.settle()
    del held


def test_start_clean_lets_go_of_cycles_first(x):
    """What a technique leaves in a circle of references is pending until it is collected; nobody will read it."""
    gc.disable()
    try:
        circle = [x.cosh()]
        circle.append(circle)
        del circle
        before = xla._read()["executions"]
        xla.start_clean()
        assert xla._read()["executions"] == before
    finally:
        gc.enable()


# --- the device


def child_device():
    """Asks for the device as a topic does whose techniques all do: each gets the same error, and the process lives."""
    said = []
    for ask in (xla.device, xla.device, xla.settle, xla.waited(lambda: None), xla.watch().__enter__):
        try:
            ask()
            said.append("none")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    report(said=said, in_use=xla.in_use(), device=os.environ["PJRT_DEVICE"])


def test_it_is_the_cpu_unless_somebody_chooses_and_one_that_is_not_there_is_the_same_error_each_time():
    with Child(child_device, env={"PJRT_DEVICE": "FOO"}) as child:
        result = child.result()
    (said,) = set(result["said"])
    assert said.startswith("RuntimeError: No PjRtPlugin registered for: FOO.")
    assert (result["in_use"], child.process.returncode) == (False, 0)
    with Child(child_device, env={"PJRT_DEVICE": None}) as child:
        assert child.result() == {"said": ["none"] * 5, "in_use": True, "device": "CPU"}
    assert "WARNING" not in child.output()
    assert xla.device() == torch.device("xla:0")


# --- as text


def test_the_graph_as_xla_and_other_compilers_write_it(x):
    width = x.shape[1]
    with xla.watch() as ran:  # its settle() is what runs y; asking for texts runs nothing
        y = (x @ x.t()).relu()
        hlo, stablehlo = xla.hlo(y), xla.stablehlo(y)
    assert ran.executions == 0
    assert f"(f32[3,{width}]{{1,0}})->(f32[3,3]{{1,0}})" in hlo
    assert "stablehlo.dot_general" in stablehlo
    assert f"tensor<3x{width}xf32>" in stablehlo
    assert xla.operations(hlo) == {
        "parameter": 1, "transpose": 1, "dot": 1, "constant": 1, "broadcast": 1, "maximum": 1, "tuple": 1,
    }  # fmt: skip


def test_a_tensor_that_is_not_on_the_device_is_refused(x):
    for write in (xla.hlo, xla.stablehlo):
        with pytest.raises(ValueError, match=rf"xla.{write.__name__}: tensor 1 is on cpu; .*\.to\(xla\.device\(\)\)"):
            write(x + 1, torch.ones(3))


OPTIMIZED = """
HloModule SyncTensorsGraph.51, is_scheduled=true, entry_computation_layout={(f32[], f32[8,4]{1,0})->(f32[8,4]{1,0})}

ENTRY %SyncTensorsGraph.51_spmd (param: f32[], param.1: f32[8,4]) -> (f32[8,4], f32[8,4]) {
  %param.1 = f32[8,4]{1,0:T(8,128)} parameter(1), sharding={devices=[2,1,2]<=[4] last_tile_dim_replicate}
  %all-gather-start = (f32[8,4]{1,0:T(8,128)}, f32[16,4]{1,0:T(8,128)}) all-gather-start(%all-reduce.7)
  %fused = f32[8,4]{1,0} fusion(%param, %all-reduce.7), calls=%fused_computation, metadata={op_name="a = b(c)"}
  %while.2 = ((f32[], s32[]), f32[8,4]{1,0}, f32[], f32[], f32[], /*index=5*/f32[]) while(%t), condition=%c, body=%b
  ROOT tuple.1 = (f32[8,4]{1,0}, /*index=1*/f32[8,4]{1,0}) tuple(%fused, /*index=1*/%all-reduce.7)
}
"""


def test_operations_of_an_optimized_program():
    found = dict.fromkeys(("parameter", "all-gather-start", "fusion", "while", "tuple"), 1)
    assert xla.operations(OPTIMIZED) == found
    assert xla.operations("") == xla.operations("HloModule x, entry_computation_layout={()->()}") == {}
