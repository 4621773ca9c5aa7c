"""Random configurations: shared memory, gloo in rank order and the simulator have the same bits."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import stepped

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
HOOKS: dict[str, Any] = {
    "mean": lambda: tx.mean("data"),
    "live": lambda: tx.mean("data", over="live"),
    "clip": lambda: tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.5)),
    "int8": lambda: tx.compress(tx.int8(), tx.mean("data")),
    "feedback": lambda: tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))),
    "bfloat16": lambda: tx.compress(torch.bfloat16, tx.mean("data")),
    "power_sgd": lambda: tx.error_feedback(tx.power_sgd("data", rank=1)),
    "switch": lambda: tx.switch_after(2, tx.mean("data"), tx.compress(tx.bfloat16(), tx.mean("data"))),
    "top_k": lambda: tx.error_feedback(tx.compress(tx.top_k(0.2), tx.mean("data"))),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: tx.sgd(0.1, momentum=0.9), "adamw": lambda: tx.adamw(0.01), "muon": lambda: tx.muon(0.01),
    "adafactor": lambda: tx.adafactor(0.01),
}  # fmt: skip
COLLECTIVES: dict[str, Any] = {
    "psum": lambda x, w: tx.psum(x, "data"), "pmean": lambda x, w: tx.pmean(x, "data"),
    "pmax": lambda x, w: tx.pmax(x, "data"), "pbroadcast": lambda x, w: tx.pbroadcast(x, "data", w - 1),
    "all_gather": lambda x, w: tx.all_gather(x, "data").sum(0),
    "ppermute": lambda x, w: tx.ppermute(x, "data", [(i, (i + 1) % w) for i in range(w)]),
}  # fmt: skip


class Configuration:
    """One run, chosen by a seed: a pipeline or a sharded one, parameters, ranks, and collectives in the loss."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.seed, self.ranks = seed, chance.choice([2, 2, 3, 4])
        self.hook, self.optimizer = chance.choice(list(HOOKS)), chance.choice(list(OPTIMIZERS))
        self.zero = self.hook in ("mean", "clip") and chance.random() < 0.4
        self.dtype = chance.choice(DTYPES)
        shapes = [(3,), (), (0,), (17, 5), (64, 64), (130, 257), (2, 3, 4), (1, 1), (20_000,), (300, 200)]
        self.shapes = [chance.choice(shapes) for _ in range(chance.randint(1, 6))]
        if self.optimizer == "muon":  # of matrices
            self.shapes = [shape for shape in self.shapes if len(shape) == 2] or [(64, 64)]
        self.collectives = chance.sample(list(COLLECTIVES), 2)
        self.steps, self.bucket_bytes = chance.randint(2, 4), chance.choice([1000, 100_000, 2**20])
        self.whole_step = chance.random() < 0.5  # or a loop of one's own

    def __repr__(self) -> str:
        return f"configuration {vars(self)}"

    def pipeline(self) -> Any:
        hook, optimizer = HOOKS[self.hook](), OPTIMIZERS[self.optimizer]()
        return tx.zero(hook, optimizer, "data") if self.zero else tx.fuse(hook, optimizer)


def trained(c: Configuration, mesh: Any, bound: bool) -> Any:
    """Parameters after some steps, and collectives of them; or the error that refuses the configuration."""
    chance = torch.Generator().manual_seed(c.seed)
    params = {f"p{i}": torch.randn(shape, generator=chance).to(c.dtype) for i, shape in enumerate(c.shapes)}
    mine = torch.Generator().manual_seed(1000 * c.seed + mesh.rank)
    batches = [torch.randn((), generator=mine).to(c.dtype) for _ in range(c.steps)]

    def loss(p: Any, x: Tensor) -> Tensor:
        return sum((leaf * (leaf * x).sin()).sum() for leaf in p.values())  # type: ignore[return-value]

    try:
        pipeline = c.pipeline()
        if c.whole_step:
            step = fjoin.train_step(
                loss, pipeline, mesh=mesh, bucket_bytes=c.bucket_bytes, weight=lambda x: 1 + mesh.rank
            )
            state = stepped(step, step.init(params), batches)
            params = {path: leaf.clone() for path, leaf in state.params.items()}
        with contextlib.nullcontext() if bound else fjoin.bind(mesh):
            state = pipeline.init(params)
            for batch in batches if not c.whole_step else ():
                grads = torch.func.grad(loss)(params, batch)
                params, state = pipeline.step(params, grads, state, weight=1.0 + mesh.rank)
            return params, {
                name: COLLECTIVES[name]({path: leaf + mesh.rank for path, leaf in params.items()}, mesh.size)
                if name != "all_gather" else COLLECTIVES[name](params["p0"] * mesh.rank, mesh.size)
                for name in c.collectives
            }  # fmt: skip
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def on_ranks(seeds: list[int], transport: str) -> list[Any]:
    found = []
    for seed in seeds:
        mesh = fjoin.mesh({"data": -1}, transport=transport, ordered=True)
        found.append(trained(Configuration(seed), mesh, False))
        mesh.close()
    return found


CASES = [
    (ranks, seeds)
    for ranks in (2, 3, 4)
    for whole in [[seed for seed in range(230) if Configuration(seed).ranks == ranks]]
    for seeds in (whole[i : i + 8] for i in range(0, len(whole), 8))
]
FIRST = {ranks: next(seeds for n, seeds in CASES if n == ranks) for ranks in (2, 3, 4)}


@pytest.mark.parametrize(
    "ranks, seeds",
    [
        pytest.param(ranks, seeds[:3] if part == "sample" else seeds, id=f"{ranks}-{seeds[0]}-{part}", marks=marks)
        for ranks, seeds in CASES
        for part, marks in (("sample", ()), ("whole", pytest.mark.long))
        if part == "whole" or seeds == FIRST[ranks]
    ],
)
def test_all_transports_have_the_same_bits(pool: Any, ranks: int, seeds: list[int]) -> None:
    shared, gloo = (pool.run(ranks, on_ranks, seeds, transport) for transport in ("shared", "gloo"))
    for i, seed in enumerate(seeds):
        c = Configuration(seed)
        simulated = tx.simulate(lambda: trained(c, fjoin.mesh({"data": -1}), True), {"data": ranks})  # noqa: B023
        for rank in range(ranks):
            for found in (shared[rank][i], gloo[rank][i]):
                same(found, simulated[rank], repr(c))


def same(found: Any, want: Any, where: str) -> None:
    if isinstance(want, str) or isinstance(found, str):  # refused, alike everywhere
        assert found == want, where
        return
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}")


def test_few_configurations_are_refused() -> None:
    """Otherwise the table would compare refusals."""
    refused = []
    for seed in range(40):
        c = Configuration(seed)
        if isinstance(found := trained(c, fjoin.mesh({"data": -1}), False), str):
            refused.append(f"{c}: {found}")
    assert len(refused) < 10, "\n".join(refused)
