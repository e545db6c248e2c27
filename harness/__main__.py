"""`python -m harness doctor`, `python -m harness readme [--check]`, `python -m harness compare REFERENCE MINE`."""

import argparse
import math
import sys
from pathlib import Path

from harness import cli
from harness.catalog import CatalogError


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0; 0.95 lets a ratio be 5 % lower")
    return value


def _compare(options: argparse.Namespace) -> int:
    from harness.compare_records import compare_records

    return compare_records(options.reference, options.mine, options.techniques, options.all, options.fail_under)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor", help="what this machine is, and which techniques run, are interpreted, or are skipped"
    )
    doctor.set_defaults(run=lambda options: cli.doctor())
    readme = commands.add_parser(
        "readme", help="renew the tables of README.md and docs/ from the docstrings and results/"
    )
    readme.add_argument("--check", action="store_true", help="change nothing; exit 1 when they are out of date")
    readme.set_defaults(run=lambda options: cli.readme(options.check))
    what = (
        "put a record of a run next to the reference, technique by technique; say what differs by more than the spread"
    )
    compare = commands.add_parser(
        "compare", help=what, description=f"{what[0].upper()}{what[1:]}.",
        epilog="Exit status: 0 nothing is under RATIO, or none was given; 1 something fails; 2 wrong usage, "
        "or records that cannot be compared.",
    )  # fmt: skip
    compare.add_argument("reference", type=Path, metavar="REFERENCE", help="as results/h200/triton_examples.json")
    compare.add_argument("mine", type=Path, metavar="MINE", help="what --json PATH of the same topic wrote")
    compare.add_argument("techniques", nargs="*", metavar="technique", help="only these; all of them by default")
    compare.add_argument("--all", action="store_true", help="every row and fact, not only what differs")
    compare.add_argument(
        "--fail-under", type=_ratio, metavar="RATIO",
        help="exit 1 when a speed-up over the baseline is under RATIO times the reference's, beyond the spread; "
        "or when a technique failed, or passed in the reference and not in mine, or left out what is held",
    )  # fmt: skip
    compare.set_defaults(run=_compare)
    options, more = parser.parse_known_args()
    if more and (options.command != "compare" or any(word.startswith("-") for word in more)):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:  # techniques that are named after an option
        options.techniques += more
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return cli.INTERRUPTED
    except (CatalogError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return cli.USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
