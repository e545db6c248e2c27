"""What profilers and the sanitizer write, read back: sample texts in, rows and verdicts out."""

import io
import json

from harness.catalog import ROOT

import pytest
from rich.console import Console

from profiling import read as pr
from profiling.read import Limits, Seen, main, show_profile, techniques


def printed(show, *args, width=160, **options):
    """(what show(console, *args) returned, what it printed, its lines single-spaced)."""
    console = Console(file=io.StringIO(), width=width, highlight=False, **options)
    code, said = show(console, *args), console.file.getvalue()
    return code, said, [" ".join(line.split()) for line in said.splitlines()]


# --- which techniques, which kernels

KERNELS_FILE = """
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
"""


def test_the_kernels_of_a_technique_are_those_a_host_may_launch(tmp_path, capsys):
    path, docstring = tmp_path / "t.py", '"""T.\n\nQuestion   q?\nNeeds      torch\nVariants   t_more.py\n"""'
    path.write_text(f"{docstring}\n{KERNELS_FILE}")
    (tmp_path / "t_more.py").write_text("@triton.jit\ndef more_kernel(x): ...\n")
    assert pr.kernels_of(path) == ["tuned_kernel", "by_hand_kernel", "inner_kernel"]
    assert main(["kernels", str(path)]) == 0
    assert capsys.readouterr().out.split() == ["tuned_kernel", "by_hand_kernel", "inner_kernel", "more_kernel"]


# --- compute-sanitizer

HEAD, BAR = "========= COMPUTE-SANITIZER\n", "\n=========     "
WRITE = BAR.join([
    "========= Invalid __global__ write of size 4 bytes", "at scale_kernel+0x120 in debugging.py:188",
    "by thread (32,0,0) in block (0,0,0)", "Access to 0x7f3 is out of bounds\n",
])  # fmt: skip
OLD_WRITE = WRITE.replace("at scale_kernel+0x120 in debugging.py:188", "at 0x110 in /a/debugging.py:188:scale_kernel")
OURS = f"========= Uninitialized __global__ memory read of size 16 bytes{BAR}at scale_kernel+0x220\n"
LIBRARY = OURS.replace("scale_kernel", "void at::native::reduce_kernel<(int)512>(T3)")
RACE = f"========= Error: Race reported between Write access at scale_kernel+0x90 in m.py:12{BAR}and Read access at x\n"
PLACE = "Invalid __global__ write of size 4 bytes at scale_kernel+0x120 in debugging.py:188"
KERNELS = ["scale_kernel", "never_kernel"]


def summary(count, what="ERROR SUMMARY: {} errors"):
    return f"========= {what.format(count)}\n"


CLEAN = HEAD + summary(0)
RACES = "RACECHECK SUMMARY: {0} hazard displayed ({0} error, 0 warnings)"
NOT_PRINTED = summary(20, "ERROR SUMMARY: {} errors were not printed. Use --print-limit option to adjust the number")
NOT_STARTED = "Error: Target application terminated before first instrumented API call"


@pytest.mark.parametrize(
    ("log", "errors", "kernels", "refused"),
    [
        (HEAD + 2 * WRITE + summary(2), 2, {"scale_kernel": 2}, None),
        (HEAD + 2 * OLD_WRITE + summary(2), 2, {"scale_kernel": 2}, None),
        (HEAD + RACE + summary(1, RACES), 1, {"scale_kernel": 1}, None),
        (HEAD + summary(0, RACES), 0, {}, None),
        (HEAD + WRITE + summary(120) + NOT_PRINTED, 120, {"scale_kernel": 1}, None),
        (f"{HEAD}========= {NOT_STARTED}\n========= Tracking kernels requires an option.\n", 0, {}, NOT_STARTED),
        (HEAD + WRITE, 0, {}, "Access to 0x7f3 is out of bounds"),  # it did not come to its end
    ],
)
def test_a_log_of_the_sanitizer(log, errors, kernels, refused):
    found = pr.read_sanitizer(log, KERNELS)
    assert (found.errors, found.refused) == (errors, refused)
    assert {name: len(said) for name, said in found.by_kernel.items()} == kernels


def sanitized(tmp_path, tool, log, status="passed", reason=None, launches=None, record=True, ended="0 12"):
    """What show_sanitizer makes of what sanitize.sh leaves of one tool: what printed() returns."""
    left = {"log": log}
    if ended:
        left["status"] = f"{ended} {'all' if tool == 'initcheck' else 'ours'}\n"
    if record:
        left["json"] = json.dumps({"examples": [{"name": "scale", "status": status, "reason": reason}]})
        left["launches"] = json.dumps({"scale_kernel": 7, "elsewhere": 3} if launches is None else launches)
    for kind, text in left.items():
        (tmp_path / f"topic.{tool}.{kind}").write_text(text)
    return printed(pr.show_sanitizer, tmp_path / "topic", [tool], KERNELS)


PLACES = "".join(WRITE.replace(":188", f":{i}") for i in (188, *range(188, 198))) + summary(11)
LEFT = [  # tool, log, what else it left, whether that is a success, what is said
    ("memcheck", CLEAN, {}, True, ["1 passed 1 of 2 7 0 12 ", "not looked at: elsewhere", "looked at: never_kernel"]),
    ("initcheck", CLEAN, {}, True, ["initcheck 1 passed 1 of 2 7 0 12 ", "techniques: scale"]),
    ("initcheck", HEAD + 3 * LIBRARY + summary(3), {}, True, [" 0 3 12 ", "not in a kernel of ours: 3 printed"]),
    ("initcheck", HEAD + 2 * LIBRARY + OURS + summary(3), {}, False, [" 1 2 12 ", "scale_kernel: 1 printed"]),
    ("initcheck", HEAD + LIBRARY + summary(3), {}, True, ["initcheck: 2 of its 3 errors were not printed"]),
    ("memcheck", HEAD + WRITE + summary(1), {}, False, [f"scale_kernel: 1 printed, first: {PLACE}"]),
    ("memcheck", HEAD + PLACES, {}, False, [f"11 printed, first: {PLACE} 2 times: {PLACE} ", " and 2 other places"]),
    ("memcheck", HEAD + 3 * LIBRARY + summary(3), {}, False, ["not in a kernel of ours: 3 printed"]),
    ("memcheck", "", {"record": False}, False, ["did not come to its end: it wrote nothing"]),
    ("memcheck", HEAD, {"record": False, "ended": "124 300"}, False, ["stopped after 300 s; it wrote nothing"]),
    ("memcheck", HEAD, {"record": False, "ended": ""}, False, ["did not come to its end"]),  # sanitize.sh was stopped
    ("memcheck", CLEAN, {"record": False}, False, ["ended with status 0 before its first technique"]),
    ("memcheck", CLEAN, {"status": "failed", "reason": "CheckError: off\nx"}, False, ["scale failed: CheckError: off"]),
    ("memcheck", CLEAN, {"status": "running"}, False, ["scale failed: no reason"]),
    ("memcheck", CLEAN, {"launches": {}}, False, ["so not looked at: scale_kernel, never_kernel"]),
]


@pytest.mark.parametrize(("tool", "log", "left", "success", "says"), LEFT)
def test_what_is_found_or_not_done_is_no_success(tmp_path, tool, log, left, success, says):
    """initcheck looks at all kernels and blames ours alone."""
    clean, said, rows = sanitized(tmp_path, tool, log, **left)
    assert clean == success
    assert [text for text in says if text not in " ".join(rows)] == []
    assert tool != "initcheck" or "not looked at: elsewhere" not in said


# --- ncu, nsys, torch.profiler, Proton

RANGE = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
NCU_HEAD = (
    f'"ID","{RANGE}","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum",'
    '"launch__registers_per_thread","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",'
    '"sm__warps_active.avg.pct_of_peak_sustained_active"\n'
)
UNITS = '"","","","byte","byte","ns","register/thread","%","%"\n'


def ncu_row(call, kernel, *numbers):
    named = f'13416  ""<default domain>:{call}:none:none:none:none:none:none""' if call else ""
    return f'"0","{named}","{kernel}",' + ",".join(f'"{number}"' for number in numbers) + "\n"


SOFTMAX, CUBLAS = "softmax 8192x8192 bfloat16: triton, one pass", "matmul 8192: cuBLAS"
NCU = (
    "==PROF== Connected to process 42\n"
    + NCU_HEAD
    + UNITS
    + ncu_row(SOFTMAX, "softmax_kernel", "134,217,728", "134217728", "66000", 32, 0, 80)
    + ncu_row(CUBLAS, "nvjet", 300e6, 100e6, 1_000_000, 168, "90.5", "12.5")
    + ncu_row(CUBLAS, "reduce", 1e6, 1e6, 3000, 16, 0, 80)
    + ncu_row(CUBLAS, "reduce", 1e6, 1e6, 1000, 24, 0, 80)
    + ncu_row("", "fill", 0, 4, 2000, "n/a", "n/a", "n/a")
    + "==WARNING== something\n"
)


def test_ncu_is_read_by_call_and_kernel():
    softmax, nvjet, reduce, fill = pr.read_ncu(NCU)
    assert softmax == Seen(SOFTMAX, "softmax_kernel", 1, 66.0, 2 * 134217728, 0.0, 80.0, 32)
    assert nvjet == Seen(CUBLAS, "nvjet", 1, 1000.0, 400e6, 90.5, 12.5, 168)
    assert reduce == Seen(CUBLAS, "reduce", 2, 4.0, 4e6, 0.0, 80.0, 24)
    assert fill == Seen("", "fill", 1, 2.0, 4)
    outer = '13416  ""<default domain>:outer:none:none:none:none:none:none""  '
    row = ncu_row("inner: x", "k", "1.5", "2", "3000", 32, 0, 80).replace("13416  ", outer)
    assert pr.read_ncu(NCU_HEAD + UNITS + row) == [Seen("inner: x", "k", 1, 3.0, 3.5, 0.0, 80.0, 32)]
    for nothing in ("", "==ERROR== ERR_NVGPUCTRPERM\n", "==WARNING== No kernels were profiled.\n", NCU_HEAD):
        assert pr.read_ncu(nothing) == []


NSYS = """Processing [x.sqlite] with [nvtx_kern_sum.py]...
NVTX Range,Style,PID,TID,NVTX Inst,Kern Inst,Total Time (ns),Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Kernel Name
:softmax: triton,PushPop,42,42,1,2,66000,33000.0,33000.0,1,2,0.0,softmax_kernel
:softmax: triton,PushPop,42,42,1,1,1000,1000.0,1000.0,1,2,0.0,"void at::native::fill<int, float>(int)"

"""


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


def test_the_other_profilers_are_read_by_call_and_kernel(tmp_path):
    seen = pr.read_nsys([NSYS, "", NSYS.replace("softmax: triton", "softmax: torch")])
    assert [(one.call, one.launches, one.us) for one in seen] == [
        (f"softmax: {who}", launches, us) for who in ("triton", "torch") for launches, us in ((2, 66.0), (1, 1.0))
    ]
    kernel, copy = pr.read_trace(GPU_TRACE, "softmax")
    assert kernel == Seen("softmax", "softmax_kernel", 2, 80, None, None, 60.0, 40)
    assert copy == Seen("softmax", "Memcpy DtoD", 1, 5)
    assert {one.kernel: (one.launches, one.us) for one in pr.read_trace(CPU_TRACE, "x")} == {
        "aten::linear": (1, 20), "aten::addmm": (2, 42), "aten::copy_": (1, 8)
    }  # fmt: skip
    (tmp_path / "names.json").write_text(json.dumps({"1.json": "a: b", "gone.json": "d"}))
    (tmp_path / "1.json").write_text(json.dumps(GPU_TRACE))
    (tmp_path / "gone.json").write_text('{"traceEvents": []}')
    assert {one.call for one in pr.read_torch(tmp_path)} == {"a: b"}
    assert pr.read_torch(tmp_path / "nowhere") == []

    def node(name, *children, **metrics):
        return {"frame": {"name": name, "type": "function"}, "metrics": metrics, "children": list(children)}

    kernel = node("matmul_kernel", **{"count": 3, "time (ns)": 9000, "device_id": "0"})
    tree = [node("ROOT", node("matmul: triton", kernel), **{"time (ns)": 0}), {"CUDA": {"0": {"arch": "90"}}}]
    assert pr.read_proton(tree) == [Seen("matmul: triton", "matmul_kernel", 3, 9.0)]


# --- the table and what it says

H200 = Limits(4.0, {"bfloat16": 800.0})
COPY = {"bytes": 400_000_000, "flops": 0, "dtype": None, "steps": []}
GEMM = {"bytes": 1_000_000, "flops": 800_000_000_000, "dtype": "bfloat16", "steps": []}


@pytest.mark.parametrize(
    ("kernels", "work", "limits", "text"),
    [
        ([(110.0, 413.6e6, 0.0, 90.0)], COPY, H200, "memory-bound: 94% of copy"),
        ([(200.0, 800e6, 0.0, 90.0)], COPY, H200, "memory-bound: 100% of copy, 2.00x the least bytes"),
        ([(1250.0, 10e6, 85.0, 12.0)], GEMM, H200, "bound by the tensor cores: busy 85%, 80% of cuBLAS bfloat16"),
        ([(3.0, 1e6, 0.0, 5.0)], None, H200, "short: launching bounds it (8% of copy)"),
        (
            [(300.0, 300e6, 20.0, 10.0), (100.0, 100e6, 60.0, 50.0)], None, H200,
            "waiting: 25% of copy, tensor cores busy 30%, 20% of the warps",
        ),
        ([(100.0, 300e6, 7.0, 10.0)], None, Limits(), "3.00 TB/s of memory, tensor cores busy 7%"),
        ([(125.0,)], COPY, H200, "memory-bound by its work: 80% of copy"),
        ([(50.0,)], COPY, H200, "memory-bound by its work: 200% of copy, as L2 is warm here"),
        ([(2000.0,)], GEMM, H200, "bound by arithmetic by its work: 50% of cuBLAS bfloat16"),
        ([(2000.0,)], None, H200, ""),
        ([(2000.0,)], COPY, Limits(), ""),
        ([(0.0, 0.0)], COPY, H200, ""),
    ],
)  # fmt: skip
def test_the_verdict_is_of_the_numbers(kernels, work, limits, text):
    assert pr.verdict([Seen("c", "k", 1, *numbers) for numbers in kernels], work, limits) == text


def table(seen, works=None, limits=None, groups=None, **options):
    return printed(pr.show, seen, works or {}, limits or Limits(), groups or {}, "kernel", **options)[1:]


def test_the_table_has_the_columns_that_hold_something():
    groups = {SOFTMAX: "softmax", CUBLAS: "matmul"}
    work = {SOFTMAX: {"bytes": 268435456, "flops": 0, "dtype": None, "steps": []}}
    _, text = table(pr.read_ncu(NCU), work, H200, groups)
    assert text[1].endswith("kernel launches us TB/s tensor cores occupancy registers TB/s of work what that says")
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
    said, text = table(pr.read_nsys([NSYS]), limits=H200)
    assert (text[1], "->" in said) == ("case, and call kernel launches us", False)
    said, text = table(pr.read_ncu(NCU), limits=H200, groups=groups, width=60, force_terminal=True, color_system=None)
    assert max(map(len, said.splitlines())) <= 60, "a narrow terminal gets lines"
    assert "-> memory-bound: 102% of copy" in " ".join(text)


def test_a_call_of_many_kernels_is_cut_and_its_sum_is_not():
    text = table(pr.together(Seen("t: c", f"k{i}", 1, 10.0 + i) for i in range(20)))[1]
    assert "c 20 kernels 20 390.0" in text
    assert "and 18 more 18 333.0" in text
    calls = [f"t {i}: {name}" for i in range(16) for name in ("torch", "triton rows")]  # of many: ours alone
    text = table([Seen(call, kernel, 1, 1.0) for call in calls for kernel in ("first", "second")])[1]
    assert text.count("torch 2, most in first 2 2.0") == 16
    assert text.count("triton rows 2 kernels 2 2.0") == text.count("second 1 1.0") == 16


def test_names_are_shortened():
    for kernel, name in (
        ("void at::native::elementwise_kernel<4, at::native::F<c10::BF16>, S<2ul> >(int, F)", "elementwise_kernel"),
        ("void (anonymous namespace)::warp<float, 10>(float*)", "(anonymous namespace)::warp"),
        ("x" * 80, "x" * 53 + "..."),
    ):
        assert pr.short(kernel) == name


# --- a profile: of nothing, of what failed, in parts


def example(name, *calls, status="passed", reason=None, work=COPY):
    return {"name": name, "status": status, "reason": reason, "profiled": dict.fromkeys(calls, work)}


def parts(folder, *records, **more):
    """What ncu.sh leaves of one process after the other: a record and a table each."""
    written = []
    for i, (examples, text) in enumerate(records):
        record = folder / f"x.ncu{f'.{i + 1}' if i else ''}.json"
        record.write_text(json.dumps({"examples": examples, "machine": {"gpu": None}} | (more if not i else {})))
        record.with_suffix(".csv").write_text(text)
        written += [record, record.with_suffix(".csv")]
    return written[::2], written[1::2]


def test_every_technique_is_named_with_the_reason_why_it_is_not_there(tmp_path):
    failed, said, _ = printed(show_profile, "ncu", *parts(tmp_path, ([], "")))
    assert (failed, "no kernel was captured" in said) == (1, True)
    first = [example("softmax", SOFTMAX), example("debugging")]
    second = [
        example("matmul", CUBLAS), example("later", status="skipped", reason="needs sm_100"),
        example("wrong", status="failed", reason="RuntimeError: no\nmore"),
    ]  # fmt: skip
    records, tables = parts(tmp_path, (first, NCU.split('"matmul')[0]), (second, NCU), running="hangs")
    (tmp_path / "x.ncu.2.left").write_text(json.dumps({"matmul 4: b": "not at all: its technique's 9 s were spent"}))
    failed, said, rows = printed(show_profile, "ncu", records, tables)
    assert failed == 1
    for text in (
        "hangs failed: it ended the process, and the profile goes on after it", "later: not profiled: needs sm_100",
        "debugging: not profiled: it calls nothing under --profile", "wrong failed: RuntimeError: no\n",
        "matmul 4: b: profiled not at all: its technique's 9 s were spent",
    ):  # fmt: skip
        assert text in said
    assert {"softmax", "matmul"} <= set(rows)


def test_interpreted_kernels_get_no_rates(tmp_path):
    record = {"sizes": "interpreted", "examples": [example("a", "c")]}
    for name, text in {"r": record, "names": {"1.json": "c"}, "1": CPU_TRACE}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(text))
    failed, said, _ = printed(show_profile, "torch", [tmp_path / "r.json"], [tmp_path])
    assert (failed, "TB/s" in said, "are interpreted" in said) == (0, False, True)


def test_what_is_left_after_the_technique_that_ended_the_process(tmp_path):
    record, topic = tmp_path / "r.json", ROOT / "triton_fp8_advanced.py"
    names = [t.name for t in techniques(topic, [])]
    assert pr.rest(record, topic, []) == []  # no record at all: no second try
    record.write_text(json.dumps({"running": names[1], "examples": [example(names[0])]}))
    assert pr.rest(record, topic, []) == names[2:]
    assert pr.rest(record, topic, [names[4], names[1]]) == [names[4]]


def test_the_text_file_has_what_was_printed_and_what_it_is_of(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PROFILING_COMMAND", "profiling/ncu.sh triton_examples.py softmax --quick")
    monkeypatch.setenv("PROFILING_TOOL", "Nsight Compute 2025.3.1.0")
    monkeypatch.setattr(pr, "measured", lambda works: H200)
    machine = {"gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0", "triton": "3.6.0", "mode": "cpu"}
    run = {"when": "2026-11-22T01:02:03+00:00", "commit": "0123456789abcdef", "dirty": False, "machine": machine}
    ((record,), (csv,)) = parts(tmp_path, ([example("softmax", SOFTMAX) | run], NCU))
    assert main(["ncu", str(record), str(csv)]) == 0
    text, out = (tmp_path / "x.ncu.txt").read_text(), capsys.readouterr().out
    head = "2026-11-22, NVIDIA H200, driver 580.1, torch 2.11.0, Triton 3.6.0, Nsight Compute 2025.3.1.0, commit 012345"
    command, made, _, *body = text.splitlines()
    assert (command, made[: len(head) + 2]) == ("# profiling/ncu.sh triton_examples.py softmax --quick", f"# {head}")
    assert "\n".join(body) in out
    assert "measured here, now: copy 4.00 TB/s" in out
