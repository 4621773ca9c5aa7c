"""Runs whose ranks die and come: each process follows a plan of deaths, and writes a ledger; its replay in the simulator."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from tests.ranks import context
from tests.traffic import watched

WIDTH, DEPTH, SAMPLES, BATCH = 16, 3, 190, 24  # uneven: the last step of an epoch has 22 samples
STEPS = -(-SAMPLES // BATCH)  # of an epoch, without windows
X, Y = (torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
PARAMS = {f"w{i}": torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(i)) / 4 for i in range(DEPTH)}
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
LOSE = 0  # in place of a signal: an error as that of a lost rank
ANY = -1  # generation

# What kills or stops a process: (place, generation or ANY, count there, signal).
Plan = Sequence[tuple[str, int, int, int]]
At = Callable[[str], None]  # a place of the program, which may kill its process


class Options(NamedTuple):
    """The options of a run."""

    ranks: int = 3
    at_least: int = 1
    transport: str = "shared"
    timeout_s: float = 20.0
    epochs: int = 2
    accumulate: int = 1
    pause_s: float = 0.0
    folder: str = ""  # of checkpoints
    program: str = ""  # what else is done, see `train`


def _stage(at: At, name: str) -> tx.Transform:
    def update(tree: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        at(name)
        return tree, state

    return tx.Transform(lambda params: (), update)


def make_step(mesh: Any, options: Options, at: At = lambda place: None) -> Any:
    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        at("forward")
        x, y = batch
        for i, w in enumerate(params.values()):
            x = torch.tanh(x @ w)
            if x.requires_grad:
                x.register_hook(lambda grad, i=i: at(f"backward {i}"))
        at("loss")
        mean = buffers["mean"] * 0.9 + x.detach().mean(0) * 0.1
        return (x - y).square().mean(), None, {"mean": mean}

    def weight(batch: Any) -> int:
        at("weight")
        return len(batch[0])

    hook = tx.chain(tx.mean("data"), _stage(at, "reduced"), tx.clip_by_global_norm(1.0))
    pipeline = tx.fuse(hook, tx.adamw(1e-2), after=tx.chain(_stage(at, "stepped"), tx.ema(0.9)))
    return fjoin.train_step(
        loss_fn,
        pipeline,
        mesh=mesh,
        weight=weight,
        bucket_bytes=WIDTH * WIDTH * 4,
        accumulate=options.accumulate,
        on_buffers=tx.chain(tx.average_buffers("data"), _stage(at, "averaged")),
    )


class Loader:
    """Batches with the numbers of their samples."""

    def __init__(self, mesh: Any, at: At = lambda place: None) -> None:
        self.batch_sampler, self._at = fjoin.Shuffled(SAMPLES, BATCH, seed=5, mesh=mesh), at

    def __iter__(self) -> Iterator[Any]:
        for numbers in self.batch_sampler:
            self._at("load")
            yield X[numbers], Y[numbers], numbers, torch.rand(1).item()


def digest(state: Any) -> str:
    ema = tx.ema_params(state.params, state.pipeline)
    values = [*state.params.values(), *ema.values(), state.buffers["mean"]]
    return hashlib.sha1(b"".join(value.detach().numpy().tobytes() for value in values)).hexdigest()[:12]


def buffers() -> dict[str, torch.Tensor]:
    return {"mean": torch.zeros(WIDTH)}


def train(members: Any, options: Options, log: Callable[..., None], at: At) -> Any:
    mesh = members.mesh
    at("begin")
    step = make_step(mesh, options, at)
    runs = fjoin.Checkpoints(options.folder, step, every=4) if options.folder else None
    state = members.resume(step, PARAMS, buffers(), otherwise=runs and runs.restore)
    held = len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task"))
    log(generation=members.generation, rank=step.rank, ranks=step.ranks, at=state.step, held=held)
    at("resumed")
    if options.program == "count":
        state = _count(members, step, state, options, log)
    for x, y, numbers, drawn in members.join(step, Loader(mesh, at), epochs=options.epochs):
        at("body")
        time.sleep(options.pause_s)
        if options.program == "random":
            log(draws=[drawn, torch.rand(1).item()], before=state.step)
        if options.program == "break" and step.rank == 1 and state.step == 5:
            break
        if options.program == "raise" and step.rank == 1 and state.step == 5:
            raise KeyError("user code")
        state, metrics = step(state, (x, y))
        at("after")
        if metrics.stepped:
            of_all = metrics.as_dict()
            log(step=metrics.step, g=int(of_all["generation"]), ranks=int(of_all["ranks"]), weight=metrics.weight)
            if runs is not None:
                runs.save(state, metrics)
        log(numbers=numbers, of=state.step - metrics.stepped, g=members.generation)
    kept = state.clone()
    step.close()
    at("end")
    log(end=digest(kept), step=kept.step)
    return state


def _count(members: Any, step: Any, state: Any, options: Options, log: Callable[..., None]) -> Any:
    """The messages and times of the epochs in the loop of the members, and in a plain one; returns the state."""
    plain = make_step(members.mesh, options)
    loop = (batch for loop in [plain.join(Loader(members.mesh))] for _ in range(options.epochs) for batch in loop)
    runs = {"plain": (plain, plain.init(PARAMS, buffers()), loop)}
    runs["members"] = step, state, members.join(step, Loader(members.mesh), epochs=options.epochs)
    for name, (step, state, loop) in runs.items():
        seconds = []
        with watched() as sent:
            for x, y, *_ in loop:
                start = time.perf_counter()
                state, _ = step(state, (x, y))
                seconds.append(time.perf_counter() - start)
        log(loop=name, sent=len(sent), seconds=seconds)
    return state


def process(address: str, path: str, plan: Plan, options: Options, network: tuple[str, str] | None) -> None:
    """A rank that kills or stops itself as planned.

    Args:
        network: The file of a network of its own, or "", and its interface.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.stderr = sys.stdout = open(f"{path}.err", "w")
    if options.program == "hosts":
        fjoin.groups._failures.host_name = lambda *spaces: f"host of {os.getpid()}"  # type: ignore[attr-defined]
    os.environ["GLOO_SOCKET_IFNAME"] = network[1] if network else "lo"
    if network and network[0]:
        ctypes.CDLL(None).setns(os.open(network[0], os.O_RDONLY), 0x40000000)
    made, seen, out = list[Any](), dict[tuple[str, int], int](), open(path, "a")

    def log(**what: Any) -> None:
        print(json.dumps({**what, "time": time.monotonic(), "pid": os.getpid()}), file=out, flush=True)

    def at(place: str) -> None:
        generation = made[0].generation if made else 0
        for when in (generation, ANY):
            seen[place, when] = seen.get((place, when), 0) + 1
            for number in [number for *event, number in plan if event == [place, when, seen[place, when]]]:
                log(hit=place)
                if number == LOSE:
                    raise fjoin.PeerLost("as the test says")
                os.kill(os.getpid(), number)

    def run(members: Any) -> Any:
        made[:] = [members]
        return train(members, options, log, at)

    how = "returned"
    try:
        with _places(made, at, log):
            state = fjoin.elastic(
                run,
                ranks=options.ranks,
                at_least=options.at_least,
                store=address,
                timeout_s=options.timeout_s,
                transport=options.transport,
                ordered=options.transport == "gloo",
            )
        how = "came late" if state is None else "returned"
    except BaseException as error:
        how = f"{type(error).__name__}: {error}"
    log(final=how)


@contextlib.contextmanager
def _places(made: list[Any], at: At, log: Callable[..., None]) -> Iterator[None]:
    """Places between generations, which no program can see."""
    from fjoin.generations import Members, _members

    connect = _members.connect_generation

    def placed_connect(*args: Any, **options: Any) -> Any:
        at("connecting")
        return connect(*args, **options)

    _members.connect_generation = placed_connect
    init, begin, take = Members.__init__, Members.begin, Members._from

    def placed_init(self: Any, membership: Any, *args: Any) -> None:
        init(self, membership, *args)
        log(number=membership.number)

    def placed_begin(self: Any) -> None:
        made[:] = [self]
        at("record")
        begin(self)
        at("connected")

    def placed_take(self: Any, rank: int, leaves: Any) -> Any:
        axis = self.mesh.axes["data"]
        run = axis.run

        def counted(*args: Any) -> Any:
            at("send" if rank == self.mesh.rank else "take")
            return run(*args)

        axis.run = counted
        try:
            return take(self, rank, leaves)
        finally:
            axis.run = run

    Members.__init__, Members.begin, Members._from = placed_init, placed_begin, placed_take  # type: ignore[method-assign]
    yield


@dataclass
class Run:
    """A run under way, and what its ledgers say.

    Attributes:
        paths: The ledgers, by process, in the order in which they were started.
    """

    folder: Path
    options: Options
    address: str
    store: Any
    paths: list[Path] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)

    def start(self, plan: Plan = (), network: tuple[str, str] | None = None) -> None:
        """Start a process. In the order of its start it gets its number, and with that its rank."""
        path = self.folder / str(len(self.paths))
        path.touch()
        self.paths.append(path)
        one = context.Process(
            target=process, args=(self.address, str(path), list(plan), self.options, network), daemon=True
        )
        one.start()
        self.processes.append(one)
        self.wait("number", len(self.paths))

    def signal(self, number: int, name: str) -> None:
        os.kill(self.processes[number].pid, getattr(signal, name))

    def lines(self) -> list[dict[str, Any]]:
        """The lines of all ledgers; the last line of a process may be cut by its death."""
        found = []
        for number, path in enumerate(self.paths):
            whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]
            found += [{**json.loads(line), "process": number} for line in whole]
        return found

    def wait(self, key: str, count: int = 1, seconds: float = 60.0) -> None:
        """Wait until so many lines have a key."""
        end = time.monotonic() + seconds
        while sum(key in line for line in self.lines()) < count:
            assert time.monotonic() < end, f"no {key!r} came: {self.lines()[-5:]} {self.errors()}"
            time.sleep(0.01)

    def finish(self, seconds: float = 90.0) -> list[str]:
        """How the processes ended that were not killed."""
        end = time.monotonic() + seconds
        for one in self.processes:
            one.join(max(0.0, end - time.monotonic()))
        hangs = [number for number, one in enumerate(self.processes) if one.is_alive()]
        for one in self.processes:
            one.kill()
            one.join()
        assert not hangs, f"processes {hangs} hang: {self.lines()[-5:]} {self.errors()}"
        return [line["final"] for line in self.lines() if "final" in line]

    def errors(self) -> str:
        return "".join(Path(f"{path}.err").read_text() for path in self.paths if Path(f"{path}.err").exists())

    def ledger(self) -> list[int]:
        """How many ranks took each step. All members of its generation took the same samples once."""
        steps = dict[int, tuple[int, int]]()
        for line in self.lines():
            if "step" in line and "g" in line:
                steps[line["step"]] = max(steps.get(line["step"], (0, 0)), (line["g"], line["ranks"]))
        assert sorted(steps) == list(range(len(steps)))
        return [steps[number][1] for number in sorted(steps)]

    def check(self) -> list[int]:
        """The run is that of its ledger, to the bit, and each sample of an epoch counted once; returns the ledger."""
        ledger, ends = self.ledger(), {(line["end"], line["step"]) for line in self.lines() if "end" in line}
        assert len(ledger) == -(-STEPS // self.options.accumulate) * self.options.epochs, self.errors()
        assert ends == {(replay(ledger, self.options), len(ledger))}
        ended = {line["process"] for line in self.lines() if "end" in line}
        taken = [
            (line["process"], line["step"]) for line in self.lines() if "weight" in line and line["process"] in ended
        ]
        assert len(taken) == len(set(taken)), "a step that a rank has taken which lives is not taken again"
        weights = {line["step"]: line["weight"] for line in self.lines() if "weight" in line}
        assert sum(weights.values()) == SAMPLES * self.options.epochs
        return ledger


def _hold_store(port: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    port.recv()


@contextlib.contextmanager
def running(folder: Path, options: Options) -> Iterator[Run]:
    """A run, and the process of its store."""
    here, there = context.Pipe()
    store = context.Process(target=_hold_store, args=(there,), daemon=True)
    store.start()
    run = Run(folder, options, f"127.0.0.1:{here.recv()}", store)
    try:
        yield run
    finally:
        for one in [*run.processes, store]:
            one.kill()
            one.join()


def replay(ledger: list[int], options: Options) -> str:
    """The digest after a run without deaths, in which each step is taken by so many simulated ranks."""
    state: Any = None
    number = 0
    while number < len(ledger):
        stop, ranks = number, ledger[number]
        while stop < len(ledger) and ledger[stop] == ranks:
            stop += 1

        def one(rank: int, start: Any = state, first: int = number, last: int = stop) -> Any:
            mesh = fjoin.mesh({"data": -1})
            step = make_step(mesh, options)
            now = start or step.init(PARAMS, buffers())
            if start is not None:
                now = fjoin.training.loaded(step.init(PARAMS, buffers()), step.run, *start)
            batches = step.join(Loader(mesh))
            batches.begin_at(first, options.accumulate)
            while now.step < last:
                for x, y, *_ in batches:
                    now, metrics = step(now, (x, y))
                    if now.step == last and metrics.stepped:
                        break
            kept = now.clone()
            return (dict(kept.params), kept.pipeline, kept.buffers, kept.on_buffers, kept.batches), digest(kept)

        state, end = tx.simulate(one, {"data": ranks}, list(range(ranks)))[0]
        number = stop
    return end
