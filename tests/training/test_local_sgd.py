"""Local SGD on real ranks: its messages are those announced, and averages are equal to the bit."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff
from tests.traffic import watched

NODES = {"node": 2, "local": 2}
ADAM = tx.adam(1e-2)
PIPELINES = {
    "average": tx.local_sgd(ADAM, tx.mean("data"), 3),
    "average of states": tx.local_sgd(ADAM, tx.mean("data"), 3, state="average"),
    "int8": tx.local_sgd(ADAM, tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), 3),
    "post-local": tx.post_local_sgd(ADAM, tx.mean("node"), 3, 4, hook=tx.mean(("node", "local")), local=tx.mean("local")),
    "hierarchical": tx.fuse(
        tx.identity(),
        ADAM,
        after=tx.chain(
            tx.every(2, tx.average_parameters("local"), first=4, except_every=4),
            tx.every(4, tx.average_parameters(("node", "local")), first=4),
        ),
    ),
    "DiLoCo": tx.diloco(ADAM, tx.mean("data"), 3),
    "DiLoCo, bf16": tx.diloco(ADAM, tx.error_feedback(tx.compress(tx.bfloat16(), tx.mean("data"))), 3),
    "DiLoCo, top-k": tx.diloco(ADAM, tx.error_feedback(tx.compress(tx.top_k(0.1), tx.mean("data"))), 3),
    "DiLoCo, by its own reduction": tx.diloco(ADAM, tx.power_sgd("data", min_compression_rate=1.0), 3),
    "streaming": tx.diloco(ADAM, tx.error_feedback(tx.compress(tx.int4(), tx.mean("data"))), 6, fragments=3, delay=2, mix=0.5),
    "nested periods": tx.fuse(tx.identity(), ADAM, after=tx.every(2, tx.every(2, tx.average_parameters("data")))),
    "switch": tx.fuse(
        tx.identity(),
        ADAM,
        after=tx.switch_after(
            5,
            tx.every(2, tx.every(4, tx.average_parameters("data"))),
            tx.switch_after(
                3, tx.outer_step(tx.mean("data"), tx.sgd(1.0), 2), tx.every(4, tx.average_parameters("data"), first=0)
            ),
        ),
    ),
}  # fmt: skip
ENDS = {name for name in PIPELINES if name not in ("hierarchical", "nested periods", "post-local", "switch")}


def loss(params: Any, batch: Tensor) -> Tensor:
    return ((batch @ params["w"] + params["b"]).tanh() @ params["v"]).square().mean()


def start(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(0)
    shapes = {"w": (8, 16), "b": (16,), "v": (16,)}
    return {name: torch.randn(shape, generator=gen).to(dtype) for name, shape in shapes.items()}


def axes_of(name: str, ranks: int) -> dict[str, int]:
    return NODES if "'local'" in repr(PIPELINES[name]) else {"data": ranks}


def messages(name: str, ranks: int) -> Any:
    """The payloads in bytes of each of 13 steps, and the final parameters."""
    step = fjoin.train_step(loss, PIPELINES[name], mesh=fjoin.mesh(axes_of(name, ranks)))
    state, rank, seen = step.init(start()), step.rank, []
    gen = torch.Generator().manual_seed(rank)
    for _ in range(13):
        with watched() as sent:
            state, _ = step(state, torch.randn(4, 8, generator=gen))
        seen.append(sorted(m.bytes for m in sent))
    return seen, state.clone().params


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PIPELINES)
def test_messages_are_those_announced(pool: Any, name: str) -> None:
    ranks = 4 if axes_of(name, 2) == NODES else 2
    params = start()
    found = pool.run(ranks, messages, name, ranks)
    for i in range(1, 13):  # in the first step ranks compare their records too
        what = tx.explain(PIPELINES[name], params, axes_of(name, ranks), at_step=i)
        expected = sorted(m.payload_bytes for row in what.rows for m in row.messages)
        for seen, _ in found:
            assert seen[i] == expected, i
    if name in ENDS:  # step 12 (counted from 1) ends with an average
        assert len(found[0][0][11]) > len(found[0][0][12]) or name == "streaming"


AVERAGE, PARTS = tx.average_parameters("data"), [tx.outer_step(tx.mean("data"), tx.sgd(1.0), 3, i) for i in range(3)]
OF_PARTS = {
    "masked": tx.every(3, tx.masked(AVERAGE, "a")),
    "partition": tx.partition({"a": tx.every(2, AVERAGE), "*": tx.every(3, AVERAGE)}),
}


def four_dtypes() -> dict[str, Tensor]:
    sizes = {torch.bfloat16: 300, torch.float32: 17, torch.float64: 5, torch.float16: 6}
    return {name: torch.ones(n, dtype=dtype) for name, (dtype, n) in zip("abcd", sizes.items(), strict=True)}


def messages_of_parts(name: str) -> list[list[int]]:
    step = fjoin.train_step(
        lambda params, batch: sum((p.float() * batch).square().sum() for p in params.values()),
        tx.fuse(tx.identity(), tx.sgd(0.1), after=OF_PARTS[name]),
    )
    state, seen = step.init(four_dtypes()), []
    for _ in range(7):
        with watched() as sent:
            state, _ = step(state, torch.tensor(0.1))
        seen.append(sorted(m.bytes for m in sent))
    return seen


@pytest.mark.gloo
@pytest.mark.parametrize("name", OF_PARTS)
def test_messages_of_partial_averages_match_explain(pool: Any, name: str) -> None:
    """The dtypes of the other parameters do not matter."""
    pipeline = tx.fuse(tx.identity(), tx.sgd(0.1), after=OF_PARTS[name])
    for seen in pool.run(2, messages_of_parts, name):
        for i in range(1, 7):
            what = tx.explain(pipeline, four_dtypes(), {"data": 2}, at_step=i)
            assert seen[i] == sorted(m.payload_bytes for row in what.rows for m in row.messages), i


def averages(name: str, rounds: int, bucket_bytes: int, mixed: bool) -> Any:
    """Whether parameters and outer state are equal on all ranks after each average."""
    dtype = torch.bfloat16 if mixed else torch.float32
    pipeline = PIPELINES[name]
    if mixed:
        pipeline = tx.diloco(tx.mixed_precision(ADAM), tx.mean("data"), 3)
    step = fjoin.train_step(loss, pipeline, bucket_bytes=bucket_bytes)
    state, gen = step.init(start(dtype)), torch.Generator().manual_seed(step.rank)
    mesh, apart, unequal = fjoin.mesh({"data": -1}), 0, 0
    for number in range(rounds):
        for i in range(3):
            state, _ = step(state, torch.randn(4, 8, generator=gen).to(dtype))
            if i < 2 and number >= 10:
                continue
            after = state.pipeline.after
            shared: Any = (state.params, getattr(after, "anchor", ()), getattr(after, "optimizer", ()))
            flat = torch.cat([leaf.reshape(-1).double() for leaf in optree.tree_leaves(shared)])
            with fjoin.bind(mesh):
                differ = bool((tx.pmax(flat, "data") != tx.pmin(flat, "data")).any())
            if i == 2:
                unequal += differ
            else:
                apart += differ
    return apart, unequal


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name, bucket_bytes, mixed",
    [("DiLoCo", 64, False), ("average", 10**6, False), ("int8", 300, False), ("DiLoCo", 64, True)],
)
@pytest.mark.parametrize(
    "ranks, rounds", [(2, 60), (3, 60), *(pytest.param(n, 500, marks=pytest.mark.long) for n in (2, 3, 4))]
)
def test_averages_are_equal_to_the_bit(
    pool: Any, ranks: int, rounds: int, name: str, bucket_bytes: int, mixed: bool
) -> None:
    """In many buckets too; between them the ranks differ."""
    for apart, unequal in pool.run(ranks, averages, name, rounds, bucket_bytes, mixed):
        assert unequal == 0 and apart == 20


def nested(steps: int) -> Any:
    """Period 1 on nested axes, without any other synchronization."""
    after = tx.chain(
        tx.every(1, tx.average_parameters("local")), tx.every(1, tx.average_parameters(("node", "local"))),
        tx.every(1, tx.average_parameters("node")),
    )  # fmt: skip
    step = fjoin.train_step(loss, tx.fuse(tx.identity(), ADAM, after=after), mesh=fjoin.mesh(NODES))
    state, gen = step.init(start()), torch.Generator().manual_seed(step.rank)
    for _ in range(steps):
        state, _ = step(state, torch.randn(4, 8, generator=gen))
    return state.clone().params


@pytest.mark.long
def test_averages_on_nested_axes_in_every_step(pool: Any) -> None:
    first, *others = pool.run(4, nested, 500)
    assert all(max_diff(first, other) < 1e-5 for other in others)
