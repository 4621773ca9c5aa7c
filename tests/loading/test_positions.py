"""A run that continues from the position of a joined loop equals one that was never interrupted, to the bit."""

from __future__ import annotations

import copy
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from fjoin.loading import JoinedLoop
from fjoin.loading._generators import Streams
from tests.helpers import raises_text, same_bits
from tests.loading.loaders import Stateful, loader_of, run

POINTS = [(0, 0), (0, 1), (0, 4), (0, 5), (1, -1), (1, 3)]
# By loader the samples of each rank, of which rank 1 runs out in the middle; with Shuffled those of all. test_same_run.py has one rank.
RUNS = {"shuffle": [12, 6, 2], "generator": [12, 6, 2], "own state": [12, 6, 2], "list": [12, 6, 0], "Shuffled": [36]}


def on(folder: Path, kind: str, sizes: list[int], **given: Any) -> list[Any]:
    if len(sizes) == 1:
        return [run(kind, sizes[0], folder, **given)]
    return tx.simulate(lambda n: run(kind, n, folder, **given), {"data": len(sizes)}, sizes)


def rest(ranks: list[Any], at: tuple[int, int]) -> list[Any]:
    return [[one for one in seen if one[:2] > at] for seen in ranks]


@pytest.mark.sample(2)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", RUNS)
def test_resumed_equals_uncut(kind: str, own: bool, tmp_path: Path) -> None:
    for at in POINTS:
        whole = on(tmp_path / str(at), kind, RUNS[kind], save_at=at, own=own)
        assert len(whole[0]) == 18
        assert on(tmp_path / str(at), kind, RUNS[kind], restores=True, own=own) == rest(whole, at), at


@pytest.mark.parametrize("kind", ["shuffle", "own state", "Shuffled"])
def test_a_run_that_is_resumed_may_be_saved_again(kind: str, tmp_path: Path) -> None:
    sizes = [60, 60] if kind == "Shuffled" else [20, 10]
    whole = on(tmp_path, kind, sizes, save_at=(0, 3))
    on(tmp_path, kind, sizes, restores=True, save_at=(0, 6))
    assert on(tmp_path, kind, sizes, restores=True) == rest(whole, (0, 6))


@pytest.mark.sample(2)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", ["shuffle", "own state", "Shuffled"])
def test_a_run_that_is_stopped_continues_where_it_was(kind: str, own: bool, tmp_path: Path) -> None:
    """The batch that had been loaded ahead is not lost."""
    sizes = [36, 36] if kind == "Shuffled" else [12, 8]
    whole = on(tmp_path / "whole", kind, sizes, own=own)
    first = on(tmp_path, kind, sizes, save_at=(1, 1), stop=True, own=own)
    assert all(seen[-1][:2] == (1, 2) for seen in first)
    then = on(tmp_path, kind, sizes, restores=True, own=own)
    assert [seen + more for seen, more in zip(first, then, strict=True)] == whole


def on_this_rank(*args: Any) -> Any:
    import numpy.random  # noqa: F401

    rank = dist.get_rank()
    return run("own state" if rank else "shuffle", 16 - 6 * rank, *args)


@pytest.mark.parametrize("at", [(1, 2), (1, 5)])
def test_resumed_equals_uncut_on_processes(at: tuple[int, int], pool: Any, tmp_path: Path) -> None:
    """With numpy's stream, another loader on each rank, and ranks that end apart."""
    whole = pool.run(2, on_this_rank, str(tmp_path), False, at, False, False, 3, True)
    assert pool.run(2, on_this_rank, str(tmp_path), True) == rest(whole, at)


def test_the_law_fails_without_the_streams(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = on(tmp_path, "shuffle", [12], save_at=(0, 2))
    monkeypatch.setattr(Streams, "restore", lambda self, generators: None)
    with pytest.warns(UserWarning, match="begins with another batch"):
        assert on(tmp_path, "shuffle", [12], restores=True) != rest(whole, (0, 2))


def step() -> fjoin.TrainStep:
    return fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)))


def test_it_says_how_many_batches_it_loads_to_skip_them() -> None:
    one = step()
    state, loop, position = one.init({"w": torch.ones(2, 2).double()}), one.join(loader_of("list", 12)), {}
    for i, batch in enumerate(loop):
        state, _ = one(state, batch)
        position = loop.state_dict() if i == 3 else position
    loop.load_state_dict(position)
    with pytest.warns(UserWarning, match="loads 4 batches on rank 0 only to skip them"):
        for batch in loop:
            state, _ = one(state, batch)
    assert state.step == 8 and loop.epoch == 1
    short = one.join(loader_of("list", 4))
    short.load_state_dict(position)
    with pytest.warns(UserWarning, match="only to skip"):
        raises_text(ValueError, lambda: list(short), "ended after 2 batches", "a position after 4")


def test_a_position_is_json_and_tensors_of_bytes() -> None:
    loop = step().join(loader_of("own state", 12))
    next(iter(loop))
    position = loop.state_dict()
    plain = json.dumps(position, default=lambda tensor: {"tensor": tensor.tolist()})
    again = json.loads(
        plain, object_hook=lambda d: torch.tensor(d["tensor"], dtype=torch.uint8) if "tensor" in d else d
    )
    assert same_bits(again, position) and position["epoch"] == 0 and not position["ended"]
    assert position["batches"] == position["steps"] == 1


@pytest.mark.parametrize("at", [(0, 2), (0, 5), (1, -1), (1, 3)])
def test_a_position_without_what_later_versions_compare(at: tuple[int, int], tmp_path: Path) -> None:
    """As 0.3 saved it; without a warning."""
    whole = on(tmp_path, "shuffle", [12], save_at=at)
    position = JoinedLoop.load_state_dict

    def as_before(self: Any, state: Any) -> None:
        state = {name: one for name, one in state.items() if name not in ("order", "workers", "ahead", "firsts")}
        position(self, state | {"streams": {name: {**one, "own": {}} for name, one in state["streams"].items()}})
        for one in self._position.resume["streams"].values():
            del one["own"]

    with mock.patch.object(JoinedLoop, "load_state_dict", as_before):
        assert on(tmp_path, "shuffle", [12], restores=True) == rest(whole, at)


def test_streams_go_there_and_back() -> None:
    import numpy.random

    def draw() -> list[float]:
        return [
            torch.rand(()).item(),
            random.random(),
            random.gauss(0, 1),
            numpy.random.random(),
            numpy.random.normal(),
        ]

    for i in range(6):
        if i > 2:  # a normal number of a pair is left over, or has been used
            numpy.random.normal()
            assert str(Streams.now().numpy) == str(numpy.random.get_state())
            assert Streams.now().python == random.getstate()
        there = Streams.now().state_dict()
        assert Streams.now().state_dict()["numpy_rest"] == there["numpy_rest"]
        want = draw()
        draw()
        Streams.of(there).restore()
        assert draw() == want
    assert "numpy.random" in sys.modules and "cuda" not in there


def test_what_cannot_be_saved_or_loaded() -> None:
    for loop in (step().join(iter([1])), fjoin.join(x for x in [1])):
        raises_text(TypeError, loop.state_dict, "iterator", "DataLoader", "load_state_dict")
    loop, other = fjoin.join([1, 2]), fjoin.join(Stateful(4, 2))
    good = loop.state_dict()
    rows: list[tuple[Any, ...]] = [
        (loop, {"epoch": 3}, "state_dict() of a joined loop", "['epoch']"),
        (loop, 3, "got 3"),
        (loop, good | {"rank": 1, "ranks": 2}, "rank 1 of 2", "rank 0 of 1", "Shuffled"),
        (loop, good | {"loader": {}}, "has state", "this loader, of type list, has none"),
        (other, good, "has no state", "Stateful, has one"),
    ]
    for of, position, *words in rows:
        raises_text(ValueError, lambda of=of, position=position: of.load_state_dict(position), *words)  # type: ignore[misc]
    for _ in loop:
        raises_text(fjoin.JoinError, lambda: loop.load_state_dict(good), "inside the loop")
    loop.load_state_dict(good)
    assert loop.state_dict() == good, "a position that has been loaded is kept until the loop begins"


NOW = ("streams", "now")
BYTES = torch.zeros(8, dtype=torch.uint8)
ODD: list[tuple[Any, ...]] = [
    (*NOW, "numpy_rest", 1, 10**9),  # numpy would read its memory there
    *((*NOW, "numpy_rest", 1, odd) for odd in (625, -1, 1.0)), (*NOW, "numpy_rest", 2, "x"), (*NOW, "numpy_rest", []),
    (*NOW, "numpy", BYTES), (*NOW, "python", torch.zeros(625 * 8, dtype=torch.uint8).fill_(255)), (*NOW, "python_rest", 0, 9),
    (*NOW, "python_rest", 1, "x"), (*NOW, "torch", torch.zeros(5056, dtype=torch.uint8)), (*NOW, "cuda", 3), (*NOW, "own", 3),
    (*NOW, "own", {"sampler.generator: torch": {"torch": BYTES}}), (*NOW, "own", {"sampler.generator: no kind": {}}),
    (*NOW, "own", {"sampler.generator: pcg64": {"pcg64": {"bit_generator": "PCG64"}}}), (*NOW, None), ("streams", {}),
    ("epoch", -1), ("batches", "1"), ("rank", True), ("ended", 1),
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: " ".join(map(str, odd))[:40])
def test_an_odd_position_is_refused(odd: tuple[Any, ...], tmp_path: Path) -> None:
    """As it is, and in a checkpoint under right checksums: there nothing is executed, and nothing read beyond it."""
    import numpy.random  # noqa: F401

    loop = fjoin.join([1, 2])
    next(iter(loop))
    position = copy.deepcopy(loop.state_dict())
    *way, key, new = odd
    place: Any = position
    for one in way:
        place = place[one]
    place[key] = new
    raises_text(ValueError, lambda: fjoin.join([1, 2]).load_state_dict(position), "state_dict() of a joined loop")
    model = {"model": torch.nn.Linear(1, 1)}
    fjoin.save(tmp_path, model, 1, data=SimpleNamespace(state_dict=lambda: position, stopped=False))
    again = fjoin.join([1, 2])
    raises_text(fjoin.CheckpointError, lambda: fjoin.load(tmp_path, model, data=again), "manifest.json", "another step")
    assert again.state_dict()["batches"] == 0


def test_leaving_a_loop_counts_as_an_epoch() -> None:
    loop = fjoin.join([1, 2, 3])
    for _ in loop:
        break
    assert loop.epoch == 0 and loop.state_dict()["batches"] == 1
    assert list(loop) == [1, 2, 3] and loop.epoch == 2


class NotReady:
    """A loader that knows its dataset once it has begun."""

    def __iter__(self) -> Any:
        yield from torch.ones(3, 2)

    @property
    def dataset(self) -> Any:
        raise RuntimeError("not ready")


def test_parts_of_a_loader_may_not_be_ready() -> None:
    assert len([*fjoin.join(NotReady())]) == 3
