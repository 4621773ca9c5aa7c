"""Which processes can share memory: those of one host and one user, where the system allows it."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import secrets
import socket
import sys

from ._packets import INLINE_BYTES, send


@functools.cache
def can_share() -> bool:
    """Whether this process can share memory and sockets without a name: on Linux, unless a sandbox or a limit forbids it."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return False
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:  # it counts shared memory too
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.bind(f"\0fjoin-{secrets.token_hex(16)}")
        _try_packet()
    except OSError:
        return False
    return True


def _try_packet() -> None:
    """Send a descriptor of shared memory, in a packet as large as any."""
    with contextlib.ExitStack() as opened:
        for fd in (os.eventfd(0), memory := os.memfd_create("fjoin")):
            opened.callback(os.close, fd)
        os.posix_fallocate(memory, 0, 1)
        ends = [opened.enter_context(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
        send(ends[0], [b"x" * 2 * INLINE_BYTES], memory)
        data, rights, _, _ = ends[1].recvmsg(3 * INLINE_BYTES, socket.CMSG_SPACE(4), socket.MSG_DONTWAIT)
        for _, _, fds in rights:
            opened.callback(os.close, int.from_bytes(fds[:4], sys.byteorder))
        if len(data) != 2 * INLINE_BYTES or not rights:
            raise OSError("the packet has not arrived whole")


def host_name() -> str:
    """A name for this host, with the network, the user and the name spaces of this process."""
    parts = []
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "user")]
    return " ".join([*(parts or [socket.gethostname()]), f"uid {os.geteuid()}"])
