"""Collectives on gloo and under torch.compile."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fjoin
from fjoin import transforms as tx
from tests.collective_table import DIFFERENTIABLE, OPS, inputs
from tests.helpers import same_bits
from tests.traffic import watched
from tests.transforms.axes.test_collectives import loss_of


def results() -> list[Any]:
    """On one rank each result, and the gradient of a loss of it."""
    n, rank, out = int(tx.axis_size("data")), int(tx.axis_index("data")), []
    for op, (call, shape, _) in OPS.items():
        x, y = (inputs(n, shape(n), seed=seed)[rank] for seed in range(2))
        before, got = x.clone(), call(x, n)
        assert torch.equal(x, before) and type(got) is Tensor
        grad = torch.func.grad(lambda y: loss_of(call(y, n), rank))(y) if op in DIFFERENTIABLE else None  # noqa: B023
        out.append((op, got, grad))
    half = tx.psum(torch.full((3,), 1.5, dtype=torch.bfloat16), "data")
    assert half.dtype == torch.bfloat16 and half[0] == 1.5 * n
    return out


def on_gloo() -> list[Any]:
    with fjoin.bind(fjoin.mesh({"data": -1})):
        return results()


@pytest.mark.parametrize("n", [2, 3])
def test_real_ranks_equal_simulated_ones(pool: Any, n: int) -> None:
    assert same_bits(pool.run(n, on_gloo), tx.simulate(results, {"data": n}))


def extremes(dtype: torch.dtype, rank: int) -> Tensor:
    """Each meets each: NaN, infinities, zeros and small and large numbers, in one rank's order and in another's."""
    nan, inf, tiny = float("nan"), float("inf"), torch.finfo(dtype).smallest_normal
    values = torch.tensor([nan, inf, -inf, 0.0, -0.0, 1.0, -1.0, tiny, -tiny, -nan], dtype=torch.float64).to(dtype)
    both = torch.cartesian_prod(torch.arange(10), torch.arange(10))[:, rank % 2]
    return values[both]


FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def found() -> Any:
    rank, out = torch.distributed.get_rank(), []
    with fjoin.bind(fjoin.mesh({"data": -1})):
        for dtype in FLOATS:
            x = extremes(dtype, rank)
            with watched() as sent:
                both = tx.pmax(x, "data"), tx.pmin(x, "data")
            out.append((both, [message.bytes for message in sent]))
    return out


def test_no_rank_loses_a_nan(pool: Any) -> None:
    """gloo's and NCCL's own maximum of a number and NaN may be the number."""
    real = pool.run(2, found)
    for i, dtype in enumerate(FLOATS):
        xs = [extremes(dtype, rank) for rank in range(2)]
        want = torch.maximum(*xs), torch.minimum(*xs)
        simulated = tx.simulate(lambda x: (tx.pmax(x, "data"), tx.pmin(x, "data")), {"data": 2}, xs)
        for got, _ in (real[0][i], real[1][i], (simulated[0], None)):
            for mine, right in zip(got, want, strict=True):
                assert mine.dtype is dtype and torch.equal(mine.isnan(), right.isnan())
                assert torch.equal(mine[~right.isnan()], right[~right.isnan()])
        reported = tx.explain(tx.stateless(lambda g: tx.pmax(g, "data")), {"w": xs[0]}, {"data": 2})
        assert real[0][i][1] == [reported.payload_bytes] * 2


def gathers() -> Any:
    n, out = torch.distributed.get_world_size(), []
    with fjoin.bind(fjoin.mesh({"data": -1})):
        rank = int(tx.axis_index("data"))
        for numel in (0, 1, 131_072, 131_073, 400_003):
            x = torch.arange(numel, dtype=torch.float32) * (rank + 1)
            with watched() as sent:
                rows = tx.all_gather(x, "data")
            want = torch.stack([torch.arange(numel, dtype=torch.float32) * (r + 1) for r in range(n)])
            out.append((torch.equal(rows, want), [message.bytes for message in sent]))
    return out


@pytest.mark.parametrize("n", [2, 3])
def test_two_ranks_send_large_messages_in_chunks(pool: Any, n: int) -> None:
    """Chunks of at most 512 KiB let gloo use the full bandwidth, which needs several messages at a time."""
    for result in pool.run(n, gathers):
        assert all(equal for equal, _ in result)
        one = 131_072 * 4
        assert [sent for _, sent in result[:3]] == [[0], [4], [one]]
        for numel, (_, sent) in zip((131_073, 400_003), result[3:], strict=True):
            assert sum(sent) == numel * 4
            assert len(sent) == (math.ceil(numel * 4 / one) if n == 2 else 1)
            assert n > 2 or max(sent) <= one


def on_a_grid() -> Any:
    out = []
    for mesh in (
        fjoin.mesh({"node": 2, "local": -1}),
        fjoin.mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))),
    ):
        with fjoin.bind(mesh):
            x = torch.tensor(float(2**mesh.rank))
            out.append([
                tx.psum(x, "local").item(), tx.psum(x, "node").item(), tx.psum(x, ("node", "local")).item(),
                tx.all_gather(x, ("node", "local")).tolist(), tx.axis_index(("node", "local")).item(),
            ])  # fmt: skip
            # A real axis and a simulated one in the same expression.
            times = [torch.tensor(1.0), torch.tensor(10.0)]
            mixed = tx.simulate(lambda v, x=x: tx.psum(x * v, ("node", "sim")), {"sim": 2}, times)
            out[-1].append(mixed[0].item())
    return out


def test_a_grid_of_real_ranks(pool: Any) -> None:
    for r, (own, device_mesh) in enumerate(pool.run(4, on_a_grid)):
        column = [5.0, 10.0][r % 2]
        assert own == device_mesh == [[3.0, 12.0][r // 2], column, 15.0, [1.0, 2.0, 4.0, 8.0], r, column * 11]


# -- under torch.compile -----------------------------------------------------------------------------


def compiled() -> Any:
    import torch._dynamo

    out: dict[str, Any] = {}
    warnings.simplefilter("ignore", DeprecationWarning)  # Dynamo's own, about how it handles a Function
    mesh = fjoin.mesh({"data": -1})
    n, rank = mesh.size, mesh.rank
    x = torch.arange(3.0) + rank
    with fjoin.bind(mesh):
        for name in OPS:
            call, shape, expected = OPS[name]
            xs = inputs(n, shape(n), torch.float32)
            torch._dynamo.reset()
            whole = torch.compile(lambda v, call=call: call(v * 2, n), backend="aot_eager", fullgraph=True)
            try:
                out[name] = torch.equal(whole(xs[rank]), expected([v * 2 for v in xs], rank))
            except torch._dynamo.exc.UserError:  # sizes that depend on the rank, of which Dynamo knows no number
                out[name] = name == "all_to_all_single split"
        torch._dynamo.reset()
        f = torch.compile(
            lambda v: torch.func.grad(lambda v: (tx.psum(v, "data") ** 2).sum())(v), backend="aot_eager", fullgraph=True
        )
        out["grad"] = torch.allclose(f(x), torch.func.grad(lambda v: (tx.psum(v, "data") ** 2).sum())(x))
        for name, g in {
            "vmap": lambda v: torch.func.vmap(lambda e: tx.psum(e, "data"))(v),
            "vmap of grad": lambda v: torch.func.vmap(torch.func.grad(lambda e: tx.psum(e, "data") ** 2))(v),
        }.items():
            torch._dynamo.reset()
            try:
                got = torch.compile(g, backend="aot_eager", fullgraph=True)(x)
                out[name] = ("ran", torch.allclose(got, g(x)))
            except Exception as error:
                out[name] = ("raised", str(error))
    return out


@pytest.mark.long
def test_compiled_collectives_are_right_or_refuse(pool: Any) -> None:
    for result in pool.run(2, compiled):
        for name in [*OPS, "grad"]:
            assert result[name] is True, name
        assert result["vmap"][0] == "raised" and "drop the batching rule" in result["vmap"][1], result["vmap"]
        assert result["vmap of grad"][0] == "raised" and "drop the batching rule" in result["vmap of grad"][1]
