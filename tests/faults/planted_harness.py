"""Faults of the harness: each makes a check, a table or a record say what is not so."""

from . import Fault

CLI = "tests/harness/test_cli.py::"
BENCH = "tests/harness/test_bench.py"

FAULTS = [
    # check
    Fault(
        "harness/check",
        "2 * zero_passes > counted",
        "zero_passes > 2 * counted",
        "a budget that zeros pass is not refused",
    ),
    Fault(
        "harness/check",
        "2 * mean_passes > mean_candidates",
        "mean_passes > 2 * mean_candidates",
        "a budget that the mean passes is not refused",
    ),
    Fault("harness/check", "if broken := mode.broken_canaries():", "if broken := 0:", "nobody looks at the canaries"),
    Fault(
        "harness/check",
        "torch.full((padded + 2 * GUARD,), POISON,",
        "torch.full((padded + 2 * GUARD,), 0,",
        "outputs are zeros and not poison",
    ),
    Fault(
        "harness/check",
        "relative = 2 * info.eps + roundings * _eps(acc)",
        "relative = 16 * info.eps + roundings * _eps(acc)",
        "the budget is eight times as wide",
    ),
    Fault(
        "harness/check",
        "if got.dtype is not dtype:",
        "if False:",
        "an output of another dtype is let through",
        within="judge",
    ),
    Fault(
        "harness/check",
        "if copy is not None and not torch.equal(_bits(x), _bits(copy)):",
        "if False:",
        "a call that writes to its input is let through",
    ),
    Fault(
        "harness/check",
        "ratio = torch.where(excused, 0.0, ratio).nan_to_num_(nan=math.inf, posinf=math.inf)",
        "ratio = torch.where(excused, 0.0, ratio).nan_to_num_(nan=0.0, posinf=math.inf)",
        "a NaN counts as right",
    ),
    # compare
    Fault(
        "harness/compare",
        "statistics.median(base / own for base, own in pairs)",
        "statistics.median(own / base for base, own in pairs)",
        "the speed-up is upside down",
        tests=(BENCH,),
    ),
    Fault(
        "harness/compare",
        "zip(medians[table.baseline], medians[row.variant], strict=True)",
        "zip(medians[names[-1]], medians[row.variant], strict=True)",
        "the last row is the baseline",
        tests=(BENCH,),
    ),
    Fault(
        "harness/compare",
        "return not variant.startswith(LIBRARIES)",
        "return not variant.startswith(LIBRARIES[:2])",
        "a library's rows count as this repository's",
        tests=(BENCH,),
    ),
    Fault(
        "harness/compare",
        "return max(times, default=None)",
        "return min(times, default=None)",
        "the floor is the faster of memory and arithmetic",
        tests=(BENCH,),
    ),
    Fault(
        "harness/compare",
        "rewind()\nif seconds is not None:",
        "if seconds is not None:",
        "a variant does not find the random state that its reference finds",
        tests=(BENCH,),
    ),
    Fault(
        "harness/compare",
        "if error > 1:",
        "if error > 1000:",
        "a variant far from the baseline's error is let through",
        tests=(BENCH,),
    ),
    # codegen, and what asks for it
    Fault(
        "harness/session",
        "if not any(kernel.found.get(name) for kernel in compiled):",
        "if not compiled:",
        "a missing instruction is accepted",
    ),
    Fault(
        "harness/codegen",
        "value.dtype, value.storage_offset()",
        "value.dtype, 0",
        "a view is compiled as if it were aligned",
    ),
    Fault(
        "harness/codegen",
        "self.shared > self.shared_limit",
        "self.shared > 2 * self.shared_limit",
        "a program that takes too much shared memory is said to fit",
    ),
    Fault(
        "harness/codegen",
        "max(map(int, registers)), sum(map(int, spills))",
        "max(map(int, registers)), 0 * sum(map(int, spills))",
        "spills are recorded as none",
    ),
    Fault(
        "harness/codegen",
        "if log:",
        "_logs[kernel.hash] = log\nif log:",
        "the registers of a kernel that is compiled twice are lost",
        within="_read",
    ),
    # settings
    Fault("harness/settings", "SETTINGS[name][1](old)", "pass", "a setting that was changed is not put back"),
    Fault(
        "harness/settings",
        "if problems and not failed:",
        "if problems and failed:",
        "a technique that leaves a setting changed passes",
    ),
    Fault(
        "harness/settings",
        "torch.manual_seed(seed)",
        "torch.manual_seed(0)",
        "the seed does not reach torch",
        tests=("tests/harness/test_settings.py", CLI + "test_the_seed_changes_the_data_and_the_name_fixes_it"),
    ),
    # hardware and FP8
    Fault(
        "common/device",
        "if any(tensor.dtype is torch.bfloat16 for tensor in tensors):",
        "if False:",
        "bfloat16 is let into the interpreter",
        tests=("tests/examples/common/test_device.py", "tests/examples/triton/test_vector_add.py"),
    ),
    Fault(
        "common/tma",
        "any(step % 16 or step == 0 for step in steps)",
        "any(step % 8 or step == 0 for step in steps)",
        "strides of 8 bytes are let to TMA",
        tests=("tests/examples/common/test_tma.py", "tests/examples/tma/test_descriptors.py"),
    ),
    Fault(
        "common/fp8",
        "scaled = groups * (top / amax)[:, None, :, None]",
        "scaled = groups / (amax / top)[:, None, :, None]",
        "the quantizer's reference rounds twice",
        tests=("tests/examples/common/test_fp8.py", "tests/examples/fp8/test_quantize.py"),
    ),
    Fault(
        "common/fp8",
        "amax = groups.abs().amax(dim=(1, 3)).clamp(min=FLOOR)",
        "amax = groups.amax(dim=(1, 3)).clamp(min=FLOOR)",
        "amax of the reference does not count negative numbers",
    ),
    # records and the command line
    Fault(
        "companion/readme",
        'return min(rows, key=lambda row: row["ms"], default=None)',
        'return max(rows, key=lambda row: row["ms"], default=None)',
        "the best row is the slowest",
        tests=("tests/companion/test_readme_tables.py",),
    ),
    Fault(
        "harness/cli",
        'return int(any("failed" in (each.status, each.study and each.study.status) for each in ran))',
        "return 0",
        "a run with a failure ends with 0",
        tests=(CLI + "test_a_technique_that_fails_stops_no_other",),
    ),
    Fault(
        "harness/cli",
        "if not session.profile and not (record.checks or record.tables or record.codegen or record.facts):",
        "if False:",
        "a demo that shows nothing passes",
        tests=(CLI + "test_a_technique_that_fails_stops_no_other",),
    ),
    # what the compiler's lessons look with
    Fault(
        "compile_inspect/watching",
        "return [frame.reason for frame in self.frames if frame.reason]",
        "return [frame.reason for frame in self.frames[1:] if frame.reason][1:]",
        "the first recompilation is not counted",
        tests=("tests/test_compile_inspect.py",),
    ),
    Fault(
        "compile_inspect/watching",
        'seen.breaks = [text.strip().splitlines()[0] for text in seen.counters.get("graph_break", {})]',
        'seen.breaks = [text.strip().splitlines()[0] for text in seen.counters.get("graph_break", {})][1:]',
        "the first graph break is not counted",
        tests=("tests/test_compile_inspect.py",),
    ),
    Fault(
        "compile_inspect/fresh",
        "with patch.dict(os.environ, folders):",
        "if os.environ.update(folders) is None:",
        "the caches stay in a folder that is gone",
        tests=("tests/test_compile_inspect.py",),
    ),
]
