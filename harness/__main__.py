"""`python -m harness COMMAND` has a successor, which it names."""

import sys

MOVED = ("doctor", "compare", "readme")

if __name__ == "__main__":
    command = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] in MOVED else "--help"
    print(f"error: python -m harness is now: python -m companion {command}", file=sys.stderr)
    sys.exit(2)
