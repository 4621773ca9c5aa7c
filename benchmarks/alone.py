"""The cost of a step in processes that have run nothing else: page faults, CPU time, memory.

    python benchmarks/alone.py [VARIANT ...]

The interleaved variants of `run.py` warm up each other's memory; here each has two processes of its own, over loopback.
"""

from __future__ import annotations

import sys

from launch import launch

STEPS = 30
VARIANTS = ("ddp", "ddp bf16 5", "ours", "ours bf16", "ours int8", "ours int8, pages given back")


def main() -> None:
    print(f"{'variant':30s} {'page faults':>11s} {'user ms':>8s} {'system ms':>9s} {'peak MB':>8s}")
    for variant in sys.argv[1:] or VARIANTS:
        ranks = launch("alone", "10m", STEPS, [variant])
        faults, user, system, peak = (max(rank[key] for rank in ranks) for key in ("faults", "user", "system", "peak"))
        print(f"{variant:30s} {faults:11.0f} {user * 1e3:8.1f} {system * 1e3:9.1f} {peak / 1e6:8.0f}", flush=True)


if __name__ == "__main__":
    main()
