"""Runs a plan of faults and prints a table: python -m tests.faults [FAULTS] [SEED]."""

from __future__ import annotations

import collections
import statistics
import sys

from .faulty_run import plan
from .outcomes import inflict, problems, times_of_notice


def main(faults: int = 60, seed: int = 0) -> None:
    rows: dict[str, list[object]] = collections.defaultdict(list)
    wrong: dict[str, list[str]] = collections.defaultdict(list)
    times: dict[str, list[float]] = collections.defaultdict(list)
    for i, fault in enumerate(plan(seed, faults)):
        outcome = inflict(fault)
        key = fault.kind if outcome.hit else "not reached"
        rows[key].append(fault)
        wrong[key] += [f"{fault}: {problem}" for problem in problems(fault, outcome)]
        times[key] += times_of_notice(fault, outcome)
        print(f"{i + 1}/{faults}", end="\r", file=sys.stderr)
    print(f"{'fault':<20}{'runs':>6}{'wrong':>7}   noticed after, ms: median (max)")
    for key, runs in rows.items():
        ms = [1000 * t for t in times[key]]
        seen = f"{statistics.median(ms):.0f} ({max(ms):.0f})" if ms else "-"
        print(f"{key:<20}{len(runs):>6}{len(wrong[key]):>7}   {seen}")
    for problem in (one for some in wrong.values() for one in some):
        print(problem)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
