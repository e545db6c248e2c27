"""`python -m harness doctor` and `python -m harness readme [--check]`."""

import argparse
import sys

from harness import cli
from harness.catalog import CatalogError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="what this machine is, and which techniques run, are interpreted, or are skipped"
    )
    readme = commands.add_parser("readme", help="renew the tables of README.md from the docstrings and results/")
    readme.add_argument("--check", action="store_true", help="change nothing; exit 1 when they are out of date")
    options = parser.parse_args()
    try:
        return cli.doctor() if options.command == "doctor" else cli.readme(options.check)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return cli.INTERRUPTED
    except (CatalogError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return cli.USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
