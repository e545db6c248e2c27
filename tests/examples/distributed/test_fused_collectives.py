"""all_gather_matmul and matmul_reduce_scatter on ranks that are processes, and their bad input."""

import time

import pytest
import torch

from tests.examples.distributed.ranks import needs_the_interpreter, on_ranks


def products(rank: int) -> str:
    """Several calls on other numbers each, one rank or the other late: a half that was read too early would be seen."""
    from examples.distributed.fused_collectives import all_gather_matmul
    from examples.distributed.fused_collectives_operands import gather_workspace, scatter_workspace
    from examples.distributed.fused_collectives_scatter import matmul_reduce_scatter

    world, rows, N, K = torch.distributed.get_world_size(), 136, 24, 40
    generator = torch.Generator().manual_seed(1)
    own = slice(rank * rows, (rank + 1) * rows)
    gather = scatter = None
    for call in range(4):
        x = torch.randn(world, world * rows, K, generator=generator).half()
        w = torch.randn(world, K, N, generator=generator).half()
        gather = gather or gather_workspace(x[0, own])
        scatter = scatter or scatter_workspace(x[rank], w[rank])
        if call % 2 == rank:
            time.sleep(0.05)
        mine = x[0, own] if call % 2 else torch.cat([x[0, own], x[1, own]], dim=1)[:, :K]  # rows that lie apart
        y = all_gather_matmul(mine, w[rank], gather)
        torch.testing.assert_close(y.double(), x[0].double() @ w[rank].double(), rtol=1e-2, atol=1e-2)
        y = matmul_reduce_scatter(x[rank], w[rank], scatter)
        want = (x[:, own].double() @ w.double()).sum(0)
        torch.testing.assert_close(y.double(), want, rtol=1e-2, atol=3e-2)
    return "right"


def test_each_call_uses_its_own_numbers():
    needs_the_interpreter()
    assert on_ranks(products) == ["right", "right"]


def refused(rank: int) -> str:
    from examples.distributed.fused_collectives import all_gather_matmul
    from examples.distributed.fused_collectives_operands import gather_workspace, scatter_workspace
    from examples.distributed.fused_collectives_scatter import matmul_reduce_scatter

    x, w = torch.zeros(16, 8, dtype=torch.float16), torch.zeros(8, 16, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"^gather_workspace: rank 0 calls with .*, rank 1 with "):
        gather_workspace(x[: 16 - 8 * rank])
    with pytest.raises(ValueError, match=r"^scatter_workspace: M is 15, and 2 ranks share its rows"):
        scatter_workspace(x[:15], w)
    gather, scatter = gather_workspace(x), scatter_workspace(x, w)
    for name, call in {
        "all_gather_matmul": lambda x, w: all_gather_matmul(x, w, gather),
        "matmul_reduce_scatter": lambda x, w: matmul_reduce_scatter(x, w, scatter),
    }.items():
        with pytest.raises(ValueError, match=rf"^{name}: .*the workspace holds .*; make another in each"):
            call(x[:8], w)
        with pytest.raises(TypeError, match=rf"^{name}: "):
            call(x.float(), w.float())
        with pytest.raises(ValueError, match=rf"^{name}: "):
            call(x, w.t())
        with pytest.raises(ValueError, match=rf"^{name}: "):
            call(x, w[0])
    with pytest.raises(ValueError, match=r"^matmul_reduce_scatter: .*the workspace holds .*, by scatter_workspace"):
        matmul_reduce_scatter(torch.cat([x, x[:1]]), w, scatter)  # its last row would be no rank's
    return "refused"


def test_bad_input_is_refused_in_every_rank():
    assert on_ranks(refused) == ["refused", "refused"]
