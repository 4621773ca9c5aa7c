"""The position of a joined loop: what is in it, and what is refused. test_same_run.py resumes runs from it."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import fjoin
from fjoin import transforms as tx
from fjoin.loading._generators import Streams
from tests.helpers import raises_text, same_bits
from tests.loading.test_same_run import Alive, loader_of
from tests.training.small import step_of


def test_it_says_how_many_batches_it_loads_to_skip_them() -> None:
    one, _ = step_of()
    state, loop, position = one.init({"w": torch.ones(2, 2)}), one.join(loader_of("list", 12)), {}
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
    loop = step_of()[0].join(loader_of("own state", 12))
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
        numbers = numpy.random.random(), numpy.random.normal()
        return [torch.rand(()).item(), random.random(), random.gauss(0, 1), *numbers]

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
    for loop in (step_of()[0].join(iter([1])), fjoin.join(x for x in [1])):
        raises_text(TypeError, loop.state_dict, "iterator", "DataLoader", "load_state_dict")
    loop, other = fjoin.join([1, 2]), fjoin.join(Alive(4, 2))
    good = loop.state_dict()
    rows: list[tuple[Any, ...]] = [
        (loop, {"epoch": 3}, "state_dict() of a joined loop", "['epoch']"),
        (loop, 3, "got 3"),
        (loop, good | {"rank": 1, "ranks": 2}, "rank 1 of 2", "rank 0 of 1", "Shuffled"),
        (loop, good | {"loader": {}}, "has state", "this loader, of type list, has none"),
        (other, good, "has no state", "Alive, has one"),
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


# -- a batch sampler over the steps of all ranks --


def test_another_epoch_or_seed_has_another_order() -> None:
    orders = [batches_of(64, 64, epoch, seed=seed) for seed, epoch in ((2, 0), (2, 1), (9, 0), (-1, 0))]
    assert all(sorted(order[0]) == list(range(64)) for order in orders)
    assert len({tuple(order[0]) for order in orders}) == 4
    assert orders[1] == [torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()], (
        "as DistributedSampler"
    )


def batches_of(n: int, size: int, epoch: int, first: int = 0, seed: int = 2, **options: Any) -> list[list[int]]:
    sampler = fjoin.Shuffled(n, size, seed=seed, **options)
    sampler.set_epoch(epoch, first)
    assert first or len(sampler) == len(list(sampler))
    return list(sampler)


@pytest.mark.sample(2)
@pytest.mark.parametrize("n, size", [(0, 4), (1, 4), (12, 4), (13, 4), (14, 5), (29, 7), (30, 4)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_epoch_visits_every_sample_once(n: int, size: int, ranks: int) -> None:
    whole = batches_of(n, size, 1)
    for epoch in (0, 1):
        found = tx.simulate(lambda: batches_of(n, size, epoch), {"data": ranks})  # noqa: B023
        assert sorted(i for rank in found for batch in rank for i in batch) == list(range(n))
    for t in range(n // size + 1):
        step = [i for rank in found for i in (rank[t] if t < len(rank) else [])]
        assert step == (whole[t] if t < len(whole) else []), "a step has the same samples on any number of ranks"
        sizes = [len(rank[t]) if t < len(rank) else 0 for rank in found]
        assert max(sizes) - min(sizes) <= 1
    dropped = tx.simulate(lambda: batches_of(n, size, 1, drop_last=True), {"data": ranks})
    assert {len(rank) for rank in dropped} == {n // size}
    assert [i for batch in zip(*dropped, strict=True) for part in batch for i in part] == sum(whole[: n // size], [])


def consumed(n: int, saved: Any, until: tuple[int, int] | None) -> tuple[list[tuple[int, int]], Any]:
    """Epoch and sample of each batch, from a position to another, and that."""
    loader, seen = DataLoader(range(n), batch_sampler=fjoin.Shuffled(n, 6, seed=1)), list[tuple[int, int]]()
    loop = fjoin.join(loader, mesh=fjoin.mesh({"data": -1}), weight=len, empty=torch.zeros(0))
    if saved is not None:
        loop.load_state_dict(saved)
    for epoch in range(loop.epoch, 2):
        for batch in loop:
            seen += [(epoch, i) for i in batch.int().tolist() if loop.weight]
            if until == (epoch, loop._position.steps - 1):
                loop.stop()
                return seen, loop.state_dict()
    return seen, None


@pytest.mark.sample(3)
@pytest.mark.parametrize("n", [40, 43])
@pytest.mark.parametrize("ranks", [(1, 3), (3, 2), (4, 1), (2, 4)])
def test_another_number_of_ranks_takes_the_samples_that_are_left(n: int, ranks: tuple[int, int]) -> None:
    for until in ((0, 0), (0, 3), (0, 6), (0, 7), (1, 2))[: 5 if n > 42 else 3]:
        first = tx.simulate(lambda u=until: consumed(n, None, u), {"data": ranks[0]})
        for _, saved in first:  # any rank's position will do
            second = tx.simulate(lambda s=saved: consumed(n, s, None), {"data": ranks[1]})
            found = sorted(one for seen, _ in [*first, *second] for one in seen)
            assert found == [(epoch, i) for epoch in (0, 1) for i in range(n)], until


def after(n: int, steps: int, accumulate: int) -> tuple[list[tuple[int, int]], list[Any]]:
    """Epoch and sample of each batch of two epochs from a number of steps on, and the batches that the body got."""
    loader, seen, given = DataLoader(range(n), batch_sampler=fjoin.Shuffled(n, 6, seed=1)), list[tuple[int, int]](), []
    loop = fjoin.join(loader, mesh=fjoin.mesh({"data": -1}), weight=len, accumulate=accumulate)
    loop.begin_at(steps, accumulate)
    while loop.epoch < 2:
        epoch = loop.epoch
        for batch in loop:
            given.append(batch.tolist())  # not NO_BATCH
            seen += [(epoch, i) for i in batch.int().tolist() if loop.weight]
    return seen, given


@pytest.mark.parametrize("n", [40, 43])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_loop_begins_at_a_number_of_steps(n: int, accumulate: int, ranks: int) -> None:
    """Its samples are those that fewer steps of one rank have left, also of the last step, in which not all ranks have some."""
    each = -(-len(batches_of(n, 6, 0)) // accumulate)
    whole = [(epoch, i) for epoch in (0, 1) for i in range(n)]
    order = [[i for batch in batches_of(n, 6, epoch, seed=1) for i in batch] for epoch in (0, 1)]
    for steps in (0, 1, each - 1, each, each + 1, 2 * each - 1, 2 * each):
        epoch, at = divmod(steps, each)
        used = {
            (e, i)
            for e in (0, 1)
            for i in (order[e] if e < epoch else order[e][: 6 * accumulate * at] if e == epoch else [])
        }
        found = tx.simulate(lambda s=steps: after(n, s, accumulate), {"data": ranks})
        assert sorted(one for seen, _ in found for one in seen) == sorted(set(whole) - used), steps


def test_where_a_loop_cannot_begin() -> None:
    loop = fjoin.join([1])
    raises_text(ValueError, lambda: loop.begin_at(1), "begin_at", "fjoin.Shuffled", "got a list")
    loop = fjoin.join(DataLoader(range(4), batch_sampler=fjoin.Shuffled(4, 1)))
    for _ in loop:
        raises_text(fjoin.JoinError, lambda: loop.begin_at(1), "begin_at was called inside the loop")
    raises_text(ValueError, lambda: loop.begin_at(-1), "steps must be")


# -- the checksum of the batch that a position has loaded ahead: of batches of any type, the same in another process --


class Slots:
    __slots__ = ("a",)

    def __init__(self, a: Any) -> None:
        self.a = a


class Graph:
    """With a circle."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.edges, self.me = x, [torch.arange(4)], self


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    names: list[str]


class Fails:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


Named = collections.namedtuple("Named", "a b")
Kind = enum.Enum("Kind", "A B")


def batches(i: int) -> dict[str, Any]:
    """Batches that differ by `i` in one place."""
    x = torch.ones(3, 2)
    x[2, 1] += i
    late = torch.zeros(64, 3)
    late[-1, -1] = i
    return {
        "tensor": x, "expanded": x[2, 1].expand(20, 20), "its last element": late,
        "bool": x > 1, "bfloat16, transposed": x.bfloat16().T, "complex": x * 1j,
        "fp8": x.to(torch.float8_e4m3fn), "dict": {"b": x, 1: "x"}, "nested": [[{"a": (x,)}]], "dataclass": Pair(x, ["a"]),
        "its text": Pair(x[:1], ["a", str(i)]), "graph": Graph(x), "named": Named(1, x),
        "packed": torch.nn.utils.rnn.pack_sequence([x, x[:2]]), "array": x.numpy(),
        "array of objects": np.array([None, str(i)], dtype=object), "array of text": np.array(["a", str(i)]),
        "scalar": np.float32(i), "texts": ["a", str(i)], "bytes": b"a" * (3 + i), "number": i, "nan": [float("nan"), i],
        "enum": [*Kind][i], "shape": torch.zeros(i, 2), "dtype": torch.ones(2, dtype=[torch.float32, torch.int32][i]),
    }  # fmt: skip


def of_a_type_alone() -> dict[str, Any]:
    x = torch.ones(3, 2)
    return {
        "sparse": x.to_sparse(), "set": {1, 2}, "jagged": torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
        "large": x[0, 0].expand(2**20, 2**20),
        "slots": Slots(x), "function": batches, "module": torch.nn.Linear(2, 2), "meta": x.to("meta"), "None": None,
        "fails": Fails(),
    }  # fmt: skip


def checksums(i: int) -> dict[str, Any]:
    """Of the batch behind the first one."""
    found = {}
    for name, batch in (batches(i) | of_a_type_alone()).items():
        loop = fjoin.join([0, batch], mesh=fjoin.mesh({"data": 1}))
        for _ in loop:
            found[name] = loop.state_dict()["ahead"]
            loop.stop()
    return found


def test_another_content_has_another_checksum() -> None:
    one, other = checksums(0), checksums(1)
    assert one == checksums(0)
    assert {name for name in one if one[name] == other[name]} == of_a_type_alone().keys()
    assert {name for name in one if one[name] is None} == {"fails"}


def test_another_process_has_the_same() -> None:
    script = "import json; from tests.loading.test_positions import checksums; print(json.dumps(checksums(0)))"
    env = os.environ | {"PYTHONHASHSEED": "3", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(done.stdout.splitlines()[-1]) == checksums(0)
