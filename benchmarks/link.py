"""Two network namespaces joined by a slow link: rank 0 lives in one, rank 1 in the other.

Over loopback, gloo's messages cost more processor time than waiting time, so nothing can hide behind
computation. A slow link is where the overlap of messages with the backward pass shows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Unavailable(Exception):
    """This machine cannot make the link; the text says why."""


@contextmanager
def link(rate: str) -> Iterator[dict[str, Any]]:
    """Make the link, and take it down at the end.

    Args:
        rate: As `tc` writes it, such as "1gbit".

    Yields:
        The keyword arguments for `launch`.

    Raises:
        Unavailable: a tool or a right is missing.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"`{tool}` is not installed (Debian: apt-get install iproute2)")
    if os.geteuid() != 0:
        raise Unavailable("making network namespaces needs root")
    spaces = [f"fjoin-bench-{os.getpid()}-{rank}" for rank in range(2)]
    inside = [["ip", "netns", "exec", space] for space in spaces]
    try:
        for space in spaces:
            _do("ip", "netns", "add", space)
        _do("ip", "link", "add", "veth0", "netns", spaces[0], "type", "veth", "peer", "veth1", "netns", spaces[1])
        for rank, enter in enumerate(inside):
            _do(*enter, "ip", "link", "set", "lo", "up")
            _do(*enter, "ip", "address", "add", f"10.77.0.{rank + 1}/24", "dev", f"veth{rank}")
            _do(*enter, "ip", "link", "set", f"veth{rank}", "up")
            # The burst must hold a whole segment of 64 KB, and stay small against a message.
            limit = ["rate", rate, "burst", "256kb", "latency", "50ms"]
            _do(*enter, "tc", "qdisc", "add", "dev", f"veth{rank}", "root", "tbf", *limit)
        yield {"prefixes": inside, "address": "10.77.0.1", "interfaces": ["veth0", "veth1"]}
    finally:
        for space in spaces:  # which takes its end of the link along
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
