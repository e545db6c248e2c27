"""one_shot_allreduce on ranks that are processes, and its bad input."""

import time

import pytest
import torch

from tests.examples.distributed.ranks import needs_the_interpreter, on_ranks


def sums(rank: int) -> str:
    """Many calls, one rank or the other ahead, checked against the sum in order of the ranks; every rank's bits."""
    from examples.distributed.one_shot_allreduce import BLOCK, VARIANTS, one_shot_allreduce, workspace

    world = torch.distributed.get_world_size()
    generator, digest = torch.Generator().manual_seed(1), 0
    for n in (8, 2 * BLOCK + 16):
        work = workspace(torch.zeros(n, dtype=torch.float16))
        for call in range(8):
            xs = torch.randn(world, n, generator=generator).half()
            if call % 3 == rank:
                time.sleep(0.02)  # the other rank is then a call ahead
            x = xs[rank].clone()
            variant = VARIANTS[call // 2 % 2]
            y = one_shot_allreduce(x, work, out=x if call % 2 else None, variant=variant)
            want = torch.zeros(n)
            for each in xs:
                want += each.float()
            assert torch.equal(y, want.half()), (n, call, variant)
            digest = hash((digest, y.double().sum().item()))
    return str(digest)


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_gets_the_same_bits(world):
    needs_the_interpreter()
    assert len(set(on_ranks(sums, world))) == 1


def refused(rank: int) -> list[str]:
    from examples.distributed.one_shot_allreduce import one_shot_allreduce, workspace

    messages = []

    def refuse(fn, *arguments, **options):
        with pytest.raises((TypeError, ValueError)) as error:
            fn(*arguments, **options)
        messages.append(str(error.value))

    half = torch.zeros(64, dtype=torch.float16)
    refuse(workspace, torch.zeros(64 + 8 * rank, dtype=torch.float16))  # in every rank alike: nobody waits
    refuse(workspace, torch.zeros(64))
    work = workspace(half)
    refuse(one_shot_allreduce, torch.zeros(32, dtype=torch.float16), work)
    refuse(one_shot_allreduce, torch.zeros(128, dtype=torch.float16)[::2], work)
    refuse(one_shot_allreduce, torch.zeros(65, dtype=torch.float16)[1:], work)
    refuse(one_shot_allreduce, half, work, variant="ring")
    refuse(one_shot_allreduce, half, work, out=torch.zeros(32, dtype=torch.float16))
    refuse(workspace, torch.empty(2**28 + 8, dtype=torch.float16))  # no memory until it is written
    longer = torch.zeros(72, dtype=torch.float16)
    refuse(one_shot_allreduce, longer[:64], work, out=longer[8:])
    refuse(one_shot_allreduce, longer[8:], work, out=longer[:64])
    for held in (work.data.own[1], work.mail.own.view(torch.float16).view(-1)[64:128]):
        refuse(one_shot_allreduce, half, work, out=held)
    return messages


def test_bad_input_is_refused_in_every_rank():
    one, other = (eval(each) for each in on_ranks(refused))
    assert one == other
    assert "rank 0 calls with 2x64" in one[0]
    assert "at most 268435456; call NCCL" in one[7]
    assert all("overlaps" in message for message in one[8:])
    assert all(message.startswith(("workspace: ", "one_shot_allreduce: ")) for message in one)


def one_rank(rank: int) -> str:
    from examples.distributed.one_shot_allreduce import workspace

    with pytest.raises(ValueError, match=r"^workspace: one rank only") as error:
        workspace(torch.zeros(64, dtype=torch.float16))
    return str(error.value)


def test_one_rank_is_refused():
    on_ranks(one_rank, world=1)


def test_without_a_process_group_it_says_so(h):
    from examples.distributed.one_shot_allreduce import workspace

    with pytest.raises(RuntimeError, match=r"^workspace: there is no process group"):
        workspace(torch.zeros(64, dtype=torch.float16, device=h.device))
