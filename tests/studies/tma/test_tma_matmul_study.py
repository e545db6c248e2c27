"""Study of tma_matmul: what it counts is in the machine code, and what it says follows from the times."""

from harness.bench import Row, Table
from harness.codegen import dump

import torch

from examples.common.device import SHARED_LIMIT
from examples.tma.tma_matmul import BLOCK_K, STEPS, tma_matmul
from studies.tma.tma_matmul import TILES, conclude, gains, judge_claim, loop_of, programs_per_sm


def test_who_issues_the_copies():
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    loops = [loop_of(dump(tma_matmul, (x, x, step, *TILES[0]), sm=90)["sass"]) for step in STEPS]
    assert [loop["UTMALDG"] for loop in loops] == [0, 2, 2, 2]
    assert [loop["LDGSTS"] for loop in loops] == [12, 0, 0, 0]
    assert all(loop["HGMMA"] == BLOCK_K // 16 for loop in loops)


def test_the_loop_is_found_by_its_branch():
    sass = "\n".join(
        ("--:-:-:-:1\tHGMMA.64x8 R1;", "OUTER:", "--:-:-:-:1\tMOV R1, R2;", "INNER:", "--:-:-:-:1\t@P0 IADD3.X R1;",
         "--:-:-:-:1\tHGMMA.64x8 R1;", "--:-:-:-:5\t@!P0 BRA INNER;", "--:-:-:-:5\t@P1 BRA OUTER;",
         "LAST:", "--:-:-:-:1\tNOP;", "--:-:-:-:5\tBRA LAST;")
    )  # fmt: skip
    assert loop_of(sass) == {"IADD3": 1, "HGMMA": 1, "BRA": 1}
    assert loop_of(sass, "MOV") == {"MOV": 1, "IADD3": 1, "HGMMA": 1, "BRA": 2}
    assert loop_of(sass, "UTMALDG") == {}


def test_programs_on_an_sm():
    limit = SHARED_LIMIT[90]
    assert programs_per_sm(90, 98328, limit) == 2
    assert programs_per_sm(90, 131104, limit) == 1
    assert programs_per_sm(129, 1024, limit) == 1  # 129 registers are handed out as 136


def table(case, title="tma_matmul", **speeds):
    rows = [Row(name, name != "cuBLAS", 0.0, 0.1, ms=1 / speed, speedup=speed) for name, speed in speeds.items()]
    return Table(title, case, "cuBLAS", rows)


def test_what_is_said_follows_from_the_times(h):
    whole = table("4096x4096x4096", cuBLAS=1.0, pointers=0.8, loads=1.0, store=0.9, parts=0.9)
    assert gains(whole) == {"loads": 1.25, "store": 0.9, "parts": 1.0}
    ragged = table("4072x4104x4072", cuBLAS=1.0, pointers=0.5, loads=1.0, store=1.0, parts=1.0)
    two = table("4096x4096x4096", "two", cuBLAS=1.0, pointers=1.0, loads=1.0, store=1.0, parts=1.0)
    conclude(h, [whole, ragged], [two])
    assert h.record.facts["geometric mean over cuBLAS"] == {"pointers": 0.8, "loads": 1.0, "store": 0.9, "parts": 0.9}
    assert h.record.conclusions[0].endswith("of 2 cases, 1 are within the 1.20x to 1.30x that the chapter claims, "
                                            "1 below, 0 above")  # fmt: skip
    assert h.record.conclusions[1] == "where pointers must mask, 4072x4104x4072: 2.000x"
    assert judge_claim([0.98, 1.04, 1.25, 1.5]).endswith("1 are within the 1.20x to 1.30x that the chapter claims, "
                                                         "2 below, 1 above")  # fmt: skip
