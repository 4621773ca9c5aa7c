"""Processes of a test's own, for what must not happen in the shared pool: kills, stops, time-outs."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue as queues
import socket
import sys
import time
from collections.abc import Callable
from typing import Any


def _start(function: Callable[..., Any], rank: int, n: int, port: int, results: Any, args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)

    def report(value: Any) -> None:
        results.put((rank, time.monotonic(), value))

    function(rank, report, *args)
    results.close()
    results.join_thread()
    os._exit(0)


class Ranks:
    """n fresh processes that run `function(rank, report, *args)`; `report(value)` sends to the test.

    The times of the reports are of one clock, so that they can be compared.
    """

    def __init__(self, n: int, function: Callable[..., Any], *args: Any) -> None:
        context = mp.get_context("spawn")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self._results = context.Queue()
        self.processes = [
            context.Process(target=_start, args=(function, rank, n, port, self._results, args), daemon=True)
            for rank in range(n)
        ]
        for process in self.processes:
            process.start()

    def next(self, timeout_s: float = 60.0) -> tuple[int, float, Any]:
        """The next report: (rank, seconds of the monotonic clock, value)."""
        try:
            out: tuple[int, float, Any] = self._results.get(timeout=timeout_s)
            return out
        except queues.Empty:
            raise AssertionError(
                f"no report within {timeout_s} s; alive: {[p.is_alive() for p in self.processes]}"
            ) from None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._results.close()


sys.path.insert(0, os.path.dirname(__file__))
