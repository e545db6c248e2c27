"""profiling/*.sh as a reader runs them, with profilers that are made for the test; torch.profiler is the real one."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

from harness import Work, check
from harness.catalog import ROOT, read_topic
from harness.session import Harness

import pytest
import torch

from profiling.run import launches_counted, tuned_in_one_call

triton = pytest.importorskip("triton")
from triton.runtime.autotuner import Autotuner  # noqa: E402

from examples.common import device  # noqa: E402

SCRIPTS = sorted(path.name for path in (ROOT / "profiling").glob("*.sh") if path.name != "common.sh")
TOOLS = {"ncu.sh": "ncu", "nsys.sh": "nsys", "sanitize.sh": "compute-sanitizer"}
CALL = "softmax 4096x4096 bfloat16: triton"


@pytest.fixture
def profiling(tmp_path):
    """Run one of the scripts: profiling("ncu.sh", "triton_examples.py", "softmax", ncu="body of a fake in Python").

    A fake finds `argv` and `after(option)`; profiling.calls() are the arguments of each call of a fake.
    """

    def run(script, *args, cwd=ROOT, env=None, **fakes):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, body in fakes.items():
            path = folder / name.replace("_", "-")
            path.write_text(
                f"#!{sys.executable} -SE\nimport json, sys\nfrom pathlib import Path\nargv = sys.argv[1:]\n"
                "if argv == ['--version'] and not sys.argv[0].endswith('sanitizer'):\n"
                "    print('NVIDIA (R) A Profiler\\nVersion 2025.3.1.0 (build 1)')\n    sys.exit()\n"
                f"with open({str(tmp_path / 'calls')!r}, 'a') as calls:\n    calls.write(json.dumps(argv) + '\\n')\n"
                "def after(option):\n    return argv[argv.index(option) + 1]\n" + textwrap.dedent(body)
            )
            path.chmod(0o755)
        inherited = {k: v for k, v in os.environ.items() if k not in ("CUDA_HOME", "CUDA_PATH", "NCU", "NSYS")}
        environment = inherited | {
            "PATH": f"{folder}:/usr/bin:/bin", "PYTHON": sys.executable, "PROFILING_OUT": str(tmp_path / "out"),
        }  # fmt: skip
        return subprocess.run(
            [ROOT / "profiling" / script, *map(str, args)], cwd=cwd, env=environment | (env or {}),
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    run.calls = lambda: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    run.runs = lambda: [call for call in run.calls() if not {"--help", "--version"} & set(call)]
    run.out = tmp_path / "out"
    return run


def record():
    """What a profiled script writes with --json."""
    work = {"bytes": 67108864, "flops": 0, "dtype": None, "steps": []}
    example = {"name": "softmax", "status": "passed", "reason": None, "profiled": {CALL: work}}
    return {"machine": {"mode": "gpu"}, "examples": [example]}


def flat(text):
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


# --- all of them


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_is_a_program_that_says_its_usage(profiling, script):
    asked, done = profiling(script, "--help"), profiling(script, "nowhere.py")
    assert (asked.returncode, asked.stdout[:17]) == (0, "usage: profiling/")
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: nowhere.py: no such script\nusage: profiling/" in done.stderr


def test_wrong_usage_is_2_and_says_what_is_right(profiling):
    for script, args, complaint in (
        ("torch_profile.sh", "", r"which script\? One of: .*triton_examples\.py"),
        ("torch_profile.sh", "triton_examples.py sofmax", r"no technique 'sofmax'; did you mean softmax"),
        ("torch_profile.sh", "harness/catalog.py", "lists its technique files in TECHNIQUES"),
        ("torch_profile.sh", "triton_examples.py --fast", "unknown option --fast"),
        ("torch_profile.sh", "triton_examples.py --seed", "--seed needs a number"),
        ("ncu.sh", "--seconds soon", "--seconds needs a number"),
        ("sanitize.sh", "--seconds 0 triton_examples.py", "--seconds needs a number"),
        ("sanitize.sh", "--full triton_examples.py softmax", "only small sizes"),
        ("sanitize.sh", "--tool leakcheck triton_examples.py", "leakcheck is not a tool"),
    ):
        done = profiling(script, *args.split(), ncu=NCU, compute_sanitizer=sanitizer())
        assert (done.returncode, done.stdout) == (2, ""), (script, args)
        assert re.search(f"^error: .*{complaint}", done.stderr, re.M), done.stderr


@pytest.mark.parametrize("script", TOOLS)
def test_a_missing_profiler_is_one_line_with_a_way_and_an_alternative(profiling, script):
    if script != "sanitize.sh":  # one that is named and is not there
        variable = TOOLS[script].upper()
        done = profiling(script, "triton_examples.py", "softmax", env={variable: "/nowhere/tool"})
        assert (done.returncode, f"{variable}=/nowhere/tool: no such program" in done.stderr) == (1, True)
    if torch.cuda.is_available() or shutil.which(TOOLS[script], path="/usr/bin:/bin:/usr/local/cuda/bin"):
        pytest.skip(f"{TOOLS[script]} may be here, and would really profile")
    done = profiling(script, "triton_examples.py", "softmax")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert re.match(f"{TOOLS[script]} is not here: it .* Without it: ", done.stderr)


def test_a_python_without_torch_is_said(profiling, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    done = profiling("torch_profile.sh", "triton_examples.py", env={"PYTHON": str(bare), "PYTHONPATH": ""})
    assert done.returncode == 1
    assert "has no torch, or no rich" in done.stderr


# --- ncu and nsys

NCU_ROWS = (
    '"ID","thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg","Kernel Name",'
    '"dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum","launch__registers_per_thread"\n'
    '"","","","byte","byte","ns","register/thread"\n'
    f'"0","1  ""<default domain>:{CALL}:none:none:none:none:none:none""","softmax_kernel",'
    '"33554432","33554432","16000","32"\n'
)
NCU = f"""
if "--import" in argv:
    assert Path(after("--import")).exists()
    print({NCU_ROWS!r}, end="")
else:
    Path(after("--export")).touch()
    Path(after("--json")).write_text({json.dumps(record())!r})
"""


def test_ncu_sees_the_named_calls_alone_and_leaves_the_clocks(profiling):
    done = profiling("ncu.sh", "triton_examples.py", "softmax", "--quick", ncu=NCU)
    assert done.returncode == 0, done.stderr
    profile, export = profiling.calls()
    assert "--profile-from-start off --clock-control none" in " ".join(profile)
    assert "--section=Occupancy" in profile
    out = profiling.out / "triton_examples-softmax.ncu"
    script = f"{ROOT}/triton_examples.py softmax --profile --quick --json {out}.json"
    assert " ".join(profile).endswith(f"{sys.executable} -m profiling.run bounded {out}.left {script}")
    assert "--page raw --csv --print-units base" in " ".join(export)
    assert f"report: {out}-rep" in done.stdout
    assert "triton softmax_kernel 1 16.0 4.19 32" in flat(done.stdout)
    command, tool, *_ = (profiling.out / "triton_examples-softmax.ncu.txt").read_text().splitlines()
    assert command == "# profiling/ncu.sh triton_examples.py softmax --quick"
    assert "Nsight Compute 2025.3.1.0" in tool


HANGING = f"""
if "--import" in argv:
    print({NCU_ROWS!r}, end="")
else:  # it does not come back from softmax
    chosen = argv[argv.index("bounded") + 3 : argv.index("--profile")]
    hangs = "softmax" in chosen
    ended = ["vector_add"] if hangs else chosen
    examples = [{{"name": name, "status": "passed", "reason": None, "profiled": {{}}}} for name in ended]
    record = {{"machine": {{"mode": "gpu"}}, "running": "softmax" if hangs else None, "examples": examples}}
    Path(after("--export")).touch()
    Path(after("--json")).write_text(json.dumps(record))
"""


def test_ncu_goes_on_after_a_technique_that_it_does_not_come_back_from(profiling):
    """And --brief has no sections, --seconds is what a technique may take."""
    stem = profiling.out / "triton_examples-matmul-softmax-vector_add"
    args = ("--brief", "--seconds", "7", "triton_examples.py", "matmul", "softmax", "vector_add")
    done = profiling("ncu.sh", *args, ncu=HANGING)
    assert done.returncode == 1
    runs = [call for call in profiling.calls() if "--profile" in call]
    assert [run[run.index("bounded") + 3 : run.index("--profile")] for run in runs] == [
        ["matmul", "softmax", "vector_add"], ["matmul"]
    ]  # fmt: skip
    assert [run[run.index("--export") + 1] for run in runs] == [f"{stem}.ncu-rep", f"{stem}.2.ncu-rep"]
    assert not [arg for arg in runs[0] if arg.startswith("--section")]
    assert "dram__bytes_read.sum" in runs[0][runs[0].index("--metrics") + 1]
    assert "PROFILING_SECONDS=7" in done.stderr
    assert "softmax failed: it ended the process, and the profile goes on after it" in done.stdout
    assert "matmul: not profiled: it calls nothing" in done.stdout


MANY = '''"""Calls made for a test.

Question   do they end?
Needs      torch
"""
import time
from harness import Work, run


def demo(h):
    x = h.randn(8)
    variants = {f"torch {i}": lambda x: (time.sleep(SLEEP), x + 1)[1] for i in range(4)}
    h.compare(variants, lambda x: x + 1, x, baseline="torch 0", work=Work(bytes=8, flops=8, dtype=x.dtype))


if __name__ == "__main__":
    run(demo)
'''


def test_a_technique_has_so_many_seconds_and_a_call_that_does_not_come_back_ends_the_process(tmp_path, cli):
    script, left, path = (tmp_path / name for name in ("made.py", "left", "r.json"))
    for sleep, status in ((0.3, 0), (1.5, 1)):
        script.write_text(MANY.replace("SLEEP", str(sleep)))
        args = ("bounded", left, script, "--profile", "--json", path)
        done = cli(("-m", "profiling.run"), *args, PROFILING_SECONDS="0.5")
        assert (done.returncode, "Timeout" in done.stderr) == (status, status == 1), done.stderr
        held = json.loads(path.read_text())
        if status:  # it is known by its record
            assert held["running"] == "made"
        else:
            said = "not at all: its technique's 0.5 s were spent"
            assert json.loads(left.read_text()) == {f"made 8 float32: torch {i}": said for i in (2, 3)}


NSYS_ROWS = (
    "NVTX Range,Style,PID,TID,NVTX Inst,Kern Inst,Total Time (ns),Avg (ns),Kernel Name\n"
    ":{},PushPop,4,4,1,1,16000,16000.0,softmax_kernel\n"
)
NSYS = f"""
if argv[0] == "stats":
    print({NSYS_ROWS!r}.format(Path(argv[-1]).read_text()), end="")
else:
    for i, call in enumerate(({CALL!r}, "another")):
        Path(f"{{after('--output')}}.{{i + 1}}.nsys-rep").write_text(call)
    Path(after("--json")).write_text({json.dumps(record())!r})
"""


def test_nsys_has_a_report_for_each_call_and_one_table(profiling):
    profiling.out.mkdir()
    (profiling.out / "triton_examples-softmax.nsys.9.nsys-rep").write_text("of an earlier run")
    done = profiling("nsys.sh", "triton_examples.py", "softmax", nsys=NSYS)
    assert done.returncode == 0, done.stderr
    assert "--capture-range cudaProfilerApi --capture-range-end repeat" in " ".join(profiling.calls()[0])
    assert f"reports: {profiling.out}/triton_examples-softmax.nsys*.nsys-rep (2)" in done.stdout
    assert "triton softmax_kernel 1 16.0 4.19" in flat(done.stdout)
    assert "another softmax_kernel 1 16.0" in flat(done.stdout)


# --- torch.profiler and Proton


def test_torch_profiler_writes_a_trace_for_each_call(profiling, tmp_path):
    (tmp_path / "made.py").write_text(MANY.replace("SLEEP", "0"))
    done = profiling("profile_pytorch.sh", "made.py", cwd=tmp_path)  # a path as the shell completes it, from any folder
    assert done.returncode == 0, done.stdout + done.stderr
    folder = profiling.out / "made.torch"
    assert f"traces: {folder}/" in done.stdout
    names = json.loads((folder / "names.json").read_text())
    assert list(names.values()) == [f"made 8 float32: torch {i}" for i in range(4)]
    for file in names:
        events = json.loads((folder / file).read_text())["traceEvents"]
        assert sum(e["name"] == "aten::add" for e in events) == 1  # one call, and not those that warmed it
    assert re.search(r"^made 8 float32\ntorch 0 \d+ operators (?s:.*)^aten::add 1 ", flat(done.stdout), re.M)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_proton_without_a_gpu_says_so(profiling):
    done = profiling("proton.sh", "triton_examples.py", "vector_add")
    assert (done.returncode, "error: Proton profiles kernels on a GPU, and none is here" in done.stderr) == (1, True)


@pytest.mark.gpu
def test_proton_torch_and_the_counts_of_launches_see_the_kernels_of_a_gpu(profiling, tmp_path, cli):
    for script in ("proton.sh", "torch_profile.sh"):
        done = profiling(script, "triton_examples.py", "vector_add", "--quick")
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(r"add_kernel .*memory-bound by its work: \d+% of copy", done.stdout)
    args = ("launches", tmp_path / "launches", ROOT / "triton_examples.py", "vector_add", "--quick", "--check-only")
    assert cli(("-m", "profiling.run"), *args).returncode == 0
    assert json.loads((tmp_path / "launches").read_text())["vector_add_kernel"] >= 5


# --- compute-sanitizer

SANITIZER = f"""
if "--help" in argv:
    print("  --check-bulk-copy arg (=yes)  ... HELP")
    sys.exit()
if "--version" in argv:
    print("NVIDIA (R) Compute Sanitizer\\nVersion YEAR.3.1.0")
    sys.exit()
tool = after("--tool")
launches = argv[argv.index("profiling.run") + 2]
kernels = [a.split("=")[1] for a in argv if a.startswith("kernel_name=")] or ["softmax_rows_kernel"]
Path(launches).write_text(json.dumps(dict.fromkeys(kernels, 5)))
Path(after("--json")).write_text({json.dumps(record())!r})
error = "Invalid __global__ read of size 4 bytes\\n=========     at softmax_rows_kernel+0x20 in s.py:41\\n========= "
found = tool in FOUND
summary = "RACECHECK SUMMARY: %d hazard displayed" if tool == "racecheck" else "ERROR SUMMARY: %d errors"
log = "========= COMPUTE-SANITIZER\\n========= " + (error if found else "") + summary % found + "\\n"
Path(after("--log-file")).write_text(log)
sys.exit(99 if found else 0)
"""


def sanitizer(*found, year=2025):
    return f"FOUND = {found!r}\n" + SANITIZER.replace("YEAR", str(year))


def test_sanitize_runs_all_tools_over_the_kernels_of_the_technique(profiling):
    done = profiling("sanitize.sh", "triton_examples.py", "softmax", compute_sanitizer=sanitizer())
    assert done.returncode == 0, done.stdout + done.stderr
    runs = profiling.runs()
    assert [run[run.index("--tool") + 1] for run in runs] == ["memcheck", "racecheck", "initcheck", "synccheck"]
    for run in runs:
        tool, line = run[run.index("--tool") + 1], " ".join(run)
        assert "--target-processes application-only --launch-timeout 0" in line
        assert ("kernel_name=softmax_rows_kernel" in run) == (tool != "initcheck")
        watcher = "unguarded" if tool in ("memcheck", "initcheck") else "launches"
        assert f"{sys.executable} -m profiling.run {watcher} " in line
        assert "--check-only --quick --json" in line
        assert f"{tool} 1 passed " in flat(done.stdout)
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING=1" in done.stderr
    assert done.stderr.count("pip install -U nvidia-cuda-sanitizer-api") == 1, "an old racecheck is not to be believed"


def test_tools_that_run_at_the_same_time_end_alone_and_one_finding_fails(profiling):
    slow = "import time\ntime.sleep(30 * (after('--tool') == 'racecheck'))\ntool = after"
    fake = sanitizer("memcheck", year=2026).replace("tool = after", slow)
    args = ("--parallel", "--seconds", 2, "--tool", "memcheck,racecheck,synccheck", "triton_examples.py", "softmax")
    done = profiling("sanitize.sh", *args, compute_sanitizer=fake)
    assert done.returncode == 1
    runs = profiling.runs()
    assert len({run[run.index("--port") + 1] for run in runs}) == 3
    said = flat(done.stdout)
    assert "memcheck: softmax_rows_kernel: 1 printed, first: Invalid __global__ read" in said
    assert "synccheck 1 passed " in said
    assert re.search(r"racecheck: did not come to its end: stopped after \d+ s; it wrote nothing", said)
    assert "pip install" not in done.stderr
    text = (profiling.out / "triton_examples-softmax.sanitize.txt").read_text()
    assert re.match("# profiling/sanitize.sh --parallel --seconds 2 --tool memcheck,.*\n# .*Compute Sanitizer", text)
    assert str(profiling.out) not in text


def test_sanitize_looks_at_all_kernels_when_it_is_told_to_and_uses_what_a_newer_tool_knows(profiling):
    args = ("--all-kernels", "--tool=memcheck,", "triton_examples.py", "softmax")  # a comma too many is understood
    done = profiling("sanitize.sh", *args, compute_sanitizer=sanitizer("racecheck"))
    assert (done.returncode, "--kernel-name" in done.stderr) == (0, False), done.stdout + done.stderr
    newer = sanitizer().replace("HELP", "--initcheck-track-filtered-global-memory arg (=yes)")
    done = profiling("sanitize.sh", "--tool=initcheck", "triton_examples.py", "softmax", compute_sanitizer=newer)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kernel_name=softmax_rows_kernel" in profiling.runs()[-1]


@pytest.mark.parametrize("guarded", [True, False])
def test_a_sanitizer_meets_memory_that_is_not_poisoned_and_the_smallest_sizes(tmp_path, guarded):
    h = Harness("made", timing=False)
    with launches_counted(tmp_path / "launches", guarded=guarded), check.poisoned_outputs("x"):
        made = torch.empty(1000)
        assert h.codegen(torch.add, find={90: ("wgmma",)}) == [], "that compiles for minutes, and launches nothing"
        assert device.FEW_SMS
        assert h.pick(quick=4096, full=8192, interpreted=160) == 160
        variants = {"torch": torch.neg, "torch.compile": None, "triton": torch.neg}
        work = Work(bytes=24)
        table = h.compare(variants, lambda x: -x.double(), h.randn(3), baseline="torch", work=work, terms=0)
        assert [row.variant for row in table.rows] == ["triton"], "what others generate takes minutes"
    assert (h.shows_code, device.FEW_SMS) == (True, None)
    assert (made.untyped_storage().nbytes() > 4000) == guarded
    with check.poisoned_outputs("x"):
        assert torch.empty(8).isnan().all()


def test_autotuners_call_each_configuration_once_and_leave_no_timings(monkeypatch):
    """Under a sanitizer: its hundreds of launches took minutes there, and the next run would believe their times."""
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    with tuned_in_one_call():
        assert triton.testing.do_bench(lambda: calls.append("config"), rep=2) == 1.0
        assert triton.testing.do_bench_cudagraph(lambda: calls.append("config"), quantiles=(0.5, 0.2)) == [1.0] * 2
        assert Autotuner.check_disk_cache(None, (1,), [], lambda: calls.append("searched")) is False
    assert calls == [*["config", "wait"] * 2, "searched"]


def test_launches_are_counted_and_the_script_keeps_its_status(tmp_path, cli):
    script, out = tmp_path / "made.py", tmp_path / "launches"
    script.write_text("import sys\nprint(sys.argv)\nsys.exit(7)\n")
    done = cli(("-m", "profiling.run"), "launches", out, script, "--quick")
    assert done.returncode == 7
    assert "made.py', '--quick']" in done.stdout
    assert json.loads(out.read_text()) == {}


# --- the samples of a GPU

FOLDER = ROOT / "results/h200/profiles"
SAMPLES = re.findall(r"^[|] `(.*?)` [|]", (FOLDER / "README.md").read_text(), re.M)


def test_samples_are_listed():
    assert sorted(SAMPLES) == sorted(path.name for path in FOLDER.glob("*.txt"))
    assert len(SAMPLES) == 8


# Newer than the samples of their topic; a sample that has one is to be without this list.
NOT_PROFILED_YET = {
    "skinny_matmul", "weight_only_matmul", "grouped_matmul", "rms_norm", "decode_attention", "cross_entropy",
    "llama_block",
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_names_its_command_its_machine_and_every_technique(name):
    topic, kind, _ = name.split(".")
    command, made, _, *body = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    script = {"torch": "torch_profile"}.get(kind, kind)
    assert re.fullmatch(rf"# profiling/{script}\.sh (?:.* )?{topic}\.py(?: .*)?", command)
    assert re.match(r"# 20\d\d-\d\d-\d\d, NVIDIA H200, driver [\d.]+, torch 2\S+, Triton 3\S+, .*commit \w{12}$", made)
    for technique in read_topic(ROOT / f"{topic}.py").techniques:
        named = re.search(rf"^ ?(?:techniques: .*)?\b{technique.name}\b", "\n".join(body), re.M)
        assert bool(named) == (technique.name not in NOT_PROFILED_YET), technique.name
    assert not re.search(r"(?<![\w.)])/\w[\w.-]*/", "\n".join(body)), "the path of a machine"


def test_the_samples_at_the_limit_are_of_full_sizes():
    for path in (FOLDER / "at_the_limit").iterdir():
        command, made, *body = path.read_text(encoding="utf-8").splitlines()
        names = re.fullmatch(rf"# profiling/ncu\.sh .* {path.name.split('.')[0]}\.py (.*) --full", command)[1].split()
        assert "NVIDIA H200" in made
        assert all(any(line.strip() == name for line in body) for name in names)
        assert not re.search(r"(?<![\w.)])/\w[\w.-]*/", "\n".join(body)), "the path of a machine"
