"""A run that continues from the position of a joined loop equals one that was never interrupted, to the bit."""

from __future__ import annotations

import copy
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.loading._position import Streams
from tests.helpers import raises_text
from tests.loading.loaders import Stateful, loader_of, run

KINDS = ["shuffle", "workers", "own state", "list", "Shuffled"]
POINTS = [(0, -1), (0, 0), (0, 2), (1, -1), (1, 3), (1, 5), (2, 5)]


def rest(seen: list[Any], at: tuple[int, int]) -> list[Any]:
    return [one for one in seen if one[:2] > at]


@pytest.mark.sample(2)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "workers"])
def test_resumed_equals_uncut_on_one_rank(kind: str, own: bool) -> None:
    n = 36 if kind == "Shuffled" else 12
    for at in POINTS:
        seen, saved = run(kind, n, save_at=at, own=own)
        assert len(seen) == 18
        again, _ = run(kind, n, saved, own=own)
        assert again == rest(seen, at), at


def test_resumed_equals_uncut_with_workers() -> None:
    """Workers seed their streams by the stream of the main process when the epoch begins."""
    for at in ((0, 2), (1, -1), (1, 3)):
        seen, saved = run("workers", 12, save_at=at)
        again, _ = run("workers", 12, saved)
        assert again == rest(seen, at) and again, at


@pytest.mark.sample(2)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", ["shuffle", "own state", "list"])
def test_resumed_equals_uncut_on_uneven_ranks(kind: str, own: bool) -> None:
    """Rank 1 runs out in the middle, and rank 2 never has a batch."""
    sizes = [12, 6, 0] if kind == "list" else [12, 6, 2]
    for at in ((0, 0), (0, 1), (0, 2), (0, 4), (0, 5), (1, -1), (1, 3)):
        seen, saved = zip(
            *tx.simulate(lambda n, a=at: run(kind, n, save_at=a, own=own), {"data": 3}, sizes), strict=True
        )
        again = tx.simulate(lambda n, s: run(kind, n, s, own=own)[0], {"data": 3}, sizes, list(saved))
        assert again == [rest(one, at) for one in seen], at


def test_a_saved_run_may_be_saved_again() -> None:
    for kind in ("shuffle", "own state", "Shuffled"):
        sizes = [60, 60] if kind == "Shuffled" else [20, 10]
        seen, first = zip(*tx.simulate(lambda n, k=kind: run(k, n, save_at=(0, 3)), {"data": 2}, sizes), strict=True)
        _, second = zip(
            *tx.simulate(lambda n, s, k=kind: run(k, n, s, save_at=(0, 6)), {"data": 2}, sizes, list(first)),
            strict=True,
        )
        again = tx.simulate(lambda n, s, k=kind: run(k, n, s)[0], {"data": 2}, sizes, list(second))
        assert again == [rest(one, (0, 6)) for one in seen], kind


@pytest.mark.sample(2)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", ["shuffle", "own state", "Shuffled"])
def test_a_run_that_is_stopped_continues_where_it_was(kind: str, own: bool) -> None:
    """The batch that had been loaded ahead is not lost."""
    sizes = [36, 36] if kind == "Shuffled" else [12, 8]
    whole, _ = zip(*tx.simulate(lambda n: run(kind, n, own=own), {"data": 2}, sizes), strict=True)
    found = tx.simulate(lambda n: run(kind, n, save_at=(1, 1), stop=True, own=own), {"data": 2}, sizes)
    assert all(seen[-1] == "stopped" and seen[-2][:2] == (1, 2) for seen, _ in found)
    again = tx.simulate(lambda n, s: run(kind, n, s, own=own)[0], {"data": 2}, sizes, [saved for _, saved in found])
    assert [seen[:-1] + more for (seen, _), more in zip(found, again, strict=True)] == list(whole)


def on_process(saved: list[Any] | None, at: tuple[int, int] | None) -> Any:
    import numpy.random  # noqa: F401

    rank = dist.get_rank()
    return run("own state" if rank else "shuffle", 16 - 6 * rank, saved and saved[rank], at)


def test_resumed_equals_uncut_on_processes(pool: Any) -> None:
    """With numpy's stream, another loader on each rank, and ranks that end apart."""
    for at in ((1, 2), (1, 5)):
        found = pool.run(2, on_process, None, at)
        again = pool.run(2, on_process, [saved for _, saved in found], None)
        assert [seen for seen, _ in again] == [rest(seen, at) for seen, _ in found]


def test_it_says_how_many_batches_it_loads_to_skip_them() -> None:
    step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    state, loop = step.init({"w": torch.ones(2, 2, dtype=torch.float64)}), step.join(loader_of("list", 12))
    position = None
    for i, batch in enumerate(loop):
        state, _ = step(state, batch)
        position = loop.state_dict() if i == 3 else position
    assert position is not None
    loop.load_state_dict(position)
    with pytest.warns(UserWarning, match="loads 4 batches on rank 0 only to skip them"):
        for batch in loop:
            state, _ = step(state, batch)
    assert state.step == 8 and loop.epoch == 1
    short = step.join(loader_of("list", 4))
    short.load_state_dict(position)
    with pytest.warns(UserWarning, match="only to skip"):
        raises_text(ValueError, lambda: list(short), "ended after 2 batches", "a position after 4")


def test_a_position_is_numbers_and_tensors() -> None:
    _, (state, _) = run("own state", 12, save_at=(0, 2))

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            assert value.dtype is torch.uint8
            return {"tensor": value.tolist()}
        return {key: plain(one) for key, one in value.items()} if isinstance(value, dict) else value

    def back(value: Any) -> Any:
        if isinstance(value, dict):
            found = {key: back(one) for key, one in value.items()}
            return torch.tensor(found["tensor"], dtype=torch.uint8) if "tensor" in found else found
        return value

    seen, saved = run("own state", 12, save_at=(0, 2))
    read = back(json.loads(json.dumps(plain(saved[0]))))
    assert run("own state", 12, (read, saved[1]))[0] == rest(seen, (0, 2))
    assert state["epoch"] == 0 and state["batches"] == state["steps"] == 3 and not state["ended"]


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
        there = Streams.now().state_dict()
        assert Streams.now().state_dict()["numpy_rest"] == there["numpy_rest"]
        want = draw()
        draw()
        Streams.of(there).restore()
        assert draw() == want
    assert "numpy.random" in sys.modules and "cuda" not in there


def test_what_cannot_be_saved_or_loaded() -> None:
    step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    state = step.init({"w": torch.ones(2, 2, dtype=torch.float64)})
    for loop in (step.join(iter([1])), fjoin.join(x for x in [1])):
        raises_text(TypeError, loop.state_dict, "iterator", "DataLoader", "load_state_dict")
    loop = step.join(loader_of("list", 12))
    good = loop.state_dict()
    raises_text(ValueError, lambda: loop.load_state_dict({"epoch": 3}), "state_dict() of a joined loop", "['epoch']")
    raises_text(ValueError, lambda: loop.load_state_dict(3), "got 3")  # type: ignore[arg-type]
    raises_text(
        ValueError,
        lambda: loop.load_state_dict(good | {"rank": 1, "ranks": 2}),
        "rank 1 of 2",
        "rank 0 of 1",
        "Shuffled",
    )
    raises_text(
        ValueError,
        lambda: loop.load_state_dict(good | {"loader": {}}),
        "has state",
        "this loader, of type list, has none",
    )
    raises_text(
        ValueError, lambda: step.join(Stateful(4, 2)).load_state_dict(good), "has no state", "Stateful, has one"
    )
    for batch in loop:
        raises_text(fjoin.JoinError, lambda: loop.load_state_dict(good), "inside the loop")
        state, _ = step(state, batch)
    loop.load_state_dict(good)
    assert loop.state_dict() == good, "a position that has been loaded is kept until the loop begins"


NOW = ("streams", "now")
ODD: list[tuple[Any, ...]] = [
    (*NOW, "numpy_rest", 1, 10**9),  # numpy would read its memory there
    (*NOW, "numpy_rest", 1, 625),
    (*NOW, "numpy_rest", 1, -1),
    (*NOW, "numpy_rest", 1, 1.0),
    (*NOW, "numpy_rest", 2, "x"),
    (*NOW, "numpy_rest", []),
    (*NOW, "numpy", torch.zeros(8, dtype=torch.uint8)),
    (*NOW, "python", torch.zeros(625 * 8, dtype=torch.uint8).fill_(255)),
    (*NOW, "python_rest", 0, 9),
    (*NOW, "python_rest", 1, "x"),
    (*NOW, "torch", torch.zeros(5056, dtype=torch.uint8)),
    (*NOW, "cuda", 3),
    (*NOW, None),
    ("streams", {}),
    ("epoch", -1),
    ("batches", "1"),
    ("rank", True),
    ("ended", 1),
]


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
