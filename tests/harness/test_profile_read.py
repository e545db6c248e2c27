"""What profilers and the sanitizer write, read back: sample texts in, rows and verdicts out."""

import io
import json
import textwrap

from harness.catalog import ROOT, CatalogError
from harness.profile_read import (
    Limits,
    Seen,
    agreement,
    kernels_of,
    main,
    read_ncu,
    read_nsys,
    read_proton,
    read_sanitizer,
    read_torch,
    read_trace,
    rest,
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
            "memory-bound: 100% of copy, 2.00x the least bytes",
        ),
        (
            [Seen("c", "k", 1, 1250.0, 10e6, 85.0, 12.0)], GEMM, H200,
            "bound by the tensor cores: busy 85%, 80% of cuBLAS bfloat16",
        ),
        (
            [Seen("c", "k", 1, 3.0, 1e6, 0.0, 5.0)], None, H200,
            "short: launching bounds it (8% of copy)",
        ),
        (
            [Seen("c", "k", 1, 300.0, 300e6, 20.0, 10.0), Seen("c", "l", 1, 100.0, 100e6, 60.0, 50.0)], None, H200,
            "waiting: 25% of copy, tensor cores busy 30%, 20% of the warps",
        ),
        (
            [Seen("c", "k", 1, 100.0, 300e6, 7.0, 10.0)], None, Limits(),
            "3.00 TB/s of memory, tensor cores busy 7%",
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


def rows_of(console):
    return [" ".join(line.split()) for line in said(console).splitlines()]


def test_the_table_has_the_columns_that_hold_something():
    console = quiet()
    groups = {SOFTMAX: "softmax", "matmul 8192: cuBLAS": "matmul"}
    work = {SOFTMAX: {"bytes": 268435456, "flops": 0, "dtype": None, "steps": []}}
    show(console, read_ncu(NCU), work, H200, groups)
    heads = "case, and call kernel launches us TB/s tensor cores occupancy registers TB/s of work what that says"
    text = rows_of(console)
    assert text[1] == heads
    assert text[text.index("softmax") :] == [
        "softmax",
        "softmax 8192x8192 bfloat16",
        "triton, one pass softmax_kernel 1 66.0 4.07 0 % 80 % 32 4.07 memory-bound: 102% of copy",
        "matmul",
        "matmul 8192",
        "cuBLAS 2 kernels 3 1004.0 0.402 bound by the tensor cores: busy 90%",
        "nvjet 1 1000.0 0.4 90 % 12 % 168",
        "reduce 2 4.0 1 0 % 80 % 24",
        "outside every range fill 1 2.0 0 short: launching bounds it (0% of copy)",
        "",
    ]  # fmt: skip
    console = quiet()
    show(console, read_nsys([NSYS]), {}, H200)
    assert rows_of(console)[1] == "case, and call kernel launches us"
    assert "->" not in said(console)


def test_a_case_stands_once_above_its_calls_and_variants_keep_their_colons():
    console = quiet()
    seen = [Seen(f"copy {case}: {name}", "k", 1, 1.0) for case in ("8x8", "9x9") for name in ("a", "b")]
    show(console, seen, {}, Limits())
    assert rows_of(console)[3:-1] == ["copy 8x8", "a k 1 1.0", "b k 1 1.0", "copy 9x9", "a k 1 1.0", "b k 1 1.0"]


def test_a_call_of_many_kernels_is_cut_and_its_sum_is_not():
    console = quiet()
    show(console, together(Seen("t: c", f"k{i}", 1, 10.0 + i) for i in range(20)), {}, Limits())
    text = rows_of(console)
    assert "c 20 kernels 20 390.0" in text
    assert "and 18 more 18 333.0" in text


def test_a_table_of_many_calls_has_the_kernels_of_ours_alone():
    console = quiet()
    calls = [f"t {i}: {name}" for i in range(16) for name in ("torch", "triton rows")]
    show(console, [Seen(call, kernel, 1, 1.0) for call in calls for kernel in ("first", "second")], {}, Limits())
    text = rows_of(console)
    assert text.count("torch 2, most in first 2 2.0") == 16
    assert text.count("triton rows 2 kernels 2 2.0") == text.count("second 1 1.0") == 16


def test_a_narrow_terminal_gets_lines():
    console = Console(
        file=io.StringIO(), width=60, highlight=False, force_terminal=True, no_color=True, color_system=None
    )
    show(console, read_ncu(NCU), {}, H200, {SOFTMAX: "softmax"})
    assert max(map(len, said(console).splitlines())) <= 60
    text = " ".join(said(console).split())
    assert "triton, one pass softmax_kernel: launches 1, us 66.0, TB/s 4.07, tensor cores 0 %" in text
    assert "-> memory-bound: 102% of copy" in text


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
    assert show_profile(console, "ncu", [tmp_path / "none.json"], [tmp_path / "empty.csv"]) == 1
    assert "no kernel was captured" in said(console)
    assert "profiling/torch_profile.sh" in said(console)


def test_a_technique_that_failed_under_a_profiler_is_said(tmp_path):
    example = {"name": "softmax", "status": "failed", "reason": "RuntimeError: no\nmore", "profiled": {}}
    (tmp_path / "r.json").write_text(json.dumps({"examples": [example], "machine": {"mode": "cpu"}}))
    (tmp_path / "n.csv").write_text(NSYS)
    console = quiet()
    assert show_profile(console, "nsys", [tmp_path / "r.json"], [tmp_path / "n.csv"]) == 1
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
    assert show_profile(console, "torch", [tmp_path / "r.json"], [tmp_path]) == 0
    assert "Triton kernels are interpreted" in said(console)
    assert "TB/s" not in said(console)
    assert works_of(record) == {"c": COPY}


# --- techniques that are not in the profile, and a profile in parts


def example(name, *calls, status="passed", reason=None, work=COPY):
    return {"name": name, "status": status, "reason": reason, "profiled": dict.fromkeys(calls, work)}


def parts(folder, *records):
    """What ncu.sh leaves of one process after the other: a record and a table each."""
    written = []
    for i, (examples, text) in enumerate(records):
        record = folder / f"x.ncu{f'.{i + 1}' if i else ''}.json"
        record.write_text(json.dumps({"examples": examples, "machine": {"gpu": None}}))
        record.with_suffix(".csv").write_text(text)
        written += [record, record.with_suffix(".csv")]
    return written[::2], written[1::2]


def test_every_technique_is_named_with_the_reason_why_it_is_not_there(tmp_path):
    first = [example("softmax", SOFTMAX), example("debugging"), example("hangs", status="running")]
    second = [example("matmul", "matmul 8192: cuBLAS"), example("later", status="skipped", reason="needs sm_100")]
    records, tables = parts(tmp_path, (first, NCU.split('"matmul')[0]), (second, NCU))
    (tmp_path / "x.ncu.2.left").write_text(json.dumps({"matmul 4: b": "not at all: its technique's 9 s were spent"}))
    console = quiet()
    assert show_profile(console, "ncu", records, tables) == 1
    text = said(console)
    assert "hangs failed: it ended the process, and the profile goes on after it" in text
    assert "debugging: not profiled: it calls nothing under --profile" in text
    assert "later: not profiled: needs sm_100" in text
    assert "matmul 4: b: profiled not at all: its technique's 9 s were spent" in text
    assert {"softmax", "matmul"} <= set(rows_of(console))


def test_what_is_left_after_the_technique_that_ended_the_process(tmp_path):
    record, topic = tmp_path / "r.json", ROOT / "triton_fp8_advanced.py"
    names = [t.name for t in techniques(topic, [])]
    assert rest(record, topic, []) == []  # no record at all: no second try
    record.write_text(json.dumps({"examples": [example(names[0]), example(names[1], status="running")]}))
    assert rest(record, topic, []) == names[2:]
    assert rest(record, topic, [names[4], names[1]]) == [names[4]]
    record.write_text(json.dumps({"examples": [example(name) for name in names]}))
    assert rest(record, topic, []) == []


def test_the_text_file_has_what_was_printed_and_what_it_is_of(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PROFILING_COMMAND", "profiling/ncu.sh triton_examples.py softmax --quick")
    monkeypatch.setenv("PROFILING_TOOL", "Nsight Compute 2025.3.1.0")
    machine = {"gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0", "triton": "3.6.0", "mode": "cpu"}
    record = {"when": "2026-11-22T01:02:03+00:00", "commit": "0123456789abcdef", "dirty": False, "machine": machine}
    (tmp_path / "x.ncu.json").write_text(json.dumps(record | {"examples": [example("softmax", SOFTMAX)]}))
    (tmp_path / "x.ncu.csv").write_text(NCU)
    monkeypatch.setattr("harness.profile_read.measured", lambda works: H200)
    assert main(["ncu", str(tmp_path / "x.ncu.json"), str(tmp_path / "x.ncu.csv")]) == 0
    text, out = (tmp_path / "x.ncu.txt").read_text(), capsys.readouterr().out
    assert text.splitlines()[:3] == [
        "# profiling/ncu.sh triton_examples.py softmax --quick",
        "# 2026-11-22, NVIDIA H200, driver 580.1, torch 2.11.0, Triton 3.6.0, Nsight Compute 2025.3.1.0, "
        "commit 0123456789ab",
        "",
    ]  # fmt: skip
    body = "\n".join(text.splitlines()[3:])
    assert body in out
    assert "measured here, now: copy 4.00 TB/s" in body
    assert f"table: {tmp_path}/x.ncu.txt" in out


# --- ncu beside compare


def timings(**of_ceiling):
    """A record of a run on a GPU that copies 4 TB/s, each call 100 us."""
    rows = [{"variant": v, "ms": 0.1, "of_ceiling": share} for v, share in of_ceiling.items()]
    table = {"title": "copy", "case": "8x8", "rows": rows}
    machine = {"gpu": "NVIDIA H200", "ceilings": {"copy_tbps": 4.0, "gemm_tflops": {"bfloat16": 800.0}}}
    return {"machine": machine, "when": "2026-11-22T00:00:00", "examples": [{"name": "copy", "comparisons": [table]}]}


@pytest.mark.parametrize(
    ("us", "moved", "apart", "why"),
    [
        (100.0, 400e6, 0.0, ""),
        (98.0, 392e6, 0.0, ""),
        (96.0, 400e6, 1 / 0.96 - 1, ""),
        (100.0, 800e6, 1.0, "it moves 2.00x the least bytes"),
        (100.0, 360e6, -0.1, "10% of the least bytes stay in L2"),
        (80.0, 400e6, 0.25, "timed 1.25x as long: what is before its launches, and L2 written back"),
        (125.0, 400e6, -0.2, "1.25x as long under ncu"),
        (
            80.0, 600e6, 0.875,
            "it moves 1.50x the least bytes; timed 1.25x as long: what is before its launches, and L2 written back",
        ),
        (97.6, 410e6, 410 / 400 / 0.976 - 1, "several small differences"),
    ],
)  # fmt: skip
def test_what_ncu_counts_agrees_with_what_was_timed_or_says_why_not(us, moved, apart, why):
    found, left = agreement(timings(ours=1.0), {"copy 8x8: ours": COPY}, [Seen("copy 8x8: ours", "k", 1, us, moved)])
    assert not left
    assert found[0].apart == pytest.approx(apart)
    assert found[0].why == why
    assert found[0].counted / found[0].timed == pytest.approx(found[0].bytes * found[0].time)


def test_what_memory_does_not_bound_is_left_out_of_the_agreement():
    seen = [Seen(f"copy 8x8: {v}", "k", 1, 100.0, 1e6) for v in ("gemm", "model", "other", "empty")]
    seen.append(Seen("copy 8x8: unknown", "k", 1, 100.0))
    works = {
        "copy 8x8: gemm": GEMM,
        "copy 8x8: model": COPY | {"steps": [[1, 1]]},
        "copy 8x8: other": COPY,
        "copy 8x8: empty": COPY | {"bytes": 0},
        "copy 8x8: unknown": COPY,
    }
    found, left = agreement(timings(gemm=0.9, model=0.9, empty=0.9, unknown=0.9), works, seen)
    assert found == []
    assert left == {
        "bound by arithmetic": 1, "without a number of bytes": 2, "not timed at this size in the reference": 1,
        "without counted bytes": 1,
    }  # fmt: skip


def test_the_agreement_is_printed_from_files_alone(tmp_path, capsys):
    call = "copy 8x8: ours"
    rows = ncu_row(call, "copy_kernel", 200e6, 200e6, "100000")
    records, tables = parts(tmp_path, ([example("copy", call)], NCU_HEAD + UNITS + rows))
    (tmp_path / "reference.json").write_text(json.dumps(timings(ours=0.9)))
    assert main(["agree", *map(str, (tmp_path / "reference.json", *records, *tables))]) == 0
    text = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "copy 8x8: ours 90.0% 100.0% 1.111 1.000 1.000 several small differences" in text
    assert (
        "0 of 1 calls agree within 5% with reference.json, of NVIDIA H200, 2026-11-22, as shares of its copy"
        in " ".join(text)
    )
    (tmp_path / "cpu.json").write_text(json.dumps({"machine": {"ceilings": {}}, "examples": []}))
    console = quiet()
    assert show_profile(console, "ncu", records, tables, tmp_path / "cpu.json") == 0
    assert "cpu.json has no timings of a GPU to agree with" in said(console)


def test_findings_at_several_places_are_counted(sanitized):
    reads = [WRITE.replace("+0x120 in debugging.py:188", f"+0x{i}0 in debugging.py:{i}") for i in range(1, 11)]
    log = HEAD + "".join([reads[0], *reads]) + "========= ERROR SUMMARY: 11 errors\n"
    console = quiet()
    assert not show_sanitizer(console, sanitized("memcheck", log), ["memcheck"], KERNELS)
    assert "scale_kernel: 11 printed, first: Invalid __global__ write of size 4 bytes at scale_kernel+0x10" in said(
        console
    )
    assert "    2 times: Invalid __global__ write of size 4 bytes at scale_kernel+0x10 in debugging.py:1\n" in said(
        console
    )
    assert "    and 2 other places" in said(console)
    assert "techniques: scale" in said(console)


def test_a_tool_that_was_stopped_says_after_how_long(sanitized):
    out = sanitized("racecheck", HEAD, record=False)
    (out.parent / "topic.racecheck.status").write_text("124 300 ours\n")
    console = quiet()
    assert not show_sanitizer(console, out, ["racecheck"], KERNELS)
    assert "racecheck did not come to its end: stopped after 300 s; it wrote nothing" in said(console)
    (out.parent / "topic.racecheck.status").unlink()  # the script itself was stopped
    assert not show_sanitizer(quiet(), out, ["racecheck"], KERNELS)
