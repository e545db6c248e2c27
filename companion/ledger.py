"""The claims of the chapter's texts, and what of the records measures each: the table behind CLAIMS.md.

A claim is told in this project's words. No measured number is typed here: `measured` reads them, by technique and key.
"""

from __future__ import annotations

from collections.abc import Callable

from companion.claims import Claim, Value, number, times, told

INF = float("inf")
EAGER, DEFAULT, REDUCE = "torch eager", "torch.compile default", "torch.compile reduce-overhead"
BLOCKS, CAPTURED = "torch.compile one block", "CUDA graph of compiled blocks"
MODES = {"default": (1.0, 1.06), "reduce-overhead": (1.1, 1.22), "max-autotune": (1.12, 1.24)}  # of 1.03, 1.16, 1.18
SECONDS = {"1 B": (5, 10), "10 B": (30, 60), "40 B": (120, 300)}  # to compile, as the chapter's table has it
BREAKS = "what breaks the graph (the mended layer is one graph; it may need an operation more)"
ENTRIES = "12 calls each: cache entries, and calls left to eager"
ERRORS = "what multiplies, and the error of float32 matrices of 4096x4096 in each precision"
FORTY_BILLION = ("40 B, 1x1 tokens", "40 B, 1x512 tokens")
SIZES = "10 sizes, x 1024x512"
INDEX_ADD = "index_add: different results in 20 calls"
STREAM = "batches of 1 to 64; a stream of 500 batches, 49 sizes, from cold"
COMPILING = "compiling, from an empty cache"
SETS = {"Inductor's IR": ("loop_ir", 50), "Prims": ("prims", 250), "ATen": ("aten", 750)}  # operators claimed

Measured = Callable[..., dict[str, Value]]  # reads a claim's values from companion.claims.Reader, by case


def speed(
    name: str, over: str, variant: str, least: float = 0.0, most: float = INF, *, title: str = "", cases=(),
    study: bool = False, prefix: str = "",
) -> Measured:  # fmt: skip
    """How many times as fast as the row `over` the row `variant` is in a technique's tables of that title, which is its
    name unless given."""

    def measured(read) -> dict[str, Value]:
        found = read(name, study).ratios(title or name, over, variant, *cases)
        return {f"{prefix}{case}": times(x, least, most) for case, x in found.items()}

    return measured


def facts(
    name: str, fact: str, column: str, cases, least: float, most: float = INF, unit: str = "", study: bool = False
) -> Measured:
    """One column of a recorded table, by its rows."""
    return lambda read: {case: number(read(name, study).fact(fact, case, column), unit, least, most) for case in cases}


def words(name: str, fact: str, column: str, cases, wanted: str, study: bool = False) -> Measured:
    """One column of a recorded table, which is claimed to be, or to begin with, `wanted`."""
    return lambda read: {
        case: told(said := read(name, study).fact(fact, case, column), said.startswith(wanted)) for case in cases
    }


def rows(name: str, fact: str, cases, text: str, holds: Callable, study: bool = False) -> Measured:
    """Several columns of a recorded table as one text, by its rows; `holds` is asked of each row."""

    def measured(read) -> dict[str, Value]:
        found = {case: read(name, study).fact(fact, case) for case in cases}
        return {case: told(text.format(**row), holds(row)) for case, row in found.items()}

    return measured


def both(*each: Measured) -> Measured:
    """Several measured together."""
    return lambda read: {case: value for measured in each for case, value in measured(read).items()}


def seconds_to_compile(read) -> dict[str, Value]:
    found = {}
    for size, (least, most) in SECONDS.items():
        evidence = read("large_models", study=size != "1 B")
        seconds = evidence.fact(f"{size}, 1x1 tokens: compiling", "torch.compile whole model", "first call s")
        found[f"{size} ({least} to {most} s claimed)"] = number(seconds, " s", least, most)
    return found


def compiled_when(read) -> dict[str, Value]:
    entries = read.inspected("frame_evaluation").fact("compiled_at")
    before, after = entries["entries_before_call"], entries["entries_after_call"]
    return {
        "after import and torch.compile": told(str(before), before > 0),
        "after the first call": told(str(after), after == 0),
    }


def autodiff(read) -> dict[str, Value]:
    eager, alone = (read.inspected("aot_autograd").fact("autograd_ms", which) for which in ("eager", "aot"))
    nodes = told(f"{alone['nodes']} for {eager['nodes']}", alone["nodes"] < eager["nodes"])
    return {"nodes that autograd walks": nodes, "speed of backward": times(eager["backward"] / alone["backward"], 1.02)}


def sets_of_operators(read) -> dict[str, Value]:
    """Claimed "about": within a fifth."""
    sets = read.inspected("aot_autograd").fact("ladder", "sets")
    return {name: number(sets[key], "", 0.8 * said, 1.2 * said) for name, (key, said) in SETS.items()}


def lines_and_nodes(read) -> dict[str, Value]:
    lines = read.inspected("dynamo_capture").fact("nodes_per_line")
    return {f"{nodes} node{'s' * (nodes != '1')}": told(str(count), nodes == "1") for nodes, count in lines.items()}


def guard_of_shape(read) -> dict[str, Value]:
    example = read.inspected("guards").fact("example")
    return {name: told(text, text.startswith("2*")) for name, text in example.items()}


def product_and_relu(read) -> dict[str, Value]:
    found = read.inspected("inductor_codegen").fact("claims", "linear_relu")
    library = sum(found["extern"].values())
    return {"": told(f"{library} of a library, {found['generated']} generated", library + found["generated"] == 1)}


def compute_bound(read) -> dict[str, Value]:
    found = read("when_it_helps").ratios("when_it_helps", EAGER, REDUCE)
    launch, compute = found["1x1 tokens"], found["8x2048 tokens"]
    text = f"compute-bound (8x2048 tokens) {compute.text}; launch-bound (1x1 tokens) {launch.text}"
    return {"": told(text, compute > launch and compute.faster > launch.faster)}


def whole_over_block(read) -> dict[str, Value]:
    def seconds(layers: int, what: str) -> float:
        return read("regional_compilation").fact(COMPILING, f"{layers} layers, {what}", "cold s")

    return {f"{n} layers": times(seconds(n, "whole") / seconds(n, "each block"), 1.02) for n in (2, 12)}


def hints(read) -> dict[str, Value]:
    evidence = read("logging_and_hints", study=True)
    fact = f"the chapter's hints, in torch {evidence.part['machine']['torch']}"
    cases = ("not used because input is mutated", "fell back to eager", "missed fusion")
    return {case: number(evidence.fact(fact, case, "files"), "", 1) for case in cases}


def static_shapes(read) -> dict[str, Value]:
    lesson, found = read("static_shapes"), {}
    for policy in ("padded to 64", "powers of two"):
        found[f"programs for 64 sizes, {policy}"] = number(lesson.fact(STREAM, policy, "compiles"), "", 1, 10)
        rows = lesson.ratios("32 batches, from host to host", "torch_xla no padding", f"torch_xla {policy}")
        found |= {f"once compiled, {policy} over no padding": times(each, 1.0) for each in rows.values()}
    return found


fp8_models = both(*(
    speed("fp8_matmul", "torch.compile bfloat16", row, 1.02, title="whole models", study=True, prefix=f"{row}, ")
    for row in ("FP8 per tensor", "FP8 per row")
))  # fmt: skip
modes_of_one_billion = both(
    *(speed("modes", EAGER, f"torch {mode}", *claimed, cases=["1x1 tokens"], prefix=f"{mode}, ")
      for mode, claimed in MODES.items()),
    *(speed("when_it_helps", EAGER, f"torch.compile {mode}", *MODES[mode], cases=["8x2048 tokens"], prefix=f"{mode}, ")
      for mode in ("default", "reduce-overhead")),
)  # fmt: skip

TORCH_COMPILE = [
    Claim("one-line-60", "PyTorch 2.0: Triton Acceleration GPU Kernel Execution",
          "One line, torch.compile, makes the same model about 60 % faster.",
          "What is saved is launches and passes over activations. Their share of a call decides, and that follows "
          "tokens and host.",
          both(speed("when_it_helps", EAGER, DEFAULT, 1.5, 1.7, prefix="inference, "),
               speed("training_step", "torch eager, fused AdamW", "torch.compile, fused AdamW", 1.5, 1.7,
                     title="training step", prefix="training, ")), "over eager"),
    Claim("modes-1b", "Mode Comparison", "A model of 1 B parameters runs at 1.03x (default), 1.16x (reduce-overhead) "
          "and 1.18x (max-autotune) of eager.",
          "At one token the host takes longer to launch eager's kernels than the GPU to run them, so that a CUDA graph "
          "multiplies the speed; with many tokens matrix products take the time, and all modes call the same ones.",
          modes_of_one_billion, "over eager"),
    Claim("modes-40b", "Mode Comparison", "A model of 40 B is slower compiled (0.99x), as it is memory-bound.",
          "Reading the weights cannot be saved, but nothing is added either; launches and activations still shrink.",
          speed("large_models", EAGER, BLOCKS, 0, 1, cases=FORTY_BILLION), "over eager"),
    Claim("large-models-poor", "When torch.compile Helps",
          "Small and medium models are good candidates; very large ones (40 B) gain next to nothing.",
          "The gain follows launch gaps and traffic of activations, not parameters: at one token a CUDA graph helps "
          "both sizes; at 512 the products of 40 B are long.",
          speed("large_models", EAGER, CAPTURED, 0, 1.1, cases=FORTY_BILLION), "a CUDA graph over eager"),
    Claim("small-batch-hurts", "Phase 5: Benchmarking & Profiling (~15 min) --- Docker Recommended",
          "For very small batches compiling does not help, or hurts.",
          "Of a model a small batch gains most, by launches saved. What loses is a single operation: guards and the "
          "call of what was compiled cost more than eager's dispatch, and nothing is fused.",
          both(speed("when_it_helps", EAGER, REDUCE, 0, 1, cases=["1x1 tokens"], prefix="a model, "),
               speed("when_it_helps", EAGER, "torch.compile", 0, 1, title="one multiplication", study=True,
                     prefix="one multiplication, ")), "over eager"),
    Claim("compute-bound-best", "Key Takeaways",
          "Compiling works best for compute-bound workloads: compile only compute-bound hotspots.",
          "Compute-bound time is in matrix products, for which eager calls the same library.", compute_bound,
          "over eager"),
    Claim("max-autotune-production", "Key Takeaways",
          "max-autotune is for production: compile longer once, get the best performance.",
          "It searches tilings of the matrix products, where cuBLAS is as good; the rest is reduce-overhead.",
          both(*(speed("modes", "torch reduce-overhead", "torch max-autotune", 1.02, study=study)
                 for study in (False, True))), "over reduce-overhead"),
    Claim("compile-cost", "Compilation Overhead",
          "The first run takes 5-10 s longer for 1 B parameters, 30-60 s for 10 B, 2-5 min for 40 B.",
          "Seconds follow the layers that are traced (16, 44, 60), not parameters, and the host; compiling one block "
          "takes the same for all.", seconds_to_compile, "whole models"),
    Claim("cached-0s", "Compilation Overhead", "Later runs take 0 s more: compiled code is cached.",
          "Within a process, yes. Another process finds the kernels on disk, but traces, checks and loads again.",
          facts("caching", "processes", "first call s", ["warm folder"], 0, 0.1, " s"),
          "the first call of a second process"),
    Claim("cache-dir", "Pitfall 4: Not Caching Compiled Code",
          "TORCH_COMPILE_CACHE_DIR keeps compiled code between runs.",
          "It is TORCHINDUCTOR_CACHE_DIR; without it a folder is used, too, among the temporary ones.",
          lambda read: {"": told(said := read("caching", study=True).fact("variables", "TORCH_COMPILE_CACHE_DIR"),
              not said.startswith("0 files"))}),
    Claim("warmup-10", "Pitfall 5: Forgetting Warmup", "At least ten calls are needed before timing.",
          "Compiling is over after the first call, a CUDA graph is recorded in the second or third. What still varies "
          "then is the host, which no number of calls ends.",
          facts("modes", "first calls", "calls until stable", [f"1x1 tokens, {mode}" for mode in MODES], 10),
          "calls until stable"),
    Claim("submodules", "Common Issues", "Compiling submodules separately helps where the whole is too much.",
          "One compiled block serves all layers of its class: seconds do not grow with depth. A call then has more "
          "guards and launches.", whole_over_block, "seconds to compile the whole over those of each block"),
    Claim("fp8-large-models", "Pitfall 1: Compiling Memory-Bound Models",
          "FP8, and not compiling, helps a large model.",
          "FP8 halves the bytes of weights and doubles the rate of the MMAs, and the model is compiled: in eager the "
          "quantizers would be kernels of their own. Per row they cost, at one token, much or all of what the smaller "
          "weights save.", fp8_models, "over the same model compiled in bfloat16"),
    Claim("tensorrt", "Ecosystem Context", "TensorRT is faster than torch.compile on NVIDIA GPUs.",
          needs="TensorRT, which is not on the recorded machines"),
]  # fmt: skip

SHAPES_AND_GRAPHS = [
    Claim("dynamic-recompiles", "Pitfall 2: Dynamic Shapes", "Shapes that change at every call recompile every time.",
          "The second size makes the dimension dynamic, and two graphs serve all; with dynamic=False each is compiled.",
          facts("dynamic_shapes", SIZES, "graphs", ["automatic", "static"], 10), "graphs for 10 sizes"),
    Claim("first-compile-all-batches", "How torch.compile Works Internally",
          "The first compilation serves every batch size.",
          "It is made for the size that it saw; the second size compiles again, with the dimension dynamic.",
          facts("dynamic_shapes", SIZES, "graphs", ["automatic"], 1, 1), "graphs for 10 sizes"),
    Claim("padding", "Pitfall 2: Dynamic Shapes", "Against changing shapes: pad to fixed sizes.",
          "Padding computes rows that nobody needs. The dynamic graph does not, and costs no more per call.",
          speed("dynamic_shapes", "torch.compile automatic", "torch.compile padded to 64", 1.0),
          "padded to 64, over the dynamic graph"),
    Claim("dynamic-cudagraphs", "Performance Tips", "Dynamic shapes disable CUDA graphs (the chapter: can).",
          "One compiled graph, and a CUDA graph recorded for each size that comes, with memory of its own.",
          facts("dynamic_shapes", "CUDA graphs for batches of 2 to 64", "CUDA graphs", ["marked, reduce-overhead"],
                0, 0, study=True), "CUDA graphs for 63 sizes"),
    Claim("non-tensors-constant", "Tracing", "Whatever is no tensor is a constant: another value is traced again.",
          "The second value of a number makes it a symbol. One that decides how far a loop runs, or that is an "
          "attribute of a module, stays a constant, until the limit of 8 entries.",
          facts("recompilation", ENTRIES, "entries", ["float argument", "int that a loop runs to",
                "int attribute of a module"], 3), "cache entries for 12 values"),
    Claim("python-random", "Common Issues",
          "Random numbers of Python in compiled code break the graph or compile again.",
          "It depends on the function. With an object of one's own the first number is kept: wrong, and no error.",
          rows("recompilation", "numbers drawn by 12 calls",
               ["random.random()", "random.uniform(0, 1)", "a random.Random of one's own"],
               "{entries}, {breaks}, {numbers}", lambda row: row["entries"] > 1 or row["breaks"] > 0, study=True),
          "cache entries, graph breaks, different numbers in 12 calls"),
    Claim("graph-breaks", "Graph Breaks",
          "print, .item() and a branch on data end the graph, and another begins after it.",
          "The line runs in eager between two graphs; inside try, the whole rest of the function does.",
          facts("graph_breaks", BREAKS, "graphs", ["print", ".item()", "if on a tensor", ".item() inside try"], 2),
          "graphs of one function"),
    Claim("explain-finds-breaks", "Performance Tips", "torch._dynamo.explain() identifies graph breaks.",
          "It counts breaks between graphs: where the rest of a function is left to eager there is no second graph.",
          words("graph_breaks", "what torch's own tools say", "torch._dynamo.explain", ["print", ".item()",
              "if on a tensor", ".item() inside try", "generator argument"], "1 breaks", study=True),
          "explain() of a function with one break"),
    Claim("is-compiling-api", "Debugging Tools", "with torch._dynamo.disable(): runs a block in eager.",
          "It is a decorator, today torch.compiler.disable, and no context manager.",
          lambda read: {"": told(said := read("graph_breaks", study=True).fact(
              "claim is-compiling-api", "with torch._dynamo.disable()").split(":")[0], "Error" not in said)}),
    Claim("stances", "Compiler Stances",
          "fail_on_recompile raises where a function would compile again; eager_on_recompile runs it in eager.",
          "So it is. Before the warm-up the first call counts as one, too.",
          lambda read: {stance: told(said := read("stances").fact("calls of a function warmed up", stance, "new shape"),
              said == wanted) for stance, wanted in
              {"fail_on_recompile": "error", "eager_on_recompile": "eager"}.items()}, "what a new shape does"),
    Claim("graphs-gap", "3. CUDA Graphs", "CUDA graphs remove the gaps between kernels.",
          "100 launches become one; the host's time for the others is gone.",
          speed("cuda_graphs", EAGER, "CUDA graph of eager", 1.5, title="100 tiny kernels"),
          "100 tiny kernels, captured, over eager"),
    Claim("logs-by-environ", "Performance Hints",
          'os.environ["TORCH_LOGS"] = ..., set by the program, switches logs on.',
          "torch reads the variable when it is imported; afterwards torch._logging.set_logs does it.",
          facts("logging_and_hints", "switched on by the running program", "records of the break",
              ['os.environ["TORCH_LOGS"] = "graph_breaks"'], 1), "records of a break"),
    Claim("hints", "Performance Hints",
          "TORCH_LOGS=perf_hints speaks of mutated inputs, of random operations in eager and of missed fusions.",
          "No file of torch has these words. What there is comes from three switches (logging_and_hints).", hints,
          "files of torch with these words"),
    Claim("deterministic", "Common Issues", "Against numerical differences: deterministic algorithms.",
          "Atomic additions come in any order; the deterministic algorithm is slower.",
          facts("numerics", INDEX_ADD, "results", ["torch eager, deterministic", "torch.compile, deterministic"], 1, 1),
          "different results of 20 equal calls of index_add"),
    Claim("matmul-high", "Common Issues", 'Against numerical differences: torch.set_float32_matmul_precision("high").',
          "It allows TF32, which keeps 10 bits of each operand's mantissa: the error grows.",
          lambda read: {"": times(read("tensor_cores").fact(ERRORS, "tf32", "rms error")
                                / read("tensor_cores").fact(ERRORS, "ieee", "rms error"), 0, 1)},
          "rms error of TF32 over that of float32"),
    Claim("backend-sees-aten", "Code Flow Graph",
          "A backend's graph holds aten.matmul.default, and its example inputs are fake.",
          "It holds the functions that the program calls, and real inputs. ATen and fakes come behind AOTAutograd.",
          rows("backends", "what a backend is handed", ["torch.compile", "torch._dynamo.optimize", "after AOTAutograd"],
               "{graph} ({example inputs})", lambda row: row["example inputs"] == "fake")),
    Claim("backend-names", "TorchInductor", "The backends of the table are chosen by these names.",
          "Those that fail are packages of their own; some have other names today (backends).",
          words("backends", "backends of the chapter's table", "by its name",
                ["inductor", "cudagraphs", "onnxrt", "tvm", "openvino", "tensorrt", "ipex"], "runs")),
    Claim("import-time", "How torch.compile Works Internally", "Dynamo rewrites bytecode when a module is imported.",
          "A frame is compiled when it is first called; what is never called is never compiled.", compiled_when,
          "cache entries of a model with one graph break"),
    Claim("autodiff", "How torch.compile Works Internally", "AOTAutograd removes autodiff's overhead at run time.",
          "Autograd walks one node for each compiled graph. The kernels and their launches are eager's, until Inductor "
          "writes others.", autodiff, "a decoder, AOTAutograd alone for eager"),
    Claim("ir-sizes", "TorchInductor", "Inductor's IR has about 50 operators, Prims about 250, ATen about 750.",
          "The sets grew, and what counts is open: of ATen's, fewer are public and not in place.", sets_of_operators,
          "operators in this torch"),
    Claim("one-node-per-line", "Phase 2: TorchDynamo Graph Capture (~20 min) --- Windows OK",
          "A line of Python is a node of the FX graph.",
          "A node is an operation. A line has as many as it calls, and one that only computes sizes has none.",
          lines_and_nodes, "lines of a decoder"),
    Claim("guard-2x16", "Symbolic Shapes", "a.shape[0] * 2 < 16 leaves the guard 2 * size >= 16.",
          "The ShapeEnv keeps that expression; what is installed and checked is solved for the size.", guard_of_shape),
    Claim("sin-mul-add", "Graph Compiling", "sin, mul and add become one kernel.",
          "Pointwise operators are inlined into the loop that uses them.",
          lambda read: {"": number(read.inspected("inductor_codegen").fact("claims", "sin_mul_add"), "", 1, 1)},
          "kernels generated"),
    Claim("epilogue-one-kernel", "How torch.compile Works Internally",
          "A product, a bias and a ReLU become one kernel.",
          "By default the product, with its bias, is a library's call, and what follows it a kernel of its own; only a "
          "template of max-autotune takes the epilogue in.", product_and_relu, "kernels of Linear and ReLU"),
]  # fmt: skip

TRITON = [
    Claim("fused-3-4x", "Fused Add-ReLU-Mul Kernel",
          "One kernel in place of three, for add, ReLU and multiply, is 3 to 4x as fast.",
          "Eager makes 7 passes over memory (the chapter counts 4), the fused kernel 3: bytes allow 7/3, 2.33x. Where "
          "all fits in L2 it is less: three launches against one.",
          both(speed("fused_add_relu_mul", "torch", "triton", 3, 4),
               speed("fused_add_relu_mul", "torch", "triton", 3, 4, title="sizes", cases=["10000000 float32"],
                     study=True)), "over eager"),
    Claim("triton-90-95", "Key Takeaways", "Triton reaches 90-95 % of hand-tuned kernels.",
          "Large square GEMMs do; few rows, odd sizes and a short K do not. Attention is as fast as cuDNN where "
          "another warpgroup multiplies during a softmax (in Gluon), and slower where programs share an SM.",
          both(speed("matmul", "cuBLAS", "triton grouped", 0.9, prefix="cuBLAS, "),
               speed("matmul", "cuBLAS", "triton", 0.9, title="few rows, odd sizes, short K", study=True,
                     prefix="cuBLAS, "),
               speed("flash_attention", "cuDNN", "triton", 0.9, prefix="cuDNN, ")), "speed over"),
    Claim("shared-zeros", "Shared Memory", "tl.zeros allocates shared memory.",
          "They are registers. Operands of tl.dot, loads that run ahead and reductions take shared memory.",
          lambda read: {sm: number(read("shared_memory").fact("bytes of shared memory", "tl.zeros (scale)", sm), "", 1)
                        for sm in ("sm_80", "sm_90", "sm_100")}, "bytes"),
    Claim("reuse", "Performance Tips", "Use shared memory for data reuse.",
          "A larger tile loads fewer bytes for the same product.", speed("shared_memory", "16x16", "128x256", 1.5),
          "tiles of 128x256 over 16x16, both in shared memory"),
    Claim("tensor-cores", "Tensor Cores", "tl.dot uses tensor cores for FP16 and BF16.",
          "For float32, too, as TF32, unless it is told otherwise: faster, and less exact.",
          lambda read: {precision: told(said := read("tensor_cores", study=True).fact(
              "instructions of each precision", precision, "sm_90"), "wgmma" in said)
              for precision in ("float16", "bfloat16")}, "on sm_90"),
    Claim("autotune-elementwise", "Autotuning", "Autotuning BLOCK_SIZE of an elementwise kernel pays.",
          "Memory is the limit for every block from 512 on: the search finds what was there.",
          speed("autotune", "fixed 1024", "tuned", 1.02, title="elementwise", study=True), "over a block of 1024"),
    Claim("double-buffering", "Pipelined Kernels", "Two stages, double buffering, overlap loads with compute.",
          "They do; a load takes longer than a step of MMAs, so that more stages are faster still (pipelined_matmul).",
          speed("pipelined_matmul", "1 stage", "2 stages", 1.02), "over one stage"),
    Claim("ws-elementwise", "Warp Specialization", "warp_specialize=True on an elementwise loop specializes warps.",
          "The compiler leaves the loop as it is, without setmaxnreg. Partitions need loads by TMA and tl.dot.",
          lambda read: {sm: told(said := read("warp_specialized_matmul", study=True).fact(
              "the elementwise loop", "4 warps", sm), said.startswith("specialized")) for sm in ("sm_90", "sm_100")}),
    Claim("ncu-regex", "Debugging Commands", 'ncu --kernel-name-regex "triton" profiles Triton kernels.',
          "The option is --kernel-name regex:...; a @triton.jit kernel has its function's name, and only Inductor's "
          "begin with triton_ (docs/running.md).", needs="a record of ncu's own output"),
]  # fmt: skip

FP8_AND_TMA = [
    Claim("fp8-90-95", "3. `triton_fp8_advanced.py` - FP8 Operations in Triton",
          "An FP8 GEMM in Triton, as the chapter writes it, reaches 90-95 % of cuBLAS.",
          "By pointers, as there, about that; with loads by TMA and warp specialization it keeps up.",
          lambda read: {variant: times(read("fp8_matmul", study=True).fact(
              "over the fastest _scaled_mm, per tensor", variant, "geometric mean"), 0.9)
              for variant in ("pointers", "warp specialized")}, "over the fastest _scaled_mm, geometric means"),
    Claim("fp8-2x", "Key Takeaways", "FP8 is twice as fast as FP16.",
          "The instruction is. The result has as many bytes as before, and the power limit holds the clocks down.",
          speed("fp8_matmul", "cuBLAS bfloat16", "triton", 1.95), "over cuBLAS bfloat16"),
    Claim("b200-rates", "5. NVIDIA GPU-Specific Features Testing", "FP16 reaches about 1850, FP8 about 3700 TFLOP/s.",
          needs="sm_100, which nobody has recorded yet"),
    Claim("tma-hint", "4. `triton_tma_blackwell.py` - TMA in Triton (NVIDIA GPU)",
          'tl.load with eviction_policy="evict_last" is a TMA load.',
          "It stays an ordinary load; TMA's instruction comes from a tensor descriptor.",
          lambda read: {"": number(read("what_is_tma").code(
              "scale_pointers_kernel", 90, "cp.async.bulk.tensor"), "", 1)}, "cp.async.bulk.tensor in its code"),
    Claim("tma-broken", "4. `triton_tma_blackwell.py` - TMA in Triton (NVIDIA GPU)", "TMA does not work in Triton yet.",
          "It does, by tensor descriptors, from sm_90 on.",
          lambda read: {f"sm_{sm}": number(read("what_is_tma").code(
              "scale_descriptors_kernel", sm, "cp.async.bulk.tensor"), "", 0, 0) for sm in (90, 100, 120)},
          "cp.async.bulk.tensor in a descriptor's code"),
    Claim("tma-20-30", "4. `triton_tma_blackwell.py` - TMA in Triton (NVIDIA GPU)",
          "Loads by TMA are 20 to 30 % faster than ordinary ones.",
          "A plain copy is limited by memory, and gains nothing. A GEMM gains where pointers need masks.",
          both(speed("tma_copy", "pointers", "tile", 1.2, 1.3, prefix="copy, "),
               speed("tma_matmul", "pointers", "loads", 1.2, 1.3, prefix="GEMM, ")), "TMA over pointers"),
]  # fmt: skip

XLA = [
    Claim("xla-static", "PyTorch XLA Backend", "XLA is made for static shapes: pad to fixed sizes.",
          "Every shape is a program. Padding compiles few, and computes rows that nobody needs at every call: what is "
          "faster depends on how many calls there will be (static_shapes).", static_shapes),
    Claim("xla-backend", "PyTorch XLA Backend", 'torch.compile(model, backend="openxla") is the way to XLA.',
          "It does not record a step again in each call, as lazy mode does. Recorded on a CPU.",
          lambda read: {f"over {name}": times(read("openxla_backend").ratio(
              "forward", row, "torch.compile openxla", "2x24 tokens"), 1.02)
              for name, row in {"lazy mode": "torch_xla lazy", "eager": EAGER}.items()}),
]  # fmt: skip

CLAIMS = {
    "torch.compile: how much, when, at what cost": TORCH_COMPILE,
    "Shapes, graphs and what the compiler does": SHAPES_AND_GRAPHS,
    "Triton": TRITON,
    "FP8 and TMA": FP8_AND_TMA,
    "XLA": XLA,
}
