"""python -m fjoin.checkpoint show|verify|export: exit status 0, 1 for problems, 2 for errors."""

from __future__ import annotations

import argparse
import sys

from .._errors import CheckpointError
from ._tools import export, show, verify


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fjoin.checkpoint", description="Look at the checkpoints of a run.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about, more in (
        ("show", "print the step and its leaves", ()),
        ("verify", "read every byte of a step", ()),
        ("export", "write the parameters to one safetensors file", ("out",)),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument("path", help="the folder of a run, whose newest step is meant, or of a step")
        for one in more:
            command.add_argument(one)
    given = parser.parse_args(arguments)
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
