"""What makes a recorded number old: code that had a part in it, and neither its words nor its layout."""

import shutil
import subprocess
import sys

from harness.catalog import ROOT
from harness.sources import sources_hash

import pytest

FILES = {
    "harness/bench.py": "ROUNDS = 3\n",
    "harness/session.py": "import harness.bench\n",
    "examples/common/tiles.py": "import examples.triton.softmax\n\ndef order(n):\n    return n + 1\n",
    "examples/triton/softmax.py": '"""A lesson."""\nfrom harness import run\nfrom examples.common.tiles import order\n'
    "import triton\n\nSTAGES = 4  # of the ring\n\n\ndef softmax(x):\n    '''Rows.'''\n    return order(x)\n\n\n"
    "def check(x):\n    if x is None:\n        raise ValueError('no x') from None\n\n\n"
    "def demo(h):\n    from examples.triton import softmax_fused\n",
    "examples/triton/softmax_fused.py": "import examples.common.tiles as tiles\n",
    "examples/triton/other.py": "import compile_inspect.graphs\n",
    "studies/triton/softmax.py": "from examples.triton.softmax import softmax\n",
    "compile_inspect/__init__.py": "",
    "compile_inspect/graphs.py": "from compile_inspect import logs\n",
    "compile_inspect/logs.py": "import torch\n",
}
LESSON, OTHER, STUDY = "examples/triton/softmax.py", "examples/triton/other.py", "studies/triton/softmax.py"


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new", "changes"),
    [
        (LESSON, "STAGES = 4", "STAGES = 5", True),
        (LESSON, "return order(x)", "order(x)", True),
        (LESSON, "if x is None", "if x is x", True),
        (LESSON, "raise ValueError", "raise TypeError", True),
        ("examples/common/tiles.py", "n + 1", "n - 1", True),
        ("examples/triton/softmax_fused.py", "tiles\n", "tiles\nA = None\n", True),
        ("harness/bench.py", "3", "4", True),
        (OTHER, "graphs", "graphs, torch", True),  # a peer
        ("compile_inspect/logs.py", "torch", "triton", True),  # which that imports
        (LESSON, "A lesson.", "Another sentence.", False),
        (LESSON, "'''Rows.'''", "'Columns.'\n    'and more'", False),
        (LESSON, "# of the ring", "# of the ring, which is shared", False),
        (LESSON, "STAGES = 4", "\n\n\nSTAGES = (0x4)", False),
        (LESSON, "'no x'", "f'{x}: pass a tensor'", False),
        ("harness/session.py", "bench", "hardware", False),  # nothing that checks or times
        (STUDY, "softmax\n", "softmax\nA = 1\n", False),  # it is the study's
    ],
)
def test_what_changes_it_and_what_does_not(root, file, old, new, changes):
    before, alone = sources_hash(root / LESSON, [root / OTHER], root), sources_hash(root / LESSON, root=root)
    text = FILES[file].replace(old, new, 1)
    assert text != FILES[file]
    (root / file).write_text(text)
    assert (sources_hash(root / LESSON, [root / OTHER], root) != before) == changes
    assert (sources_hash(root / LESSON, root=root) != alone) == (changes and "inspect" not in file and file != OTHER)


SAY = "import sys, pathlib; from harness.sources import sources_hash as s; print(s(pathlib.Path(sys.argv[1])))"


def test_it_is_the_same_in_every_python(root):
    path = ROOT / "harness" / "check.py"  # with much of the language in it
    for python in {sys.executable, *filter(None, (shutil.which(f"python3.{minor}") for minor in range(10, 15)))}:
        if not subprocess.run([python, "-c", ""], stderr=subprocess.DEVNULL).returncode:  # as pyenv's may
            said = subprocess.check_output([python, "-S", "-c", SAY, path], text=True, env={"PYTHONPATH": str(ROOT)})
            assert said.strip() == sources_hash(path), python
