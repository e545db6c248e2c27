"""What profilers and the sanitizer write, read back: sample texts in, rows and verdicts out."""

import io
import json
import textwrap

from harness.catalog import ROOT, CatalogError
from harness.profile_read import (
    Limits,
    Seen,
    kernels_of,
    read_ncu,
    read_nsys,
    read_proton,
    read_sanitizer,
    read_torch,
    read_trace,
    short,
    show,
    show_profile,
    show_sanitizer,
    techniques,
    together,
    verdict,
    works_of,
)

import pytest
from rich.console import Console


def quiet(width=160):
    return Console(file=io.StringIO(), width=width, highlight=False)


def said(console):
    return console.file.getvalue()


# --- which techniques, which kernels


def test_the_kernels_of_a_file_are_those_a_host_may_launch(tmp_path):
    path = tmp_path / "t.py"
    path.write_text(
        textwrap.dedent("""
        @triton.jit
        def _helper(x): ...

        @triton.autotune(configs=[], key=[])
        @triton.jit(do_not_specialize=["n"])
        def tuned_kernel(x): ...

        @gluon.jit
        def by_hand_kernel(x): ...

        @triton.jit
        def larger(a, b): ...

        @functools.cache
        def injit_kernel(x): ...

        def demo(h):
            @triton.jit
            def inner_kernel(x): ...
    """)
    )
    assert kernels_of(path) == ["tuned_kernel", "by_hand_kernel", "inner_kernel"]


def test_techniques_are_named_as_on_the_command_line():
    topic = ROOT / "triton_examples.py"
    assert [t.name for t in techniques(topic, ["softmax", "vector_add"])] == ["vector_add", "softmax"]
    assert len(techniques(topic, [])) > 10
    assert [t.name for t in techniques(ROOT / "examples/triton/softmax.py", [])] == ["softmax"]
    with pytest.raises(CatalogError, match="no technique 'sofmax'; did you mean softmax"):
        techniques(topic, ["sofmax"])
    with pytest.raises(CatalogError, match="lists its technique files in TECHNIQUES"):
        techniques(ROOT / "harness/catalog.py", [])


# --- compute-sanitizer

HEAD = "========= COMPUTE-SANITIZER\n"
WRITE = """========= Invalid __global__ write of size 4 bytes
=========     at scale_kernel+0x120 in debugging.py:188
=========     by thread (32,0,0) in block (0,0,0)
=========     Access to 0x7f3 is out of bounds
"""
OLD_WRITE = """========= Invalid __global__ write of size 4 bytes
=========     at 0x110 in /some/debugging.py:188:scale_kernel
=========     by thread (0,0,0) in block (0,0,0)
"""
LIBRARY = """========= Uninitialized __global__ memory read of size 16 bytes
=========     at void at::native::reduce_kernel<(int)512>(T3)+0x220
=========     by thread (1,0,0) in block (0,0,0)
"""
RACE = """========= Error: Race reported between Write access at matmul_kernel+0x90 in m.py:12
=========     and Read access at matmul_kernel+0x100 in m.py:14 [484 hazards]
=========
"""


@pytest.mark.parametrize("block", [WRITE, OLD_WRITE])
def test_an_error_is_that_of_the_kernel_it_is_in(block):
    found = read_sanitizer(
        "memcheck", HEAD + 2 * block + "========= ERROR SUMMARY: 2 errors\n", ["other", "scale_kernel"]
    )
    assert (found.errors, found.refused) == (2, None)
    assert list(found.by_kernel) == ["scale_kernel"]
    assert len(found.by_kernel["scale_kernel"]) == 2
    assert found.by_kernel["scale_kernel"][0].startswith("Invalid __global__ write of size 4 bytes at ")
    assert "debugging.py:188" in found.by_kernel["scale_kernel"][0]


def test_a_race_is_an_error_and_clean_is_clean():
    found = read_sanitizer(
        "racecheck",
        HEAD + RACE + "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n",
        ["matmul_kernel"],
    )
    assert found.errors == 1
    assert list(found.by_kernel) == ["matmul_kernel"]
    for summary in ("RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", "ERROR SUMMARY: 0 errors"):
        found = read_sanitizer("racecheck", f"{HEAD}========= {summary}\n", ["matmul_kernel"])
        assert (found.errors, found.by_kernel, found.refused) == (0, {}, None)


def test_errors_that_were_not_printed_count():
    summary = (
        "========= ERROR SUMMARY: 120 errors\n"
        "========= ERROR SUMMARY: 20 errors were not printed. Use --print-limit option to adjust the number\n"
    )
    assert read_sanitizer("memcheck", HEAD + WRITE + summary, ["scale_kernel"]).errors == 120


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("", "it wrote nothing"),
        (HEAD, "it wrote nothing"),
        (
            f"{HEAD}========= Error: Target application terminated before first instrumented API call\n"
            "========= Tracking kernels launched by child processes requires the --target-processes all option.\n",
            "Error: Target application terminated before first instrumented API call",
        ),
        (f"{HEAD}========= Error: Device not supported\n", "Error: Device not supported"),
        (HEAD + WRITE, "Access to 0x7f3 is out of bounds"),  # killed while it ran
    ],
)
def test_a_tool_without_a_summary_did_not_come_to_its_end(log, reason):
    found = read_sanitizer("memcheck", log, ["scale_kernel"])
    assert found.refused == reason
    assert found.errors == 0


@pytest.fixture
def sanitized(tmp_path):
    """Write what sanitize.sh leaves of one tool: sanitized("memcheck", log, status="passed", launches={...})."""
    out = tmp_path / "topic"

    def write(tool, log, verdict="passed", reason=None, launches=None, record=True):
        stem = f"{out}.{tool}"
        with open(f"{stem}.log", "w") as file:
            file.write(log)
        with open(f"{stem}.status", "w") as file:
            file.write(f"0 12 {'all' if tool == 'initcheck' else 'ours'}\n")
        if record:
            with open(f"{stem}.json", "w") as file:
                json.dump({"examples": [{"name": "scale", "status": verdict, "reason": reason}]}, file)
            with open(f"{stem}.launches", "w") as file:
                json.dump({"scale_kernel": 7, "elsewhere": 3} if launches is None else launches, file)
        return out

    return write


KERNELS = ["scale_kernel", "never_kernel"]
CLEAN = HEAD + "========= ERROR SUMMARY: 0 errors\n"


def test_a_clean_tool_says_what_it_looked_at(sanitized):
    console = quiet()
    assert show_sanitizer(console, sanitized("memcheck", CLEAN), ["memcheck"], KERNELS)
    assert " ".join(said(console).splitlines()[3].split()).startswith("memcheck 1 passed 1 of 2 7 0 12 ")
    assert "never launched here, so not looked at: never_kernel" in said(console)
    assert "launched as well, and not looked at: elsewhere" in said(console)
    console = quiet()
    assert show_sanitizer(console, sanitized("initcheck", CLEAN), ["initcheck"], KERNELS)
    assert "elsewhere" not in said(console).replace("errors   elsewhere", "")


@pytest.mark.parametrize(
    ("log", "more", "complaint"),
    [
        (HEAD + WRITE + "========= ERROR SUMMARY: 1 error\n", {}, "scale_kernel: 1 printed, first: Invalid __global__"),
        ("", {"record": False}, "did not come to its end: it wrote nothing"),
        (CLEAN, {"record": False}, "ended with status 0 before its first technique"),
        (CLEAN, {"verdict": "failed", "reason": "CheckError: off\nby much"}, "scale failed: CheckError: off"),
        (CLEAN, {"verdict": "running"}, "scale failed: no reason"),
        (CLEAN, {"launches": {}}, "never launched here, so not looked at: scale_kernel, never_kernel"),
    ],
)
def test_what_is_found_or_not_done_is_no_success(sanitized, log, more, complaint):
    console = quiet()
    assert not show_sanitizer(console, sanitized("memcheck", log, **more), ["memcheck"], KERNELS)
    assert complaint in said(console)


def test_errors_of_which_not_all_are_printed(sanitized):
    console = quiet()
    log = HEAD + LIBRARY + "========= ERROR SUMMARY: 3 errors\n"
    assert show_sanitizer(console, sanitized("initcheck", log), ["initcheck"], KERNELS)
    assert "initcheck: 2 of its 3 errors were not printed" in said(console)


def test_initcheck_blames_our_kernels_alone(sanitized):
    console = quiet()
    log = HEAD + 3 * LIBRARY + "========= ERROR SUMMARY: 3 errors\n"
    assert show_sanitizer(console, sanitized("initcheck", log), ["initcheck"], KERNELS)
    assert " 0 3 12 " in " ".join(said(console).split())
    assert "not in a kernel of ours: 3 printed" in said(console)
    assert not show_sanitizer(quiet(), sanitized("memcheck", log), ["memcheck"], KERNELS)
    ours = LIBRARY.replace("void at::native::reduce_kernel<(int)512>(T3)", "scale_kernel")
    log = HEAD + 2 * LIBRARY + ours + "========= ERROR SUMMARY: 3 errors\n"
    assert not show_sanitizer(console, sanitized("initcheck", log), ["initcheck"], KERNELS)
    assert " 1 2 12 " in " ".join(said(console).split())


# --- ncu

RANGE = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
NCU_HEAD = (
    f'"ID","Process ID","Process Name","Host Name","{RANGE}","Kernel Name","Context","Stream","Block Size","Grid Size",'
    '"Device","CC","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum",'
    '"launch__registers_per_thread","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",'
    '"sm__warps_active.avg.pct_of_peak_sustained_active"\n'
)


def ncu_row(call, kernel, read, write, time, registers=32, tensor="0", warps="80"):
    named = f'13416  ""<default domain>:{call}:none:none:none:none:none:none""' if call else ""
    return (
        f'"0","42","python","127.0.0.1","{named}","{kernel}","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0",'
        f'"{read}","{write}","{time}","{registers}","{tensor}","{warps}"\n'
    )


UNITS = '"","","","","","","","","block","grid","","","byte","byte","ns","register/thread","%","%"\n'
SOFTMAX = "softmax 8192x8192 bfloat16: triton, one pass"
NCU = (
    "==PROF== Connected to process 42\n"
    + NCU_HEAD
    + UNITS
    + ncu_row(SOFTMAX, "softmax_kernel", "134,217,728", "134217728", "66000")
    + ncu_row("matmul 8192: cuBLAS", "nvjet", 300e6, 100e6, 1_000_000, 168, "90.5", "12.5")
    + ncu_row("matmul 8192: cuBLAS", "reduce", 1e6, 1e6, 3000, 16)
    + ncu_row("matmul 8192: cuBLAS", "reduce", 1e6, 1e6, 1000, 24)
    + ncu_row("", "fill", 0, 4, 2000, "n/a", "n/a", "n/a")
    + "==WARNING== something\n"
)


def test_ncu_is_read_by_call_and_kernel():
    softmax, nvjet, reduce, fill = read_ncu(NCU)
    assert softmax == Seen(SOFTMAX, "softmax_kernel", 1, 66.0, 2 * 134217728, 0.0, 80.0, 32)
    assert nvjet == Seen("matmul 8192: cuBLAS", "nvjet", 1, 1000.0, 400e6, 90.5, 12.5, 168)
    assert reduce == Seen("matmul 8192: cuBLAS", "reduce", 2, 4.0, 4e6, 0.0, 80.0, 24)
    assert fill == Seen("", "fill", 1, 2.0, 4)


def test_ncu_in_other_units_and_in_nested_ranges():
    units = UNITS.replace('"byte","byte","ns"', '"Mbyte","Kbyte","usecond"')
    row = ncu_row("inner: x", "k", "1.5", "2", "3").replace(
        "13416  ", '13416  ""<default domain>:outer:none:none:none:none:none:none""  '
    )
    assert read_ncu(NCU_HEAD + units + row) == [Seen("inner: x", "k", 1, 3.0, 1502000.0, 0.0, 80.0, 32)]


@pytest.mark.parametrize(
    "text", ["", "==ERROR== ERR_NVGPUCTRPERM\n", "==WARNING== No kernels were profiled.\n", NCU_HEAD]
)
def test_an_ncu_that_saw_nothing(text):
    assert read_ncu(text) == []


# --- the others

NSYS = """Processing [x.sqlite] with [nvtx_kern_sum.py]...
NVTX Range,Style,PID,TID,NVTX Inst,Kern Inst,Total Time (ns),Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Kernel Name
:softmax: triton,PushPop,42,42,1,2,66000,33000.0,33000.0,1,2,0.0,softmax_kernel
:softmax: triton,PushPop,42,42,1,1,1000,1000.0,1000.0,1,2,0.0,"void at::native::fill<int, float>(int)"

"""


def test_nsys_reports_are_read_one_after_the_other():
    other = NSYS.replace("softmax: triton", "softmax: torch")
    seen = read_nsys([NSYS, "", other])
    assert [(one.call, one.launches, one.us) for one in seen] == [
        ("softmax: triton", 2, 66.0), ("softmax: triton", 1, 1.0),
        ("softmax: torch", 2, 66.0), ("softmax: torch", 1, 1.0),
    ]  # fmt: skip


def event(cat, name, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}


KERNEL = {"registers per thread": 40, "est. achieved occupancy %": 50}
GPU_TRACE = {
    "traceEvents": [
        event("cpu_op", "aten::softmax", 0, 90),
        event("kernel", "softmax_kernel", 10, 60, **KERNEL),
        event("kernel", "softmax_kernel", 80, 20, **KERNEL | {"est. achieved occupancy %": 90}),
        event("gpu_memcpy", "Memcpy DtoD", 200, 5, bytes=8),
        {"ph": "s", "cat": "ac2g", "name": "x"},
    ]
}
CPU_TRACE = {
    "traceEvents": [
        event("user_annotation", "call", 0, 100),
        event("cpu_op", "aten::linear", 0, 50),
        event("cpu_op", "aten::addmm", 10, 30),
        event("cpu_op", "aten::copy_", 12, 8),
        event("cpu_op", "aten::addmm", 60, 20),
    ]
}


def test_a_trace_of_a_gpu_is_its_kernels():
    kernel, copy = read_trace(GPU_TRACE, "softmax")
    assert kernel == Seen("softmax", "softmax_kernel", 2, 80, None, None, 60.0, 40)
    assert copy == Seen("softmax", "Memcpy DtoD", 1, 5)


def test_a_trace_of_a_cpu_is_its_operators_and_their_own_time():
    assert {one.kernel: (one.launches, one.us) for one in read_trace(CPU_TRACE, "x")} == {
        "aten::linear": (1, 20), "aten::addmm": (2, 42), "aten::copy_": (1, 8)
    }  # fmt: skip


def test_a_folder_of_traces(tmp_path):
    (tmp_path / "names.json").write_text(json.dumps({"1.json": "a: b", "2.json": "c", "gone.json": "d"}))
    (tmp_path / "1.json").write_text(json.dumps(GPU_TRACE))
    (tmp_path / "2.json").write_text(json.dumps(CPU_TRACE))
    (tmp_path / "gone.json").write_text(json.dumps({"traceEvents": []}))
    assert {one.call for one in read_torch(tmp_path)} == {"a: b", "c"}
    assert read_torch(tmp_path / "nowhere") == []


HATCHET = [
    {
        "frame": {"name": "ROOT", "type": "function"},
        "metrics": {"time (ns)": 0},
        "children": [
            {
                "frame": {"name": "matmul: triton", "type": "function"},
                "metrics": {},
                "children": [
                    {
                        "frame": {"name": "matmul_kernel", "type": "function"},
                        "metrics": {"count": 3, "time (ns)": 9000, "device_id": "0", "device_type": "CUDA"},
                        "children": [],
                    },
                ],
            },
        ],
    },
    {"CUDA": {"0": {"arch": "90", "num_sms": 132}}},
]


def test_a_tree_of_proton():
    assert read_proton(HATCHET) == [Seen("matmul: triton", "matmul_kernel", 3, 9.0)]


# --- the table and what it says

H200 = Limits(4.0, {"bfloat16": 800.0})
COPY = {"bytes": 400_000_000, "flops": 0, "dtype": None, "steps": []}
GEMM = {"bytes": 1_000_000, "flops": 800_000_000_000, "dtype": "bfloat16", "steps": []}


@pytest.mark.parametrize(
    ("kernels", "work", "limits", "text"),
    [
        ([Seen("c", "k", 1, 110.0, 413.6e6, 0.0, 90.0)], COPY, H200, "memory-bound: 94% of copy"),
        (
            [Seen("c", "k", 1, 200.0, 800e6, 0.0, 90.0)], COPY, H200,
            "memory-bound: 100% of copy, moving 2.00 times the least it must",
        ),
        (
            [Seen("c", "k", 1, 1250.0, 10e6, 85.0, 12.0)], GEMM, H200,
            "bound by the tensor cores: busy 85% of the time, 80% of cuBLAS bfloat16",
        ),
        (
            [Seen("c", "k", 1, 3.0, 1e6, 0.0, 5.0)], None, H200,
            "too short to be bound by anything but its launch (8% of copy)",
        ),
        (
            [Seen("c", "k", 1, 300.0, 300e6, 20.0, 10.0), Seen("c", "l", 1, 100.0, 100e6, 60.0, 50.0)], None, H200,
            "waiting: memory at 25% of copy, tensor cores busy 30% of the time, 20 % of the warps there",
        ),
        (
            [Seen("c", "k", 1, 100.0, 300e6, 7.0, 10.0)], None, Limits(),
            "3.00 TB/s of memory, tensor cores busy 7% of the time",
        ),
        ([Seen("c", "k", 1, 125.0)], COPY, H200, "memory-bound by its work: 80% of copy"),
        ([Seen("c", "k", 1, 50.0)], COPY, H200, "memory-bound by its work: 200% of copy, as L2 is warm here"),
        ([Seen("c", "k", 1, 2000.0)], GEMM, H200, "bound by arithmetic by its work: 50% of cuBLAS bfloat16"),
        ([Seen("c", "k", 1, 2000.0)], None, H200, ""),
        ([Seen("c", "k", 1, 2000.0)], COPY, Limits(), ""),
        ([Seen("c", "k", 1, 0.0, 0.0)], COPY, H200, ""),
    ],
)  # fmt: skip
def test_the_verdict_is_of_the_numbers(kernels, work, limits, text):
    assert verdict(kernels, work, limits) == text


def test_the_table_has_the_columns_that_hold_something():
    console = quiet()
    show(console, read_ncu(NCU), {SOFTMAX: {"bytes": 268435456, "flops": 0, "dtype": None, "steps": []}}, H200)
    lines = said(console).splitlines()
    heads = "call, and its kernels launches us TB/s tensor cores occupancy registers TB/s of work"
    assert " ".join(lines[1].split()) == heads
    text = [" ".join(line.split()) for line in lines]
    assert f"{SOFTMAX} 1 66.0 4.07" in text
    assert "softmax_kernel 1 66.0 4.07 0 % 80 % 32" in text
    assert "-> memory-bound: 102% of copy" in text
    assert "reduce 2 4.0 1 0 % 80 % 24" in text
    assert "outside every range 1 2.0" in text
    console = quiet()
    show(console, read_nsys([NSYS]), {}, H200)
    assert " ".join(said(console).splitlines()[1].split()) == "call, and its kernels launches us"
    assert "->" not in said(console)


def test_a_call_of_many_kernels_is_cut_and_its_sum_is_not():
    console = quiet()
    show(console, together(Seen("c", f"k{i}", 1, 10.0 + i) for i in range(20)), {}, Limits())
    text = [" ".join(line.split()) for line in said(console).splitlines()]
    assert "c 20 390.0" in text
    assert "and 12 more 12 186.0" in text


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("softmax_kernel", "softmax_kernel"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::F<c10::BF16>, std::array<char*, 2ul> >(int, F)",
         "vectorized_elementwise_kernel"),
        ("void (anonymous namespace)::warp_forward<float, 10>(float*)", "(anonymous namespace)::warp_forward"),
        ("x" * 80, "x" * 53 + "..."),
    ],
)  # fmt: skip
def test_names_are_shortened(kernel, name):
    assert short(kernel) == name


def test_a_profile_of_nothing_fails_and_says_what_to_do(tmp_path):
    (tmp_path / "empty.csv").write_text("")
    console = quiet()
    assert show_profile(console, "ncu", tmp_path / "none.json", [tmp_path / "empty.csv"]) == 1
    assert "no kernel was captured" in said(console)
    assert "profiling/torch_profile.sh" in said(console)


def test_a_technique_that_failed_under_a_profiler_is_said(tmp_path):
    example = {"name": "softmax", "status": "failed", "reason": "RuntimeError: no\nmore", "profiled": {}}
    (tmp_path / "r.json").write_text(json.dumps({"examples": [example], "machine": {"mode": "cpu"}}))
    (tmp_path / "n.csv").write_text(NSYS)
    console = quiet()
    assert show_profile(console, "nsys", tmp_path / "r.json", [tmp_path / "n.csv"]) == 1
    assert "softmax failed: RuntimeError: no" in said(console)
    assert "softmax_kernel" in said(console)


def test_interpreted_kernels_get_no_rates(tmp_path):
    record = {
        "sizes": "interpreted",
        "examples": [{"name": "a", "status": "passed", "profiled": {"c": COPY}}],
    }
    (tmp_path / "r.json").write_text(json.dumps(record))
    (tmp_path / "names.json").write_text('{"1.json": "c"}')
    (tmp_path / "1.json").write_text(json.dumps(CPU_TRACE))
    console = quiet()
    assert show_profile(console, "torch", tmp_path / "r.json", [tmp_path]) == 0
    assert "Triton kernels are interpreted" in said(console)
    assert "TB/s" not in said(console)
    assert works_of(record) == {"c": COPY}
