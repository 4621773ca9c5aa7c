"""Processes of a test's own, for events that must not happen in the shared pool: kills, stops, time-outs."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

# New processes are forked from one that has imported torch and fjoin and done nothing else.
context = multiprocessing.get_context("forkserver")
# Optimizers and modules of torch import other modules when they are first used; these imports take longest.
context.set_forkserver_preload(["fjoin", "torch._dynamo", "torch.distributed.optim", "torch.distributed.fsdp"])


def _start(function: Callable[..., Any], rank: int, n: int, test: Connection[Any, Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # as in the pool
    if rank == 0:  # a port that was free a moment ago may be taken: the store takes one and says which
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        test.send(store.port)
    os.environ.setdefault("FJOIN_TRANSPORT", "gloo")
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(test.recv()), TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip

    def report(value: Any) -> None:
        test.send((rank, time.monotonic(), value))

    function(rank, report, *args)
    with contextlib.suppress(EOFError):  # until the test kills this process, or is gone itself
        test.recv()


class Ranks:
    """n fresh processes that run `function(rank, report, *args)`; `report(value)` has sent when it returns.

    A process stays alive after its function has returned, until the end of the block. The times of the reports
    are of one clock, so that they can be compared.
    """

    def __init__(self, n: int, function: Callable[..., Any], *args: Any) -> None:
        self.processes, self._reports = [], []
        for rank in range(n):
            here, there = context.Pipe()
            process = context.Process(target=_start, args=(function, rank, n, there, args), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self._reports.append(here)
        port = self._reports[0].recv()
        for report in self._reports:
            report.send(port)

    def next(self, timeout_s: float = 60.0) -> tuple[int, float, Any]:
        """The next report: (rank, seconds of the monotonic clock, value)."""
        end = time.monotonic() + timeout_s
        while ready := wait(self._reports, end - time.monotonic()) if self._reports else []:
            try:
                out: tuple[int, float, Any] = ready[0].recv()
                return out
            except EOFError:  # its process has ended
                self._reports.remove(ready[0])
        raise AssertionError(f"no report within {timeout_s} s; alive: {[p.is_alive() for p in self.processes]}")

    def after(self, moment: str, reports: int) -> list[tuple[int, float, Any]]:
        """So many reports (rank, seconds since one rank reported `moment`, value), by rank."""
        seen = sorted((self.next() for _ in range(reports + 1)), key=lambda report: report[:2])
        (start,) = (at for _, at, value in seen if value == moment)
        return [(rank, at - start, value) for rank, at, value in seen if value != moment]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for connection in self._reports:
            connection.close()


def reports(n: int, function: Callable[..., Any], *args: Any, of: int | None = None) -> list[Any]:
    """What n such processes report, or so many of them, by rank."""
    with Ranks(n, function, *args) as run:
        return [value for *_, value in sorted((run.next(120) for _ in range(of or n)), key=lambda report: report[0])]


def programs(
    command: list[str], environments: list[dict[str, str]], timeout_s: float = 120
) -> list[tuple[str, str, int]]:
    """The outputs, errors and exit statuses of a program that is started once in each environment."""
    started = [
        subprocess.Popen(command, env=os.environ | own, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for own in environments
    ]
    try:
        return [(*process.communicate(timeout=timeout_s), process.returncode) for process in started]
    finally:
        for process in started:
            process.kill()


KEPT: list[Any] = []  # what lives as long as its process


class End(NamedTuple):
    """How a function ends: the name of its error or "fine", the error's text, the rank that it names, the result."""

    kind: str = "fine"
    text: str = ""
    rank: Any = None
    value: Any = None


def end_of(run: Callable[[], Any]) -> End:
    try:
        return End(value=run())
    except BaseException as error:
        return End(type(error).__name__, str(error), getattr(error, "rank", None))


def _report_end(rank: int, report: Callable[[Any], None], program: Callable[..., Any], args: tuple[Any, ...]) -> None:
    report(end_of(lambda: program(rank, *args)))


def ends(n: int, program: Callable[..., Any], *args: Any, left: int | None = None) -> list[End]:
    """The ends of `program(rank, *args)` on n ranks, or on those of whom so many are left, by rank. None may take a minute."""
    return reports(n, _report_end, program, args, of=left)


def script(
    rank: int, report: Callable[[Any], None], path: Path, arguments: Sequence[str] = (), change: str = ""
) -> None:
    """Run a script as the main one: its exit status, and its output. `change` names a number of its reference that is another one."""
    sys.path.insert(0, str(path.parent))
    sys.argv = [path.name, *arguments]
    if change:
        reference = importlib.import_module("reference")
        setattr(reference, change, 1.01 * getattr(reference, change))
    code: Any = None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
    report((code, out.getvalue()))
