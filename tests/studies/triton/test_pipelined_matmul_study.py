"""pipelined_matmul's study: how many programs share an SM."""

from examples.common.device import SHARED_LIMIT
from examples.triton.pipelined_matmul import STAGES, shared_bytes
from studies.triton.pipelined_matmul import programs_per_sm


def test_stages_cost_the_second_program_its_place():
    """On sm_90, with the registers that the compiler uses: shared memory of 228 KiB, 65536 registers."""
    limit = SHARED_LIMIT[90]
    assert [programs_per_sm(shared_bytes(s, 90), 112, limit) for s in STAGES] == [2, 2, 2, 1, 1]
    assert programs_per_sm(shared_bytes(2, 90), 64, limit) == 3  # then shared memory is what counts
    assert programs_per_sm(1024, 129, limit) == 1  # 129 registers are handed out as 136
