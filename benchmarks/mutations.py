"""Breaks one line of the library at a time, and says what notices it.

    python benchmarks/mutations.py                      all lines of mutations.json, by the tests that each row names
    python benchmarks/mutations.py fjoin/step           those of some rooms
    python benchmarks/mutations.py --tests ../before    by the tests of another checkout
    python benchmarks/mutations.py --whole              by the whole suite where the tests of the room notice nothing

Each line is broken in a copy of the checkout. The named tests run first, then those beside the room, until one fails. At the end:
the lines that are noticed in each room. The exit status is 1 where a room has fewer than nine of ten.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS: list[dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text())
# The tests beside a room, where they are not in a folder of its name.
BESIDE = {
    "fjoin": "tests/training tests/quantization tests/remat tests/ddp",
    "fjoin/records": "tests/training tests/checkpoint tests/groups tests/uneven",
    "fjoin/buckets": "tests/reducer tests/training tests/devices",
    "fjoin/step": "tests/reducer tests/training tests/ddp",
    "fjoin/testing": "tests/transforms",
    "fjoin/uneven": "tests/uneven tests/groups",
    "transforms": "tests/transforms/random tests/transforms",
    "transforms/averaging": "tests/transforms/local_sgd tests/training",
    "transforms/base": "tests/transforms",
    "transforms/combinators": "tests/transforms tests/training",
    "transforms/layout": "tests/transforms tests/reducer",
    "transforms/pipelines": "tests/transforms tests/reducer",
    "transforms/reductions": "tests/transforms",
    "transforms/rematerialization": "tests/transforms/remat tests/remat",
}
SECONDS = 1200  # a run that takes longer hangs


def beside(room: str) -> list[str]:
    folder = f"tests/{room}" if room.startswith("transforms/") else f"tests/{room.removeprefix('fjoin/')}"
    return BESIDE.get(room, folder).split()


def copied(to: Path, tests: Path) -> None:
    """Copy the files that git knows, or would add, to a folder; those of tests from another checkout."""
    for root in dict.fromkeys((ROOT, tests)):
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0"):
            if name and (root / name).exists() and (tests if name.startswith("tests/") else ROOT) == root:
                (to / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, to / name, follow_symlinks=False)


def failed(at: Path, tests: list[str]) -> str:
    """The first test that fails, or "" where none does."""
    tests = [test for test in tests if test and (at / test.split("::")[0]).exists()]
    if not tests:
        return ""
    environment = os.environ | {"PYTHONPATH": str(at), "OMP_NUM_THREADS": "1"}
    options = "-q -x -p no:cacheprovider --no-header -n 2 --dist worksteal".split()
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        ran = subprocess.run(command, cwd=at, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "a hang"
    said = ran.stdout + ran.stderr
    if ran.returncode in (0, 5) or "ERROR: not found" in said:
        return ""
    if ran.returncode == 4 and "while loading conftest" not in said:
        raise RuntimeError(f"pytest could not run {tests}: {said[-2000:]}")
    lines = [line.split(" - ")[0] for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else f"exit status {ran.returncode}"


def noticed(at: Path, row: dict[str, str], whole: bool) -> str:
    """What notices a broken line; "" for nothing."""
    path = at / row["file"]
    text = path.read_text()
    assert text.count(row["line"]) == 1, f"{row['file']} has {row['line']!r} {text.count(row['line'])} times"
    path.write_text(text.replace(row["line"], row["broken"]))
    try:
        runs = [row["tests"].split(), beside(row["room"]), *([["tests"]] if whole else [])]
        return next(filter(None, (failed(at, tests) for tests in runs)), "")
    finally:
        path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*")
    parser.add_argument("--tests", type=Path, default=ROOT)
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args()
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(folder), given.tests.resolve())
        if found := failed(Path(folder), ["tests/test_repository.py::test_heavy_modules_are_imported_on_first_use"]):
            raise RuntimeError(f"with nothing broken: {found}")
        for row in ROWS:
            if given.rooms and row["room"] not in given.rooms:
                continue
            begun, what = time.monotonic(), noticed(Path(folder), row, given.whole)
            counts[row["room"]][not what] += 1
            seconds = time.monotonic() - begun
            print(f"{what or 'NOT NOTICED'} | {row['file']} | {row['broken'].strip()} | {seconds:.0f} s", flush=True)
    for room, (yes, no) in sorted(counts.items()):
        print(f"{room}: {yes} of {yes + no}")
    return int(any(yes < 9 * no for yes, no in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
