"""A run's numbers while it trains, and a timeline of all ranks."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist

from ..groups import TIMELINES, Sent, host_name, poll
from ..step import STEP
from ..transforms.axes import bound
from ._metrics import Metrics

Sink: TypeAlias = Callable[[dict[str, float], int], object]


class Show:
    """Gives the numbers of every so many steps to sinks, on rank 0; made by `show`."""

    def __init__(self, every: int, sinks: list[Sink], prefix: str) -> None:
        self._every, self._sinks, self._prefix = every, sinks, prefix
        self._last: tuple[int, float] | None = None

    def __call__(self, metrics: Metrics, more: Mapping[str, float] | None = None) -> None:
        """Show a step, where one is due.

        Reading numbers waits for a device, so nothing is read in other steps.

        Args:
            metrics: Those of the last call.
            more: Other numbers to show with them, such as those of an evaluation.

        Raises:
            NonFinite: on a device: this step was not finite and changed nothing.
        """
        if metrics.rank or not metrics.stepped or (metrics.step + 1) % self._every:
            return
        numbers, now = metrics.as_dict(self._prefix), time.perf_counter()
        if self._last is not None:
            steps, seconds = metrics.step - self._last[0], now - self._last[1]
            numbers[f"{self._prefix}steps_per_s"] = steps / seconds if seconds > 0 else 0.0
        self._last = metrics.step, now
        numbers |= {f"{self._prefix}{name}": float(value) for name, value in (more or {}).items()}
        for sink in self._sinks:
            sink(dict(numbers), metrics.step)


def show(every: int = 20, to: Iterable[Any] = (print,), prefix: str = "") -> Show:
    """Shows the numbers of every so many steps; on rank 0, without a message.

    Args:
        every: The period, in steps.
        to: Where to: `print` for a line; an object with `set_postfix`, such as a tqdm bar; one with
            `add_scalar`, such as a SummaryWriter of TensorBoard; a function `(numbers, step)`, such as `wandb.log`,
            `trackio.log` or `mlflow.log_metrics`.
        prefix: Put in front of each name, such as "train/".

    Returns:
        A `Show`, to be called with the metrics of each step. Its numbers are those of `Metrics.as_dict`, and
        `steps_per_s` since the last time.

    Raises:
        ValueError: `every` is no whole number from 1.
        TypeError: an entry of `to` is none of these.

    >>> from fjoin import transforms as tx
    >>> step = fjoin.train_step(lambda p, x: (p["w"] * x).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.5)))
    >>> state, show = step.init({"w": torch.zeros(1)}), fjoin.show(every=2, to=[lambda numbers, step: print(step, numbers["loss"])])
    >>> for batch in step.join(torch.ones(4)):
    ...     state, metrics = step(state, batch)
    ...     show(metrics)
    1 -0.5
    3 -1.5
    """
    if type(every) is not int or every < 1:
        raise ValueError(f"every must be a whole number from 1, got {every!r}")
    return Show(every, [_sink(one) for one in to], prefix)


def _sink(one: Any) -> Sink:
    if one is print:
        return lambda numbers, step: print(line(numbers, step), flush=True)
    if hasattr(one, "set_postfix"):
        return lambda numbers, step: one.set_postfix({name: f"{value:.4g}" for name, value in numbers.items()})
    if hasattr(one, "add_scalar"):
        return lambda numbers, step: [one.add_scalar(name, value, step) for name, value in numbers.items()]
    if callable(one):
        return one  # type: ignore[no-any-return]
    raise TypeError(
        f"to= takes print, a progress bar with set_postfix, a writer with add_scalar, or a function (numbers, step), got {one!r}"
    )


def line(numbers: Mapping[str, float], step: int) -> str:
    """One line of text."""
    return f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())


_KEPT = 4096  # events in memory; more are written
_JOIN_S = 30.0  # how long rank 0 waits for the parts of the others
_LOOK_S = 0.05
_COUNTS: dict[tuple[int, str], int] = {}  # thread and path -> the traces so far


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records a timeline of this rank's steps and messages within a with block; rank 0 joins those of all ranks in one
    file.

    Open it in https://ui.perfetto.dev or chrome://tracing. Each rank is a process in it, with the rows

    - *program*: each step with its forward pass, backward pass, waits, optimizer, and whatever the pipeline does behind
      it; the time between steps;
    - *waiting*: the host waits for a message;
    - *messages*: each message from its launch to the end of the wait for it, by its bucket or stage, with its
      collective, axis, dtype and bytes.

    Where no trace is recorded, and torch.profiler runs, it shows the same names, as `fjoin/forward`. All times are the
    host's: on a device a kernel may run later.

    Each rank writes a part beside the file while it runs. Rank 0 waits for the others' at the end, and leaves those
    that it does not see, such as those of hosts that do not share the folder.

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
    parts = [Path(f"{Path(path)}.{number}.rank-{other}") for other in range(ranks)]
    TIMELINES[key] = line = TimelineWriter(parts[rank], rank)
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


class TimelineWriter:
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
        clocks = {"monotonic_ns": time.perf_counter_ns(), "wall_ns": time.time_ns(), "host": host_name()}
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
    """Join the parts of ranks that exist, or come in time, in one file, with the times of all hosts on the clock of
    rank 0's.
    """
    end, first, found = time.monotonic() + wait_s, None, 0
    with open(f"{path}.new", "w", encoding="utf-8") as out:
        out.write('{"traceEvents": [\n')
        for part in parts:
            if not poll(part.exists, end - time.monotonic(), longest_s=_LOOK_S):
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
    """What to add to the times of a rank: nothing on one host, whose monotonic clock is common; else by the hosts' wall
    clocks.
    """
    if clocks["host"] == first["host"]:
        return 0.0
    own, other = (one["wall_ns"] - one["monotonic_ns"] for one in (clocks, first))
    return float(own - other) / 1e3


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
