"""`python -m companion COMMAND`: what a reader does beside running a script."""

from __future__ import annotations

import argparse
import math
import sys
from importlib import import_module
from pathlib import Path

from harness.catalog import CatalogError


def ratio(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0; 0.95 lets a ratio be 5 % lower")
    return value


def _parser() -> argparse.ArgumentParser:
    """A command is the function of its name in companion/, and its options are that function's arguments."""
    parser = argparse.ArgumentParser(prog="python -m companion")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what this machine is and reaches, and which techniques run on it")
    add = commands.add_parser("show", help="what was recorded of a technique: answer, tables, evidence").add_argument
    add("names", nargs="*", metavar="TECHNIQUE", help="without any: list them all with their questions")
    add("--record", type=Path, metavar="PATH", help="a record that --json wrote (default: what README shows)")
    add("--study", action="store_true", help="its study too")
    add("-v", "--verbose", action="store_true", help="every table whole, and the facts")
    does = "a technique's kernels as one file that needs torch and triton only"
    add = commands.add_parser("export", help=does).add_argument
    add("name", metavar="TECHNIQUE")
    add("-o", "--output", type=Path, metavar="PATH", help="a file, a folder or - (default: .)")
    add("--force", action="store_true", help="replace a file that exists")
    add = commands.add_parser("compare", help="two records of one topic, row by row; a regression check").add_argument
    add("reference", type=Path, metavar="REFERENCE", help="as results/h200/triton_examples.json")
    add("mine", type=Path, metavar="MINE", help="what --json PATH of the same topic wrote")
    add("techniques", nargs="*", metavar="TECHNIQUE", help="only these; all of them by default")
    add("--all", dest="all_rows", action="store_true", help="every row, not only what differs")
    fails = "exit 1 when a speed-up over the baseline is under RATIO times the reference's, or a technique failed"
    add("--fail-under", type=ratio, metavar="RATIO", help=fails)
    does = "records of your machine, checked and put into results/"
    add = commands.add_parser("contribute", help=does).add_argument
    add("records", nargs="+", type=Path, metavar="RECORD", help="what --json PATH wrote, a topic each")
    add("--folder", metavar="NAME", help="of results/ (default: from the GPU's name)")
    add("--force", action="store_true", help="replace a record that exists")
    add = commands.add_parser("report", help="the chapter as one page: answers, pictures, kernels, tables").add_argument
    which = "what --json PATH wrote, or a folder of that (default: what README shows)"
    add("records", nargs="*", type=Path, metavar="RECORD", help=which)
    add("-o", "--output", type=Path, metavar="FILE", help="the page (default: report.html)")
    add("--beside", nargs="+", type=Path, default=[], metavar="MINE", help="records to draw beside these")
    add("--check", action="store_true", help="change nothing; exit 1 when docs/index.html is out of date")
    does = "renew the tables of README.md and docs/ from docstrings and results/"
    add = commands.add_parser("readme", help=does).add_argument
    add("--check", action="store_true", help="change nothing; exit 1 when they are out of date")
    add("--stale", action="store_true", help="only list what was recorded with older code")
    does = "renew CLAIMS.md: what the chapter claims, and what was measured of it"
    add = commands.add_parser("claims", help=does).add_argument
    add("--check", action="store_true", help="change nothing; exit 1 when it is out of date")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 where a check fails; 2, with one sentence, where the command cannot be carried out."""
    options = vars(_parser().parse_args(argv))
    command = options.pop("command")
    try:
        return getattr(import_module(f"companion.{command}"), command)(**options)  # others are not imported
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        file = "requirements.txt" if error.name in ("torch", "triton") else "requirements-common.txt"
        print(f"error: {command} needs {error.name}: pip install -r {file}", file=sys.stderr)
        return 2
    except (CatalogError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
