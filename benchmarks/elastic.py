"""How long a run stands still when a rank dies and when one comes, and what its loop costs without deaths.

    python benchmarks/elastic.py [--runs 20] [--out benchmarks/RESULTS_ELASTIC.md]

4 ranks of one host train a small model. A random one is killed at a random moment of the loop. The first number is the
time from the kill to the next step that the others have taken; the second from the start of a new process, which has
imported torch and fjoin, to its first step. The last ones are steps of 2 ranks in the loop of the members and in a
plain loop, and the messages of both.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from tests.generations.runs import Options, running

RANKS = 4


def stops(transport: str, seed: int) -> tuple[float, float]:
    """(seconds from a kill to the next step, seconds from the start of a process to its first step)."""
    chance = random.Random(seed)
    options = Options(ranks=RANKS, transport=transport, epochs=30, pause_s=0.02)
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), options) as run:
        for _ in range(RANKS):
            run.start()
        run.wait("of", 8 * RANKS)
        time.sleep(chance.uniform(0.0, 0.3))
        killed = time.monotonic()
        run.processes[chance.randrange(RANKS)].kill()
        run.wait("generation", 2 * RANKS - 1)  # the others have resumed
        started = time.monotonic()
        run.start()
        run.finish()
        lines = [line for line in run.lines() if "g" in line and "step" in line]
        again = min(line["time"] for line in lines if line["ranks"] < RANKS)
        first = min(line["time"] for line in lines if line["process"] == RANKS)
    return again - killed, first - started


def loops(transport: str) -> dict[str, tuple[float, int, int]]:
    """Loop -> (median seconds of a step, messages, steps)."""
    options = Options(ranks=2, transport=transport, epochs=40, program="count")
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), options) as run:
        run.start()
        run.start()
        run.finish()
        found = [line for line in run.lines() if "loop" in line and line["process"] == 0]
    return {one["loop"]: (statistics.median(one["seconds"]), one["sent"], len(one["seconds"])) for one in found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [
        "| transport | kill to the next step, ms: median (range) | a newcomer's first step, ms | a step, ms | messages |"
    ]
    rows.append("| --- | --- | --- | --- | --- |")
    for transport in ("gloo", "shared"):
        pairs = [stops(transport, seed) for seed in range(arguments.runs)]
        shown = [
            f"{1e3 * statistics.median(times):.0f} ({1e3 * min(times):.0f} to {1e3 * max(times):.0f})"
            for times in zip(*pairs, strict=True)
        ]
        found = loops(transport)
        steps = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, (seconds, *_) in found.items())
        sent = ", ".join(f"{name} {sent} in {count} steps" for name, (_, sent, count) in found.items())
        rows.append(f"| {transport} | {shown[0]} | {shown[1]} | {steps} | {sent} |")
        print(rows[-1], flush=True)
    if arguments.out:
        head = f"# Ranks that die and come\n\n`python benchmarks/elastic.py --runs {arguments.runs}`: {RANKS} ranks of one host.\n\n"
        arguments.out.write_text(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
