"""python -m fjoin.checkpoint show|verify|export: exit status 0, 1 for problems, 2 for errors."""

from __future__ import annotations

import argparse
import sys

from .._errors import CheckpointError
from ._tools import export, show, verify


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fjoin.checkpoint",
        description="show: print the step and its leaves; verify: read every byte; export: write the parameters to one safetensors file.",
    )
    parser.add_argument("command", choices=("show", "verify", "export"))
    parser.add_argument("path", help="the folder of a run, whose newest step is meant, or of a step")
    parser.add_argument("out", nargs="?", help="of export, the new file")
    given = parser.parse_args(arguments)
    if (given.command == "export") != (given.out is not None):
        parser.error("export takes a path and a new file, the other commands take a path")
    try:
        if given.command == "show":
            print(show(given.path))
        elif given.command == "export":
            export(given.path, given.out)
        else:
            problems = verify(given.path)
            print("\n".join(problems or ["no problems"]))
            return int(bool(problems))
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
