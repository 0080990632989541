"""The command `quadriga`: `python -m quadriga --help`."""

from __future__ import annotations

import sys

from ._quadriga import command


def main() -> int:
    """Runs the command with the arguments of this process."""
    return command(["quadriga", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
