"""A timeline of all ranks, as Chrome and Perfetto show it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..groups.axes._traffic import TIMELINES, Sent
from ..training.passes._spans import STEP
from ..transforms._axis_env import bound

_KEPT = 4096  # events in memory; more are written
_JOIN_S = 30.0  # how long rank 0 waits for the parts of the others
_LOOK_S = 0.05
_COUNTS: dict[tuple[int, str], int] = {}  # thread and path -> the traces so far


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records a timeline of this rank's steps and messages within a with block; rank 0 joins those of all ranks in one file.

    Open it in https://ui.perfetto.dev or chrome://tracing. Each rank is a process in it, with the rows

    - *program*: each step with its forward pass, backward pass, waits, optimizer, and whatever the pipeline does behind it; the time
      between steps;
    - *waiting*: the host waits for a message;
    - *messages*: each message from its launch to the end of the wait for it, by its bucket or stage, with its collective, axis,
      dtype and bytes.

    Where no trace is recorded, and torch.profiler runs, it shows the same names, as `fjoin/forward`. All times are the host's: on
    a device a kernel may run later.

    Each rank writes a part beside the file while it runs. Rank 0 waits for the others' at the end, and leaves those that it does
    not see, such as those of hosts that do not share the folder.

    Args:
        path: The file; its folder must exist.

    Raises:
        OSError: the file cannot be written; of a disk that is full, at the end.
        RuntimeError: a trace is being recorded already.

    >>> import json, pathlib, tempfile
    >>> from fjoin import transforms as tx
    >>> step = fjoin.train_step(lambda p, x: (p["w"] * x).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.5)))
    >>> state = step.init({"w": torch.zeros(1)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with fjoin.trace(f"{folder}/run.json"):
    ...         for batch in step.join(torch.ones(2)):
    ...             state, metrics = step(state, batch)
    ...     events = json.loads(pathlib.Path(folder, "run.json").read_text())["traceEvents"]
    >>> [event["name"] for event in events if event["ph"] == "X" and event["name"] in ("step", "forward")]
    ['forward', 'step', 'forward', 'step']
    """
    axes = {name: axis for name, axis in bound().items() if axis.simulated}
    rank, ranks = _place(axes)
    key, wait_s = threading.get_ident() if axes else 0, 0.0
    if key in TIMELINES:
        raise RuntimeError("a trace is being recorded already; leave its with block first")
    # A rank may begin the next trace of this name before rank 0 has joined the parts of this one.
    _COUNTS[(key, str(path))] = number = _COUNTS.get((key, str(path)), 0) + 1
    parts = [_part(Path(path), number, other) for other in range(ranks)]
    TIMELINES[key] = line = Recorder(parts[rank], rank)
    try:
        yield
        wait_s = _JOIN_S
    finally:
        del TIMELINES[key]
        line.close()
        if axes:  # no simulated rank may wait for another here, so the last one joins the parts
            if all(part.exists() for part in parts):
                join(Path(path), parts, 0.0)
        elif rank == 0:
            join(Path(path), parts, wait_s)


class Recorder:
    """Writes the events of one rank, in the form of Chrome's traces.

    Args:
        part: The file of this rank.
    """

    def __init__(self, part: Path, rank: int) -> None:
        self._part, self._rank, self._events = part, rank, list[dict[str, Any]]()
        self._part.unlink(missing_ok=True)
        self._file = open(f"{self._part}.new", "w", encoding="utf-8")
        self._lock, self._number, self._last_ns = threading.Lock(), 0, 0
        self._error: OSError | None = None
        self._meta("process_name", 0, name=f"rank {rank}")
        self._meta("process_sort_index", 0, sort_index=rank)
        for row, name in enumerate(("program", "waiting")):
            self._meta("thread_name", row, name=name)
        clocks = {"monotonic_ns": time.perf_counter_ns(), "wall_ns": time.time_ns(), "boot": _boot()}
        self._add({"ph": "M", "name": "clocks", "pid": rank, "args": clocks})

    def _meta(self, what: str, row: int, **args: Any) -> None:
        self._add({"ph": "M", "name": what, "pid": self._rank, "tid": row, "args": args})

    def _add(self, *events: dict[str, Any]) -> None:
        with self._lock:
            self._events += events
            if len(self._events) >= _KEPT:
                self._write()

    def _write(self) -> None:
        events, self._events = self._events, []
        try:
            if self._error is None:
                self._file.writelines(json.dumps(event) + "\n" for event in events)
                self._file.flush()
        except OSError as error:  # raised at the end: a full disk does not cost the run
            self._error = error

    def _row(self, row: int, name: str, begun_ns: int, ended_ns: int, **args: Any) -> dict[str, Any]:
        event = {"ph": "X", "name": name, "pid": self._rank, "tid": row, "ts": begun_ns / 1e3}
        return event | {"dur": (ended_ns - begun_ns) / 1e3, "args": args}

    def span(self, name: str, begun_ns: int, ended_ns: int) -> None:
        """A part of the program has ended."""
        self._add(self._row(0, name, begun_ns, ended_ns))
        if name == STEP:
            if self._last_ns:
                self._add(self._row(0, "between steps", self._last_ns, begun_ns))
            self._last_ns = ended_ns

    def message(self, sent: Sent, begun_ns: int, ended_ns: int) -> None:
        """The wait for a message has ended."""
        message = sent.message
        name = f"{sent.stage}: {message.collective}({message.axis})"
        facts = message._asdict() | {"dtype": str(message.dtype).removeprefix("torch."), "stage": sent.stage}
        self._number += 1
        ends = {"cat": "message", "name": name, "pid": self._rank, "id": f"{self._rank}.{self._number}"}
        self._add(
            self._row(1, name, begun_ns, ended_ns, **facts, launched_ns=sent.launched_ns),
            ends | {"ph": "b", "ts": sent.launched_ns / 1e3, "args": facts},
            ends | {"ph": "e", "ts": ended_ns / 1e3},
        )

    def close(self) -> None:
        """Write what is left; the part then has its name.

        Raises:
            OSError: something could not be written.
        """
        with self._lock:
            self._write()
            try:
                self._file.close()
            except OSError as error:  # what is still in its buffer
                self._error = self._error or error
        if self._error is not None:
            raise self._error
        os.replace(f"{self._part}.new", self._part)


def join(path: Path, parts: Sequence[Path], wait_s: float) -> None:
    """Join the parts of ranks that exist, or come in time, in one file, with the times of all hosts on the clock of rank 0's."""
    end, first, found = time.monotonic() + wait_s, None, 0
    with open(f"{path}.new", "w", encoding="utf-8") as out:
        out.write('{"traceEvents": [\n')
        for part in parts:
            while not part.exists() and time.monotonic() < end:
                time.sleep(_LOOK_S)
            if not part.exists():
                continue
            shift_us, found = 0.0, found + 1
            with open(part, encoding="utf-8") as lines:
                for line in lines:
                    event = json.loads(line)
                    if event["name"] == "clocks":
                        first = first or event["args"]
                        shift_us = _shift_us(event["args"], first)
                    elif "ts" in event:
                        event["ts"] += shift_us
                    out.write(json.dumps(event) + ",\n")
            part.unlink()
        ends = {"ph": "M", "name": "ranks", "pid": 0, "args": {"found": found, "of": len(parts)}}
        out.write(f"{json.dumps(ends)}\n]}}\n")
    os.replace(f"{path}.new", path)


def _shift_us(clocks: dict[str, Any], first: dict[str, Any]) -> float:
    """What to add to the times of a rank: nothing on one host, whose monotonic clock is common; else by the hosts' wall clocks."""
    if clocks["boot"] == first["boot"]:
        return 0.0
    own, other = (one["wall_ns"] - one["monotonic_ns"] for one in (clocks, first))
    return float(own - other) / 1e3


def _part(path: Path, number: int, rank: int) -> Path:
    return path.with_name(f"{path.name}.{number}.rank-{rank}")


def _boot() -> str:
    """What two processes on one host, since it was started, have in common."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _place(axes: Any) -> tuple[int, int]:
    """This rank, and the number of ranks."""
    rank, ranks = 0, 1
    for axis in axes.values():  # of simulated ranks; the last axis varies fastest
        rank, ranks = rank * axis.size + int(axis.index()), ranks * axis.size
    if not axes and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if not axes:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return rank, ranks
