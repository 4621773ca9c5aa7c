"""Whether a run that is cut and resumed is the same run, for forms that programs have; and where it is not, whether something says so."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import data
from torch.utils.data import DataLoader, Sampler

import fjoin
from fjoin import transforms as tx
from fjoin.loading import JoinedLoop
from fjoin.loading._generators import Streams
from tests.helpers import raises_text, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:to resume, the loop loads")
N, SIZE, EPOCHS = 12, 2, 3
SAMPLES = torch.arange(1.0, N + 1).view(N, 1).repeat(1, 2)
# (epoch, iteration) of the save, after which the run is cut; iteration 6 is behind the epoch, before the next one begins.
CUTS = [(0, 1), (0, 5), (0, 6), (1, 1), (1, 6)]


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    return (params["w"] * batch).square().mean()


def dropout_loss(params: Any, batch: Tensor) -> Tensor:
    return torch.nn.functional.dropout(params["w"] * batch, 0.5).square().mean()


class Form(NamedTuple):
    """A program.

    Attributes:
        loader: Makes its loader.
        verdicts: For each cut, or for all of them: "same"; "warn" and "error": another run, with a warning or an error; "silent".
        resumed: Makes the loader of the resumed program, where it is another one.
        begin: Called with loader and epoch before each epoch.
        body: From a batch to the one that the step gets.
        counts: Whether the program counts its epochs from 0 again.
        data: Whether its save and its restore get `data=loop`.
        sizes: The number of samples of each rank, which its loader gets, where there are several.
        own: Whether it has a loop of fjoin.join and a pure pipeline.
    """

    loader: Callable[..., Any]
    verdicts: str = "same"
    resumed: Callable[[], Any] | None = None
    begin: Callable[[Any, int], Any] = lambda loader, epoch: None
    body: Callable[[Tensor], Tensor] = lambda batch: batch
    loss: Callable[..., Tensor] = loss_fn
    pipeline: Callable[[], tx.Pipeline] = lambda: tx.fuse(tx.mean("data"), tx.adam(0.01))
    options: dict[str, Any] = {}
    counts: bool = False
    data: tuple[bool, bool] = (True, True)
    sizes: tuple[int, ...] = ()
    own: bool = False


def run(
    form: Form, folder: Path | str, resumed: bool, cut: tuple[int, int] | None = None, n: int = N, how: str = "cut",
    **checkpoints: Any,
) -> list[Any]:  # fmt: skip
    """The batches, and the parameters after them, to the cut or to the end.

    Args:
        n: The number of this rank's samples; with Shuffled that of all.
        how: "cut" ends the run where it saves; with "stop" it stops its loop there, and saves once more; with "on" it goes on.
    """
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(99 if resumed else 5)
    DRAWN.clear()
    mesh, pipeline, seen = fjoin.mesh({"data": -1}), form.pipeline(), list[Any]()
    join: dict[str, Any] = {"empty": torch.zeros(0, 2)} if form.sizes else {}
    step = fjoin.train_step(form.loss, pipeline, mesh=mesh, weight=len, **form.options)
    loader = (form.resumed or form.loader if resumed else form.loader)(*([n] if form.sizes else []))
    if form.own:
        loop: Any = fjoin.join(loader, mesh=mesh, weight=len, **join)
        runs = fjoin.Checkpoints(folder, pipeline, mesh=mesh, **checkpoints)
    else:
        loop, runs = step.join(loader, **join), fjoin.Checkpoints(folder, step, **checkpoints)
    saves, restores = (loop if one else None for one in form.data)
    state = runs.restore({"w": torch.ones(2)}, data=restores if resumed else None)
    with contextlib.ExitStack() as ends:
        ends.callback(step.close)
        ends.callback(runs.wait)
        for epoch in range(0 if form.counts else loop.epoch, EPOCHS):
            form.begin(loader, epoch)
            for batch in loop:
                at = (epoch, loop._position.steps - 1)
                batch = form.body(batch)
                if form.own:
                    grads = torch.func.grad(form.loss)(state[0], batch) if len(batch) else {"w": torch.zeros(2)}
                    with fjoin.bind(mesh):
                        state = pipeline.step(state[0], grads, state[1], weight=loop.weight)
                else:
                    state, _ = step(state, batch)
                seen.append((batch.tolist(), (state[0] if form.own else state.params)["w"].tolist()))
                if cut == at:
                    runs.save(state, data=saves)
                    if how == "cut":
                        return seen
                    if how == "stop":
                        loop.stop()
            if cut == (epoch, 6) or loop.stopped:
                runs.save(state, data=saves)
                return seen
    return seen


def on_ranks(form: Form, *args: Any, how: str = "cut") -> list[list[Any]]:
    """What each rank has seen."""
    if not form.sizes:
        return [run(form, *args, how=how)]
    return tx.simulate(lambda n: run(form, *args, n=n, how=how), {"data": len(form.sizes)}, form.sizes)


def verdict(form: Form, whole: list[Any], folder: Path, cut: tuple[int, int], how: str = "cut") -> str:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            parts = on_ranks(form, folder, False, cut, how=how), on_ranks(form, folder, True)
        except (ValueError, fjoin.CheckpointError):
            return "error"
    warned = any("only to skip them" not in str(one.message) for one in said)
    if same_bits([first + then for first, then in zip(*parts, strict=True)], whole):
        return "same-and-warns" if warned else "same"
    return "warn" if warned else "silent"


def loader(**options: Any) -> Callable[[], Any]:
    """A DataLoader, whose options are made anew where they are functions."""
    workers = {"multiprocessing_context": "forkserver"} if "num_workers" in options else {}

    def make() -> Any:
        given = {name: one() if callable(one) else one for name, one in options.items()}
        size = {} if "batch_sampler" in given else {"batch_size": SIZE}
        return DataLoader(given.pop("dataset", SAMPLES), **size | workers | given)

    return make


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


class Shuffles(Sampler[int]):
    """Has a random generator, or a count of its epochs."""

    def __init__(self, generator: Any) -> None:
        self.generator, self.epoch = generator, 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        own = random.Random(self.epoch) if self.generator is None else self.generator
        order = own.sample(range(N), N) if isinstance(own, random.Random) else own.permutation(N).tolist()
        yield from order


class Noisy(data.Dataset[Tensor]):
    """Samples with noise from a stream of this process, from all of them, or from a generator of its own."""

    def __init__(self, draw: str, n: int = N) -> None:
        self.draw, self.n, self.own = draw, n, np.random.RandomState(4)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Tensor:
        draws = {
            "torch": lambda: torch.rand(()).item(), "numpy": np.random.rand, "python": random.random, "own": self.own.rand,
        }  # fmt: skip
        return torch.full((2,), i + 1.0) + sum(draws[one]() for one in self.draw.split())


class MadeLate(Noisy):
    """Makes its generator when it is used first."""

    def __init__(self) -> None:
        self.draw, self.n = "own", N

    def __getitem__(self, i: int) -> Tensor:
        self.own = getattr(self, "own", None) or np.random.RandomState(4)
        return super().__getitem__(i)


class Stateful(DataLoader[Tensor]):
    """Knows its own position, as torchdata's StatefulDataLoader does: the batches so far, of an order drawn with a generator."""

    used = skip = 0

    def state_dict(self) -> dict[str, Any]:
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skip = state["used"]

    def __iter__(self) -> Any:
        self.used, self.skip, batches = self.skip, 0, super().__iter__()
        for _ in range(self.used):
            next(batches)
        return map(self.count, batches)

    def count(self, batch: Tensor) -> Tensor:
        self.used = (self.used + 1) % (N // SIZE)
        return batch


class Alive:
    """A loader that saves its own position, as torchdata's StatefulDataLoader does: the order is its own, the state is alive."""

    def __init__(self, n: int, size: int) -> None:
        self.data, self.size = Noisy("torch", n), size
        self.state: dict[str, Any] = {"epoch": 0, "at": 0, "asked": 0}

    def __iter__(self) -> Iterator[Tensor]:
        if self.state["at"] >= self.data.n:
            self.state.update(epoch=self.state["epoch"] + 1, at=0)
        gen = torch.Generator().manual_seed(self.state["epoch"])
        order = torch.randperm(self.data.n, generator=gen).tolist()
        while (at := self.state["at"]) < self.data.n:
            self.state["at"] = at + self.size
            yield torch.stack([self.data[i] for i in order[at : at + self.size]])

    def state_dict(self) -> dict[str, Any]:
        self.state["asked"] += 1
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Doubles(DataLoader[Tensor]):
    """With a generator in the place of an iterator."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch * 2


class Stream(data.IterableDataset[Tensor]):
    """Each worker has samples of its own."""

    def __iter__(self) -> Iterator[Tensor]:
        info = data.get_worker_info()
        own = list(SAMPLES[info.id :: info.num_workers]) if info else list(SAMPLES)
        random.Random(7).shuffle(own)
        yield from own


class ShufflesItsList:
    def __init__(self) -> None:
        self.samples = list(SAMPLES)

    def __iter__(self) -> Iterator[Tensor]:
        random.Random(1).shuffle(self.samples)
        return iter([torch.stack(self.samples[i : i + SIZE]) for i in range(0, N, SIZE)])


class Holds:
    """A loader that is no DataLoader, with a random generator."""

    def __init__(self) -> None:
        self.random = random.Random(3)

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(N // SIZE):
            yield SAMPLES[self.random.sample(range(N), SIZE)]


def shuffled(n: int = N, size: int = SIZE, **options: Any) -> Callable[[], Any]:
    return loader(dataset=torch.cat([SAMPLES, SAMPLES]), batch_sampler=lambda: fjoin.Shuffled(n, size, **options))


def noise(batch: Tensor) -> Tensor:
    return batch * random.random() + np.random.rand() + torch.rand(())


def by(sampler: Callable[[], Any], *more: Any, **settings: Any) -> Form:
    return Form(loader(sampler=sampler), *more, **settings)


def of(dataset: Any, verdicts: str = "same", resumed: Any = None, **options: Any) -> Form:
    return Form(loader(dataset=dataset, **options), verdicts, resumed)


def distributed() -> Any:
    return data.DistributedSampler(SAMPLES, 1, 0)  # type: ignore[arg-type]


DRAWN: dict[str, torch.Generator] = {}  # of a program's body, in a variable
ROWS = {
    # -- the order
    "shuffle=True": Form(loader(shuffle=True)), "generator=": Form(loader(shuffle=True, generator=generator)),
    "RandomSampler(generator=)": by(lambda: data.RandomSampler(SAMPLES, generator=generator())),
    "WeightedRandomSampler(generator=)": by(lambda: data.WeightedRandomSampler([1.0] * N, N, generator=generator())),
    "BatchSampler(data.RandomSampler(generator=))": Form(
        loader(batch_sampler=lambda: data.BatchSampler(data.RandomSampler(SAMPLES, generator=generator()), SIZE, False))  # type: ignore[arg-type]
    ),
    "a sampler with a random.Random": by(lambda: Shuffles(random.Random(3))),
    "a sampler with numpy's Generator": by(lambda: Shuffles(np.random.default_rng(3))),
    "a sampler with numpy's RandomState": by(lambda: Shuffles(np.random.RandomState(3))),
    "a loader of one's own with a random.Random": Form(Holds),
    "a sampler with numpy's Philox": by(lambda: Shuffles(np.random.Generator(np.random.Philox(3))), "same same silent warn warn"),
    "a sampler that counts its epochs": by(lambda: Shuffles(None), "same same silent warn warn"),
    "a list that is shuffled in place": Form(ShufflesItsList, "same same silent warn warn"),
    "a generator that the resumed program lacks": Form(loader(shuffle=True, generator=generator), "warn", loader(shuffle=True)),
    "DistributedSampler, set_epoch(loop.epoch)": by(distributed, begin=lambda loader, epoch: loader.sampler.set_epoch(epoch)),
    "DistributedSampler, without set_epoch": by(distributed),
    "DistributedSampler, epochs counted from 0": by(
        distributed, "same same silent warn warn", begin=lambda loader, epoch: loader.sampler.set_epoch(epoch), counts=True
    ),
    "epochs counted from 0": Form(loader(shuffle=True), "same same silent silent silent", counts=True),
    "Shuffled": Form(shuffled(seed=1)),
    "Shuffled, another seed": Form(shuffled(seed=1), "error error warn error warn", shuffled(seed=2)),
    "Shuffled, another n": Form(shuffled(), "error error warn error warn", shuffled(N - 1)),
    "Shuffled, another batch size": Form(shuffled(), "error error warn error warn", shuffled(N, 3)),
    "Shuffled, drop_last": Form(shuffled(N - 1), "error error warn error warn", shuffled(N - 1, drop_last=True)),
    "Shuffled, then another sampler": Form(shuffled(), "error error warn error warn", loader()),
    "another batch size": Form(loader(), "warn error silent warn silent", loader(batch_size=3)),
    "another dataset": Form(loader(), "warn warn silent warn silent", loader(dataset=SAMPLES + 1)),
    "random_split without a seed": of(lambda: data.random_split(SAMPLES, [N])[0], "warn warn silent warn silent"),
    # -- augmentation and the model
    "dropout": Form(loader(shuffle=True), loss=dropout_loss),
    "random numbers in the body": Form(loader(shuffle=True), body=noise),
    "a key folded with the step": Form(
        loader(), body=lambda batch: batch + tx.random.normal(tx.random.fold_in(tx.random.key(3), int(batch[0, 0])), ())
    ),
    "a generator in a variable of the body": Form(
        loader(), "silent", begin=lambda *_: DRAWN.setdefault("body", generator()),
        body=lambda batch: batch + torch.rand((), generator=DRAWN["body"]),
    ),
    "augmentation by the dataset's generator": of(lambda: Noisy("own"), shuffle=True),
    "random_split, the dataset's generator": of(lambda: data.random_split(Noisy("own"), [N], generator())[0], shuffle=True),
    "a generator that is made late": of(MadeLate, "same-and-warns same-and-warns warn warn warn"),
    "a loader with a state of its own": Form(lambda: Stateful(SAMPLES, SIZE, shuffle=True, generator=generator())),
    "augmentation by the streams": of(lambda: Noisy("numpy"), shuffle=True),
    "a batch that the body changes in place": Form(
        loader(dataset=SAMPLES.clone, shuffle=True), body=lambda batch: batch.mul_(2).add_(1)
    ),
    "batches in a list that the body changes in place": Form(
        lambda: list(SAMPLES.clone().split(SIZE)), "silent silent silent warn warn", body=lambda batch: batch.mul_(1.5)
    ),
    "ema": Form(loader(shuffle=True), pipeline=lambda: tx.fuse(tx.mean("data"), tx.adam(0.01), after=tx.ema(0.9))),
    "a schedule": Form(loader(), pipeline=lambda: tx.fuse(tx.mean("data"), tx.sgd(lambda n: 0.01 * 0.9 ** int(n)))),
    # -- the position
    "data= forgotten": Form(loader(), "warn warn silent warn silent", data=(False, False)),
    "data= forgotten in the restore": Form(loader(), "warn", data=(True, False)),
    "data= forgotten in the save": Form(loader(), "error", data=(False, True)),
}  # fmt: skip
WORKERS: dict[str, Form] = {
    **{f"workers, {draw}": of(lambda draw=draw: Noisy(draw), shuffle=True, num_workers=2) for draw in ("torch", "numpy", "python")},
    "workers, generator=": Form(loader(shuffle=True, generator=generator, num_workers=1)),
    "workers, the dataset's generator": of(lambda: Noisy("own"), shuffle=True, num_workers=1),
    "workers, an IterableDataset": of(Stream, num_workers=2),
    "another number of workers": of(Stream, "warn warn silent warn silent", loader(dataset=Stream, num_workers=1), num_workers=2),
    "persistent workers": Form(loader(shuffle=True, num_workers=1, persistent_workers=True)),
    "persistent workers, an iterator of its own": Form(
        lambda: Doubles(SAMPLES, SIZE, shuffle=True, num_workers=1, persistent_workers=True)
    ),
    "persistent workers, generator=": Form(
        loader(shuffle=True, generator=generator, num_workers=1, persistent_workers=True)
    ),
    "persistent workers, augmentation": of(
        lambda: Noisy("torch"), "same same silent warn silent", num_workers=1, persistent_workers=True),
    "Shuffled, augmentation in workers": of(
        lambda: Noisy("torch"), "warn same same warn same", batch_sampler=lambda: fjoin.Shuffled(N, SIZE), num_workers=1),
}  # fmt: skip


# By kind of loader the samples of each rank, of whom some run out in the middle; with Shuffled those of all.
SIZES = {
    "shuffle": (12, 6, 2), "generator": (12, 6, 2), "own state": (12, 6, 2), "list": (12, 6, 0), "Shuffled": (36, 36),
}  # fmt: skip


def loader_of(kind: str, n: int, draw: str = "torch") -> Any:
    """Of so many samples; simulated ranks share the streams of a process, but for torch's."""
    makes: dict[str, Callable[[], Any]] = {
        "own state": lambda: Alive(n, SIZE), "list": lambda: list(torch.arange(2.0 * n).reshape(-1, SIZE, 2)) if n else [],
        "Shuffled": loader(dataset=Noisy(draw, n), batch_sampler=lambda: fjoin.Shuffled(n, 6, seed=4)),
        "generator": loader(dataset=Noisy(draw, n), shuffle=True, generator=generator),
        "shuffle": loader(dataset=Noisy(draw, n), shuffle=True),
    }  # fmt: skip
    return makes[kind]()


def on_sizes(kind: str, own: bool = False, **options: Any) -> Form:
    pipeline = tx.fuse(tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), tx.sgd(1e-5, momentum=0.9))
    make = partial(loader_of, kind, **options)
    return Form(make, loss=dropout_loss, pipeline=lambda: pipeline, sizes=SIZES[kind], own=own)


def check(form: Form, folder: Path, cuts: list[tuple[int, int]]) -> None:
    whole = on_ranks(form, folder / "whole", False)
    found = {cut: verdict(form, whole, folder / str(cut), cut) for cut in cuts}
    verdicts = form.verdicts.split() if " " in form.verdicts else [form.verdicts] * len(CUTS)
    assert found == {cut: one for cut, one in zip(CUTS, verdicts, strict=True) if cut in cuts}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ROWS)
def test_a_resumed_run_is_the_same_or_says_why_not(name: str, tmp_path: Path) -> None:
    check(ROWS[name], tmp_path, CUTS)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n != "persistent workers")) for n in WORKERS]
)
def test_so_with_workers(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    check(WORKERS[name], tmp_path, CUTS if request.config.getoption("--long") else [(1, 1)])


@pytest.mark.sample(2)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", SIZES)
def test_so_on_several_ranks(kind: str, own: bool, tmp_path: Path) -> None:
    """Also where it is stopped, of which no batch that had been loaded ahead is lost, and resumed twice after runs that went on."""
    form = on_sizes(kind, own)
    check(form, tmp_path, CUTS)
    whole = on_ranks(form, tmp_path / "whole", False)
    assert verdict(form, whole, tmp_path / "stopped", (1, 1), "stop") == "same"
    parts = [on_ranks(form, tmp_path / "on", bool(i), cut, how="on") for i, cut in enumerate([(0, 1), (1, 1), None])]
    for seen, *resumed in zip(*parts, strict=True):
        assert [(len(one), one) for one in resumed] == [(16, seen[2:]), (10, seen[8:])]


def on_this_rank(*args: Any) -> Any:
    rank = dist.get_rank()
    form = on_sizes("own state") if rank else on_sizes("shuffle", draw="torch numpy python")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "to resume, the loop loads")
        return run(form, *args, 16 - 6 * rank, "on", background=True)


@pytest.mark.parametrize("cut", [(1, 2), (1, 5)])
def test_so_on_processes(cut: tuple[int, int], pool: Any, tmp_path: Path) -> None:
    """With numpy's stream, another loader on each rank, and ranks that end apart."""
    whole = pool.run(2, on_this_rank, str(tmp_path), False, cut)
    left = EPOCHS * 8 - 8 * cut[0] - cut[1] - 1
    assert pool.run(2, on_this_rank, str(tmp_path), True, None) == [seen[-left:] for seen in whole]


def test_the_law_fails_without_the_streams(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    form = on_sizes("shuffle")
    whole = on_ranks(form, tmp_path / "whole", False)
    monkeypatch.setattr(Streams, "restore", lambda self, generators: None)
    assert verdict(form, whole, tmp_path, (0, 1)) == "warn"


def test_so_from_a_position_without_what_later_versions_compare(tmp_path: Path) -> None:
    """As 0.3 saved it."""
    position = JoinedLoop.load_state_dict

    def as_before(self: Any, state: Any) -> None:
        state = {name: one for name, one in state.items() if name not in ("order", "workers", "ahead", "firsts")}
        position(self, state | {"streams": {name: {**one, "own": {}} for name, one in state["streams"].items()}})
        for one in self._position.resume["streams"].values():
            del one["own"]

    with mock.patch.object(JoinedLoop, "load_state_dict", as_before):
        check(ROWS["shuffle=True"], tmp_path, CUTS)


@pytest.mark.parametrize(
    "name", ["shuffle=True", "generator=", "a sampler with a random.Random", "Shuffled", "persistent workers"]
)
def test_a_rollback_in_one_program(name: str) -> None:
    """Without a warning but that of batches that are skipped."""
    form = (ROWS | WORKERS)[name]
    loop = fjoin.join(form.loader(), mesh=fjoin.mesh({"data": 1}))
    torch.manual_seed(5)
    positions, seen = [loop.state_dict()], list[Any]()
    for _ in range(2):
        for batch in loop:
            seen.append(batch.tolist())
            positions.append(loop.state_dict())
    for at in (0, 2, 8):
        loop.load_state_dict(positions[at])
        assert [batch.tolist() for _ in range(loop.epoch, 2) for batch in loop] == seen[at:], at


@pytest.mark.parametrize("cut", [2, 7])
def test_a_second_loop_is_an_object_of_the_dict(cut: int, tmp_path: Path) -> None:
    def run(seed: int, stop: int, name: str = "cut") -> list[Any]:
        torch.manual_seed(seed)
        step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)), weight=len)
        loop, second = step.join(loader(shuffle=True)()), fjoin.join(loader(shuffle=True, batch_size=1)())
        runs, seen = fjoin.Checkpoints(tmp_path / name, {"step": step, "second": second}), list[Any]()
        state = runs.restore({"step": {"w": torch.ones(2)}}, data=loop)["step"]
        others = iter(second)
        for _ in range(loop.epoch, 2):
            for batch in loop:
                other = next(others)
                state, _ = step(state, torch.cat([batch, other]))
                seen.append((batch.tolist(), other.tolist()))
                if state.step == stop:
                    runs.save({"step": state}, data=loop)
                    return seen
        return seen

    assert run(5, cut) + run(9, 12) == run(5, 12, "whole")


def test_ranks_compare_their_shuffled_samplers() -> None:
    """In the first message of either loop, on all ranks."""

    def rank(own: bool, options: dict[str, Any]) -> str:
        sampler = fjoin.Shuffled(**{"n": N, "batch_size": 4, "seed": 1} | options)
        step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)), weight=len)
        loop: Any = (fjoin.join if own else step.join)(DataLoader(SAMPLES, batch_sampler=sampler))  # type: ignore[arg-type]
        return raises_text(fjoin.DesyncError, lambda: next(iter(loop)), repr(sampler))

    for other in ({"seed": 2}, {"n": N - 1}, {"batch_size": 6}, {"drop_last": True}):
        for own in (False, True):
            tx.simulate(lambda options, own=own: rank(own, options), {"data": 2}, [{}, other])
