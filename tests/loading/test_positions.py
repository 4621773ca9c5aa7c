"""The position of a joined loop: what is in it, and what is refused. test_same_run.py resumes runs from it."""

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

import fjoin
from fjoin import transforms as tx
from fjoin.loading._generators import Streams
from tests.helpers import raises_text, same_bits
from tests.loading.loaders import Stateful, loader_of


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
