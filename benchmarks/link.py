"""Network namespaces joined by slow links, one for each rank: two by a wire, more by a switch.

Over loopback, gloo's messages cost more processor time than waiting time, so no message can overlap with
computation. A slow link shows the overlap of messages with the backward pass.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Unavailable(Exception):
    """This machine cannot make the link; the text has the reason."""


@contextmanager
def link(rate: str, ranks: int = 2, delay: str = "") -> Iterator[dict[str, Any]]:
    """Make the links, and take them down at the end.

    Args:
        rate: The rate of each link in each direction, in the notation of `tc`, such as "1gbit".
        ranks: The number of hosts.
        delay: The time that a packet takes, such as "5ms"; it needs the kernel's netem. "": none.

    Yields:
        The keyword arguments for `launch`.

    Raises:
        Unavailable: a tool or a permission is missing.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"`{tool}` is not installed (Debian: apt-get install iproute2)")
    if os.geteuid() != 0:
        raise Unavailable("making network namespaces needs root")
    *spaces, switch = [f"fjoin-bench-{os.getpid()}-{name}" for name in (*range(ranks), "switch")]
    inside = [["ip", "netns", "exec", space] for space in spaces]
    try:
        for space in (*spaces, switch):
            _do("ip", "netns", "add", space)
        if ranks == 2:
            _do("ip", "link", "add", "veth0", "netns", spaces[0], "type", "veth", "peer", "veth1", "netns", spaces[1])
        else:
            _do("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _do("ip", "-n", switch, "link", "set", "bridge", "up")
            for rank, space in enumerate(spaces):
                port = f"port{rank}"
                _do("ip", "link", "add", f"veth{rank}", "netns", space, "type", "veth", "peer", port, "netns", switch)
                _do("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
                _slow(switch, port, rate, "")
        for rank, space in enumerate(spaces):
            _do("ip", "-n", space, "link", "set", "lo", "up")
            _do("ip", "-n", space, "address", "add", f"10.77.0.{rank + 1}/24", "dev", f"veth{rank}")
            _do("ip", "-n", space, "link", "set", f"veth{rank}", "up")
            _slow(space, f"veth{rank}", rate, delay)
        yield {"prefixes": inside, "interfaces": [f"veth{rank}" for rank in range(ranks)]}
    finally:
        for space in (*spaces, switch):  # this also deletes its ends of the links
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)


def _slow(space: str, interface: str, rate: str, delay: str) -> None:
    # The burst must hold a whole segment of 64 KB, and be small compared with a message.
    limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
    if delay:
        limit = ["netem", "rate", rate, "delay", delay, "limit", "20000"]
    _do("tc", "-n", space, "qdisc", "add", "dev", interface, "root", *limit)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
