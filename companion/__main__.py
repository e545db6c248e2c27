"""`python -m companion COMMAND`: what a reader does beside running a script."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from harness.catalog import CatalogError


def _export(options: argparse.Namespace) -> int:
    from harness.record import git_state

    from companion.export import export
    from companion.show import technique_named

    _, technique = technique_named(options.name, "export")
    path = options.output or Path()
    piped = str(path) == "-"
    if path.is_dir() or not (piped or path.suffix or path.exists()):
        path /= f"{technique.name}.py"
    if path.exists() and not options.force and not piped:
        raise ValueError(f"{path} exists; name another file with -o, or replace it with --force")
    commit, dirty = git_state()
    commit = (commit or "unknown")[:12] + ", with local changes" * bool(dirty)
    text, says = export(technique, commit, f"{technique.name}.py" if piped else path.name)
    if piped:
        print(text, end="")
        return 0
    try:
        if options.output and not options.output.suffix:
            path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; name another file with -o") from None
    print(f"{path}: needs torch and triton only; {says}")
    return 0


def ratio(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0; 0.95 lets a ratio be 5 % lower")
    return value


def _run(options: argparse.Namespace) -> int:
    """One command; what it does not need is not imported."""
    if options.command == "export":
        return _export(options)
    if options.command == "show":
        from companion.show import list_techniques, show_example

        shown = [show_example(name, options.record, options.study, options.verbose) for name in options.names]
        return max(shown) if shown else list_techniques()
    if options.command == "compare":
        from companion.compare import compare

        return compare(options.reference, options.mine, options.techniques, options.all, options.fail_under)
    if options.command == "contribute":
        from companion.contribute import contribute

        return contribute(options.records, options.folder, options.force)
    if options.command == "claims":
        from companion.claims import claims

        return claims(options.check)
    if options.command == "report":
        try:
            from companion.report import report

            return report(options.records, options.output, options.beside, options.check)
        except ModuleNotFoundError as error:
            raise ValueError(f"report needs {error.name}: pip install -r requirements-common.txt") from None
    if options.command == "readme":
        from companion.readme import readme

        return readme(options.check, options.stale)
    from companion.doctor import doctor

    return doctor()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m companion")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what this machine is and reaches, and which techniques run on it")
    show = commands.add_parser("show", help="what was recorded of a technique: answer, tables, evidence")
    show.add_argument("names", nargs="*", metavar="TECHNIQUE", help="without any: list them all with their questions")
    show.add_argument("--record", type=Path, metavar="PATH", help="a record that --json wrote (default: of the H200)")
    show.add_argument("--study", action="store_true", help="its study too")
    show.add_argument("-v", "--verbose", action="store_true", help="every table whole, and the facts")
    export = commands.add_parser("export", help="a technique's kernels as one file that needs torch and triton only")
    export.add_argument("name", metavar="TECHNIQUE")
    export.add_argument("-o", "--output", type=Path, metavar="PATH", help="a file, a folder or - (default: .)")
    export.add_argument("--force", action="store_true", help="replace a file that exists")
    compare = commands.add_parser("compare", help="two records of one topic, row by row; a regression check")
    compare.add_argument("reference", type=Path, metavar="REFERENCE", help="as results/h200/triton_examples.json")
    compare.add_argument("mine", type=Path, metavar="MINE", help="what --json PATH of the same topic wrote")
    compare.add_argument("techniques", nargs="*", metavar="TECHNIQUE", help="only these; all of them by default")
    compare.add_argument("--all", action="store_true", help="every row, not only what differs")
    compare.add_argument(
        "--fail-under", type=ratio, metavar="RATIO",
        help="exit 1 when a speed-up over the baseline is under RATIO times the reference's, or a technique failed",
    )  # fmt: skip
    contribute = commands.add_parser("contribute", help="records of your machine, checked and put into results/")
    contribute.add_argument(
        "records", nargs="+", type=Path, metavar="RECORD", help="what --json PATH wrote, a topic each"
    )
    contribute.add_argument("--folder", metavar="NAME", help="of results/ (default: from the GPU's name)")
    contribute.add_argument("--force", action="store_true", help="replace a record that exists")
    report = commands.add_parser("report", help="the chapter as one page: answers, pictures, kernels, tables")
    report.add_argument(
        "records", nargs="*", type=Path, metavar="RECORD",
        help="what --json PATH wrote, or a folder of that (default: what README shows)",
    )  # fmt: skip
    report.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (default: report.html)")
    report.add_argument(
        "--beside", nargs="+", type=Path, default=[], metavar="MINE", help="records to draw beside these"
    )
    report.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 when docs/index.html is out of date"
    )
    readme = commands.add_parser("readme", help="renew the tables of README.md and docs/ from docstrings and results/")
    readme.add_argument("--check", action="store_true", help="change nothing; exit 1 when they are out of date")
    readme.add_argument("--stale", action="store_true", help="only list what was recorded with older code")
    claims = commands.add_parser("claims", help="renew CLAIMS.md: what the chapter claims, and what was measured of it")
    claims.add_argument("--check", action="store_true", help="change nothing; exit 1 when it is out of date")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 where a check fails; 2, with one sentence, where the command cannot be carried out."""
    options = _parser().parse_args(argv)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (CatalogError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
