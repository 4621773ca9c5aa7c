"""Streaming DiLoCo in int4 between two hosts, near and far: a link of 1 Gbit/s, and one of 10 Mbit/s.

The far link also has a delay of 20 ms, where the kernel can make one (`netem`).

    python benchmarks/far.py [rounds]

It prints tokens per second of one rank on both links, in turns, and their ratio. 48 steps are a period, in which four
fragments are sent; each message may take 12 steps.
"""

from __future__ import annotations

import statistics
import sys

from launch import combine, launch
from link import Unavailable, link

MODEL, VARIANT, TOKENS = "10m window", "ours int4 stream", 128
NEAR, FAR = {"rate": "1gbit"}, {"rate": "10mbit", "delay": "20ms"}


def possible(settings: dict[str, str]) -> dict[str, str]:
    """These settings of a link, without the delay where the kernel has none."""
    try:
        with link(**settings):  # type: ignore[arg-type]
            return settings
    except Unavailable as reason:
        print(f"no delay: {reason}", file=sys.stderr)
        return {"rate": settings["rate"]}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    links = {" ".join(settings.values()): settings for settings in (NEAR, possible(FAR))}
    found: dict[str, list[float]] = {name: [] for name in links}
    for _ in range(rounds):
        for name, settings in links.items():
            with link(**settings) as where:  # type: ignore[arg-type]
                got = combine(launch("time", MODEL, 2, [VARIANT], **where))
            found[name] += [TOKENS / seconds for seconds in got["wall"][VARIANT]]
            print(f"{name}: {', '.join(f'{v:.0f}' for v in found[name])} tokens/s", flush=True)
    near, far = (statistics.median(values) for values in found.values())
    print(f"far / near: {far / near:.3f}")


if __name__ == "__main__":
    main()
