"""Streaming DiLoCo in int4 between two hosts, near and far: a link of 1 Gbit/s, and one of 10 Mbit/s with 20 ms.

    python benchmarks/far.py [rounds]

It prints tokens per second of one rank on both links, in turns, and their ratio. 48 steps are a period, in which four
fragments are sent; each message may take 12 steps.
"""

from __future__ import annotations

import statistics
import sys

from launch import combine, launch
from link import link

MODEL, VARIANT, TOKENS = "10m window", "ours int4 stream", 128
LINKS = {"1 Gbit/s": {"rate": "1gbit"}, "10 Mbit/s, 20 ms": {"rate": "10mbit", "delay": "20ms"}}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    found: dict[str, list[float]] = {name: [] for name in LINKS}
    for _ in range(rounds):
        for name, settings in LINKS.items():
            with link(**settings) as where:  # type: ignore[arg-type]
                got = combine(launch("time", MODEL, 2, [VARIANT], **where))
            found[name] += [TOKENS / seconds for seconds in got["wall"][VARIANT]]
            print(f"{name}: {', '.join(f'{v:.0f}' for v in found[name])} tokens/s", flush=True)
    near, far = (statistics.median(values) for values in found.values())
    print(f"far / near: {far / near:.3f}")


if __name__ == "__main__":
    main()
