"""Faults of the harness: each makes a check, a table or a record say what is not so."""

from . import listed

FAULTS = listed("""
# harness/check
a budget that zeros pass is not refused
  - 2 * zero_passes > counted
  + zero_passes > 2 * counted
a budget that the mean passes is not refused
  - 2 * mean_passes > mean_candidates
  + mean_passes > 2 * mean_candidates
nobody looks at the canaries
  - if broken := mode.broken_canaries():
  + if broken := 0:
outputs are zeros and not poison
  - torch.full((padded + 2 * GUARD,), POISON,
  + torch.full((padded + 2 * GUARD,), 0,
a result that was truncated, not rounded, is within the budget
  - relative = 0.51 * stores * info.eps + roundings * _eps(acc)
  + relative = 2 * stores * info.eps + roundings * _eps(acc)
a wrong factor hides in the noise
  - if not abs(agreement / squares - 1) <= allowed:
  + if False:
one large row decides the gain of all
  - unit = torch.where(finite & ~excused & (rms[row] > 0), w / rms[row], 0.0)
  + unit = torch.where(finite & ~excused & (rms[row] > 0), w / rms.mean(), 0.0)
a result that is wrong on purpose may pass
  - raise VacuousCheck(f"{what}: a result {fault} would pass; {ADVICE}")
  + pass
memory from zeros has no canary
  - if func not in self.EMPTY + self.FILLED or made
  + if func not in self.EMPTY or made
an output of another dtype is let through  [within=judge]
  - if got.dtype is not dtype:
  + if False:
a call that writes to its input is let through
  - if copy is not None and not torch.equal(_bits(x), _bits(copy)):
  + if False:
a NaN counts as right
  - ratio = torch.where(excused, 0.0, ratio).nan_to_num_(nan=math.inf, posinf=math.inf)
  + ratio = torch.where(excused, 0.0, ratio).nan_to_num_(nan=0.0, posinf=math.inf)

# harness/compare  [tests=harness/test_bench.py]
the speed-up is upside down
  - statistics.median(base / own for base, own in pairs)
  + statistics.median(own / base for base, own in pairs)
the last row is the baseline
  - zip(medians[table.baseline], medians[row.variant], strict=True)
  + zip(medians[names[-1]], medians[row.variant], strict=True)
a library's rows count as this repository's
  - return not variant.startswith(LIBRARIES)
  + return not variant.startswith(LIBRARIES[:2])
the floor is the faster of memory and arithmetic
  - return max(times, default=None)
  + return min(times, default=None)
a variant does not find the random state that its reference finds
  - rewind()
  - if seconds is not None:
  + if seconds is not None:
a variant far from the baseline's error is let through
  - if error > 1:
  + if error > 1000:
what only a library is allowed is allowed to ours
  - others = {} if is_ours(name) else
  + others =
each variant has its own number of L2 flushes
  - longest, written = max(enqueue.values()), written_bytes(calls[names[0]]())
  + longest, written = min(enqueue.values()), written_bytes(calls[names[0]]())
what the host takes for a call is what it takes alone, after a pause
  - enqueue[name] = min(enqueue[name], statistics.median(launches[name]))
  + pass
nothing is checked after it was timed
  - if is_ours(name) and not is_compiled(fn):
  -     what =
  + if False:
  +     what =
the inputs after timing are those before
  - raw.copy_(raw.roll(by))
  + raw.copy_(raw.roll(0))
a faster host shortens the GPU's part too
  - return max(gpu_ms, row["ms"] / speed) if gpu_ms else row["ms"]
  + return row["ms"] / speed if gpu_ms else row["ms"]

# harness/session
uneven times are answered from  [tests=harness/test_session.py]
  - and not uneven:
  + and True:
all rows have one distribution  [tests=harness/test_session.py]
  - return x.mul_(deviation).add_(4 * mean - 2).to(dtype)
  + return x.mul_(deviation[..., :1].mean()).to(dtype)
a missing instruction is accepted
  - if not any(kernel.found.get(name) for kernel in compiled):
  + if not compiled:

# harness/codegen
a view is compiled as if it were aligned
  - value.dtype, value.storage_offset()
  + value.dtype, 0
a program that takes too much shared memory is said to fit
  - self.shared > self.shared_limit
  + self.shared > 2 * self.shared_limit
spills are recorded as none
  - max(map(int, registers)), sum(map(int, spills))
  + max(map(int, registers)), 0 * sum(map(int, spills))
the registers of a kernel that is compiled twice are lost  [within=_read]
  - if log:
  + _logs[kernel.hash] = log
  + if log:

# harness/settings
a setting that was changed is not put back
  - SETTINGS[name][1](old)
  + pass
a technique that leaves a setting changed passes
  - if problems and not failed:
  + if problems and failed:
the seed does not reach torch
  - torch.manual_seed(seed)
  + torch.manual_seed(0)

# common/device
bfloat16 is let into the interpreter  [tests=examples/common/test_device.py,examples/triton/test_vector_add.py]
  - if any(tensor.dtype is torch.bfloat16 for tensor in tensors):
  + if False:

# common/tma
strides of 8 bytes are let to TMA  [tests=examples/common/test_tma.py,examples/tma/test_descriptors.py]
  - any(step % 16 or step == 0 for step in steps)
  + any(step % 8 or step == 0 for step in steps)

# common/fp8
the quantizer's reference rounds twice  [tests=examples/common/test_fp8.py,examples/fp8/test_quantize.py]
  - scaled = groups * (top / amax)[:, None, :, None]
  + scaled = groups / (amax / top)[:, None, :, None]
amax of the reference does not count negative numbers
  - amax = groups.abs().amax(dim=(1, 3)).clamp(min=FLOOR)
  + amax = groups.amax(dim=(1, 3)).clamp(min=FLOOR)

# companion/readme  [tests=companion/test_readme_tables.py]
a case's row is the fastest of our variants, and not what a user gets
  - return [row for row in own if row.variant == table.default] or own[:1] or others or table.rows
  + return sorted(own, key=lambda row: row.ms)[:1] or others or table.rows
a table without bytes or operations is left out
  - for table in tables_of(part) if table.timed
  + for table in tables_of(part) if table.timed and all(row.tbps for row in table.rows)
the ratio on a faster host is the one on this
  - table.over(other.variant, row.variant, host)
  + table.over(other.variant, row.variant)

# companion/compare  [tests=companion/test_companion.py::test_compare_allows_for_what_lies_between_two_machines]
two machines must agree as two rounds of one do
  - by: float = BETWEEN_MACHINES
  + by: float = 0.0
a slower host is a regression  [tests=companion/test_companion.py::test_a_slower_host_is_no_regression]
  - if self.whole:
  + if False:
a call that waits has a GPU's part to compare  [tests=companion/test_companion.py::test_a_slower_host_is_no_regression]
  - return None if part and row["enqueue_us"] > 950 * row["ms"] and part > 0.98 * row["ms"] else part
  + return part

# harness/console  [tests=harness/test_console.py]
several cases of whole calls are bare ratios
  - if len(tables) == 1 or of_calls(tables[0]):
  + if len(tables) == 1:
a ratio that noise has made is told as any other
  - uneven |= low <= 1 <= high
  + uneven |= False and low <= 1 <= high
a ratio of rounds that the times do not have is told as any other
  - uneven = abs(row.speedup / base.speedup * row.ms / base.ms - 1) > 0.03
  + uneven = False

# harness/cli  [tests=harness/test_cli.py::test_a_technique_that_fails_stops_no_other]
a run with a failure ends with 0
  - return int(any("failed" in (each.status, each.study and each.study.status) for each in ran))
  + return 0
a demo that shows nothing passes
  - if not session.profile and not (record.checks or record.tables or record.codegen or record.facts):
  + if False:

# compile_inspect/watching  [tests=test_compile_inspect.py]
the first recompilation is not counted
  - return [frame.reason for frame in self.frames if frame.reason]
  + return [frame.reason for frame in self.frames[1:] if frame.reason][1:]
the first graph break is not counted
  - seen.breaks = [text.strip().splitlines()[0] for text in seen.counters.get("graph_break", {})]
  + seen.breaks = [text.strip().splitlines()[0] for text in seen.counters.get("graph_break", {})][1:]

# compile_inspect/fresh
the caches stay in a folder that is gone  [tests=test_compile_inspect.py]
  - with patch.dict(os.environ, folders):
  + if os.environ.update(folders) is None:
""")
