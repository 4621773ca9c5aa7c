"""Collectives by axis name: JAX's meaning, on both engines, on gloo, nested, differentiated, mapped, compiled."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers import max_diff, raises_text, same_bits
from torch import Tensor

import fjoin
from fjoin import transforms as tx

SIZES = [1, 2, 3, 5]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.bfloat16, torch.float16, torch.uint8]


def _inputs(n: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 9, shape, generator=g).to(dtype) for _ in range(n)]


def _ring(n: int) -> list[tuple[int, int]]:
    return [(r, (r + 1) % n) for r in range(n)]


# For each collective: its call, the input's shape for n ranks, and rank r's result in plain torch.
OPS: dict[str, tuple[Any, Any, Any]] = {
    "psum": (lambda x, n: tx.psum(x, "data"), lambda n: (2, 3), lambda xs, r: sum(xs)),
    "pmax": (lambda x, n: tx.pmax(x, "data"), lambda n: (2, 3), lambda xs, r: torch.stack(xs).amax(0)),
    "pmin": (lambda x, n: tx.pmin(x, "data"), lambda n: (2, 3), lambda xs, r: torch.stack(xs).amin(0)),
    "pbroadcast": (lambda x, n: tx.pbroadcast(x, "data", n - 1), lambda n: (2, 3), lambda xs, r: xs[-1]),
    "all_gather": (lambda x, n: tx.all_gather(x, "data"), lambda n: (2, 3), lambda xs, r: torch.stack(xs)),
    "all_gather dim": (lambda x, n: tx.all_gather(x, "data", dim=1), lambda n: (2, 3), lambda xs, r: torch.stack(xs, 1)),
    "all_gather tiled": (
        lambda x, n: tx.all_gather(x, "data", dim=1, tiled=True), lambda n: (2, 3), lambda xs, r: torch.cat(xs, 1),
    ),
    "psum_scatter": (lambda x, n: tx.psum_scatter(x, "data"), lambda n: (n, 3), lambda xs, r: sum(xs)[r]),
    "psum_scatter dim": (lambda x, n: tx.psum_scatter(x, "data", dim=1), lambda n: (3, n), lambda xs, r: sum(xs)[:, r]),
    "psum_scatter tiled": (
        lambda x, n: tx.psum_scatter(x, "data", dim=1, tiled=True), lambda n: (3, 2 * n),
        lambda xs, r: sum(xs)[:, 2 * r : 2 * r + 2],
    ),
    "all_to_all": (lambda x, n: tx.all_to_all(x, "data"), lambda n: (n, 3), lambda xs, r: torch.stack([x[r] for x in xs])),
    "all_to_all dims": (
        lambda x, n: tx.all_to_all(x, "data", 1, 0), lambda n: (3, n), lambda xs, r: torch.stack([x[:, r] for x in xs]),
    ),
    "all_to_all tiled": (
        lambda x, n: tx.all_to_all(x, "data", 1, 0, tiled=True), lambda n: (3, 2 * n),
        lambda xs, r: torch.cat([x[:, 2 * r : 2 * r + 2] for x in xs], 0),
    ),
    "ppermute": (lambda x, n: tx.ppermute(x, "data", _ring(n)), lambda n: (2, 3), lambda xs, r: xs[r - 1]),
    "ppermute partial": (
        lambda x, n: tx.ppermute(x, "data", _ring(n)[:-1]), lambda n: (2, 3),
        lambda xs, r: xs[r - 1] if r else xs[0] * 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("engine", ["lockstep", "vmap"])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("op", OPS)
def test_meaning(op: str, n: int, engine: Any) -> None:
    call, shape, expected = OPS[op]
    xs = _inputs(n, shape(n))
    out = tx.simulate(lambda x: call(x, n), {"data": n}, xs, engine=engine)
    for r in range(n):
        assert torch.equal(out[r], expected(xs, r)), (op, r)


@pytest.mark.parametrize("op", OPS)
def test_one_rank_without_a_simulator(op: str) -> None:
    call, shape, expected = OPS[op]
    (x,) = _inputs(1, shape(1))
    with fjoin.bind(fjoin.mesh({"data": -1})):
        out = call(x, 1)
    assert torch.equal(out, expected([x], 0))
    assert out.data_ptr() != x.data_ptr(), "results are new tensors"


DIFFERENTIABLE = [op for op in OPS if not op.startswith(("pmax", "pmin"))]


@pytest.mark.parametrize("engine", ["lockstep", "vmap"])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradient_is_that_of_the_sum_of_all_ranks_outputs(op: str, n: int, engine: Any) -> None:
    call, shape, expected = OPS[op]
    xs = _inputs(n, shape(n), seed=1)

    def loss_of(out: Tensor, r: Any) -> Tensor:
        return (out**2 * torch.arange(1.0, out.numel() + 1, dtype=out.dtype).view(out.shape)).sum() * (1 + r)

    def one_rank(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: loss_of(call(x, n), tx.axis_index("data")))(x)

    got = tx.simulate(one_rank, {"data": n}, xs, engine=engine)
    leaves = [x.clone().requires_grad_() for x in xs]
    sum(loss_of(expected(leaves, r), r) for r in range(n)).backward()
    for r in range(n):
        want = torch.zeros_like(xs[r]) if leaves[r].grad is None else leaves[r].grad
        assert max_diff(got[r], want) < 1e-9, (op, r)


@pytest.mark.parametrize("engine", ["lockstep", "vmap"])
def test_second_derivatives(engine: Any) -> None:
    """d2/dx_r dx_s of (sum x)^3 summed over n ranks is 6 n sum x, for every pair."""

    def one_rank(x: Tensor) -> Tensor:
        inner = torch.func.grad(lambda x: tx.psum(x, "data") ** 3)
        return torch.func.grad(lambda x: inner(x))(x)

    out = tx.simulate(one_rank, {"data": 3}, [torch.tensor(v) for v in (1.0, 2.0, 3.0)], engine=engine)
    assert all(v.item() == 3 * 3 * 6 * 6.0 for v in out)


def test_maximum_has_no_gradient() -> None:
    run = lambda x: torch.func.grad(lambda x: tx.pmax(x, "data"))(x)  # noqa: E731
    raises_text(TypeError, lambda: tx.simulate(run, {"data": 2}, [torch.tensor(1.0)] * 2), "pmax has no gradient")


@pytest.mark.parametrize("engine", ["lockstep", "vmap"])
@pytest.mark.parametrize("op", OPS)
def test_somebody_elses_vmap_around_it(op: str, engine: Any) -> None:
    """torch.func.vmap over an ensemble of 4, inside each rank."""
    call, shape, expected = OPS[op]
    n = 3
    xs = [torch.stack(_inputs(4, shape(n), seed=r)) for r in range(n)]
    out = tx.simulate(lambda x: torch.func.vmap(lambda v: call(v, n))(x), {"data": n}, xs, engine=engine)
    for r in range(n):
        want = torch.stack([expected([x[k] for x in xs], r) for k in range(4)])
        assert torch.equal(out[r], want)


@pytest.mark.parametrize("engine", ["lockstep", "vmap"])
def test_constants_count_once_per_rank(engine: Any) -> None:
    assert [
        v.item()
        for v in tx.simulate(lambda x: tx.psum(torch.tensor(2.0), "data"), {"data": 3}, [0.0] * 3, engine=engine)
    ] == [6.0] * 3
    assert [v.item() for v in tx.simulate(lambda x: tx.psum(1, "data"), {"data": 3}, [0.0] * 3, engine=engine)] == [
        3
    ] * 3


@pytest.mark.parametrize("engine", ["lockstep", "vmap"])
def test_nested_axes_and_tuples(engine: Any) -> None:
    shape = {"node": 2, "local": 3}
    xs = [torch.tensor(float(2**r)) for r in range(6)]

    def run(fn: Any) -> list[Any]:
        return [v.tolist() for v in tx.simulate(fn, shape, xs, engine=engine)]

    assert run(lambda x: tx.psum(x, "local")) == [7.0] * 3 + [56.0] * 3
    assert run(lambda x: tx.psum(x, "node")) == [9.0, 18.0, 36.0] * 2
    assert run(lambda x: tx.psum(x, ("node", "local"))) == run(lambda x: tx.psum(x, ("local", "node"))) == [63.0] * 6
    assert run(lambda x: tx.pmean(x, ("node", "local"))) == [10.5] * 6
    assert run(lambda x: tx.all_gather(x, ("node", "local"))) == [[1.0, 2.0, 4.0, 8.0, 16.0, 32.0]] * 6
    assert run(lambda x: tx.all_gather(x, ("local", "node"))) == [[1.0, 8.0, 2.0, 16.0, 4.0, 32.0]] * 6
    assert run(lambda x: tx.axis_index(("node", "local"))) == list(range(6))
    assert run(lambda x: tx.axis_index(("local", "node"))) == [0, 2, 4, 1, 3, 5]
    scattered = run(lambda x: tx.psum_scatter(x * torch.arange(6.0), ("node", "local")))
    assert scattered == [63.0 * r for r in range(6)]
    back = run(lambda x: tx.all_gather(tx.psum_scatter(x * torch.arange(6.0), ("node", "local")), ("node", "local")))
    assert back == [[63.0 * r for r in range(6)]] * 6


@pytest.mark.parametrize("engine", ["lockstep", "vmap"])
def test_control_flow_on_a_sum(engine: Any) -> None:
    """What a loop over uneven inputs needs: Python decides on what is equal on all ranks."""

    def one_rank(count: Tensor) -> Tensor:
        left, rounds = count, 0
        while tx.psum((left > 0).long(), "data") > 0:
            left, rounds = left - 1, rounds + 1
        return torch.tensor(rounds)

    assert tx.simulate(one_rank, {"data": 4}, [torch.tensor(c) for c in (3, 1, 2, 0)], engine=engine) == [3] * 4


def test_trees_travel_packed() -> None:
    """One message per dtype, whatever the tree."""
    from fjoin.transforms._explain import _Recorder
    from fjoin.transforms.axes._env import bind_axes

    notes: list[Any] = []
    tree = {
        "a": torch.ones(3),
        "b": [torch.ones(2, 2), torch.ones(())],
        "c": torch.ones(4, dtype=torch.float64),
        "d": 1,
    }
    with bind_axes({"data": _Recorder("data", 4, notes, {"data": 4})}):
        tx.psum(tree, "data")
        assert [(m.dtype, m.payload_bytes) for m in notes] == [
            (torch.float32, 32),
            (torch.float64, 32),
            (torch.int64, 8),
        ]
        notes.clear()
        out = tx.all_gather(tree, "data")
        assert len(notes) == 3 and out["b"][0].shape == (4, 2, 2)
    (out, _) = tx.simulate(lambda: tx.psum(tree, "data"), {"data": 2})
    assert same_bits(out, {"a": torch.ones(3) * 2, "b": [torch.ones(2, 2) * 2, torch.ones(()) * 2],
                           "c": torch.ones(4, dtype=torch.float64) * 2, "d": torch.tensor(2)})  # fmt: skip


@pytest.mark.parametrize("engine", ["lockstep", "vmap"])
def test_empty_trees_and_tensors(engine: Any) -> None:
    assert tx.simulate(lambda x: tx.psum({}, "data"), {"data": 2}, [0.0, 0.0], engine=engine) == [{}, {}]
    out = tx.simulate(lambda x: tx.psum((x[:0], x), "data"), {"data": 2}, [torch.ones(3)] * 2, engine=engine)
    assert out[0][0].shape == (0,) and torch.equal(out[1][1], torch.ones(3) * 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ["lockstep", "vmap"])
def test_dtypes_stay(engine: Any, dtype: torch.dtype) -> None:
    xs = _inputs(3, (4,), dtype)
    for op in ("psum", "pmax", "all_gather", "psum_scatter"):
        shape = (3, 2) if op == "psum_scatter" else (4,)
        given = _inputs(3, shape, dtype)
        out = tx.simulate(lambda x: OPS[op][0](x, 3), {"data": 3}, given, engine=engine)  # noqa: B023
        assert out[0].dtype == dtype and torch.equal(out[2], OPS[op][2](given, 2))
    flags = tx.simulate(lambda x: tx.psum(x > 3, "data"), {"data": 3}, xs, engine=engine)
    assert flags[0].dtype == torch.int64 and torch.equal(flags[0], sum((x > 3).long() for x in xs))


def test_errors_say_where() -> None:
    def run(fn: Any) -> Any:
        return lambda: tx.simulate(fn, {"data": 3}, [torch.ones(4, 3)] * 3)

    raises_text(ValueError, run(lambda x: tx.psum_scatter({"k": x}, "data")), "'k'", "(4, 3)", "dimension 0", "size 3")
    raises_text(ValueError, run(lambda x: tx.psum_scatter(x, "data", tiled=True)), "a multiple of 3")
    raises_text(ValueError, run(lambda x: tx.all_to_all(x, "data", 5)), "dimension 5")
    raises_text(ValueError, run(lambda x: tx.pbroadcast(x, "data", 3)), "0 to 2", "3")
    raises_text(ValueError, run(lambda x: tx.ppermute(x, "data", [(0, 1), (0, 2)])), "source twice")
    raises_text(ValueError, run(lambda x: tx.ppermute(x, "data", [(0, 3)])), "target outside axis 'data'")
    raises_text(tx.UnboundAxis, run(lambda x: tx.psum(x, "node")), "'node'", "['data']", "fjoin.mesh")
    raises_text(TypeError, run(lambda x: tx.psum(x, 3)), "named by a string", "3")


# -- on gloo -----------------------------------------------------------------------------------------


def on_gloo(ops: list[str]) -> list[Any]:
    import torch.distributed as dist

    n, rank, out = dist.get_world_size(), dist.get_rank(), []
    with fjoin.bind(fjoin.mesh({"data": -1})):
        for op in ops:
            call, shape, _ = OPS[op]
            x = _inputs(n, shape(n))[rank]
            before = x.clone()
            got = call(x, n)
            assert torch.equal(x, before) and type(got) is Tensor
            y = _inputs(n, shape(n), seed=1)[rank]

            def loss(y: Tensor, call: Any = call) -> Tensor:
                out = call(y, n)
                return (out**2 * torch.arange(1.0, out.numel() + 1, dtype=out.dtype).view(out.shape)).sum() * (1 + rank)

            out.append((got, torch.func.grad(loss)(y) if op in DIFFERENTIABLE else None))
        half = tx.psum(torch.full((3,), 1.5, dtype=torch.bfloat16), "data")
        assert half.dtype == torch.bfloat16 and half[0] == 1.5 * n
    return out


@pytest.mark.parametrize("n", [2, 3, 4])
def test_real_ranks_equal_simulated_ones(pool: Any, n: int) -> None:
    real = pool.run(n, on_gloo, list(OPS))
    for i, op in enumerate(OPS):
        call, shape, expected = OPS[op]
        xs, ys = _inputs(n, shape(n)), _inputs(n, shape(n), seed=1)
        leaves = [y.clone().requires_grad_() for y in ys]
        outs = [expected(leaves, r) for r in range(n)]
        if op in DIFFERENTIABLE:
            sum(
                (o**2 * torch.arange(1.0, o.numel() + 1, dtype=o.dtype).view(o.shape)).sum() * (1 + r)
                for r, o in enumerate(outs)
            ).backward()
        for r in range(n):
            got, grad = real[r][i]
            assert torch.equal(got, expected(xs, r)), (op, r)
            if grad is not None:
                want = torch.zeros_like(ys[r]) if leaves[r].grad is None else leaves[r].grad
                assert max_diff(grad, want) < 1e-9, (op, r)


def on_a_grid() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

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
            xs = _inputs(n, shape(n), torch.float32)
            torch._dynamo.reset()
            got = torch.compile(lambda v, call=call: call(v * 2, n), backend="aot_eager", fullgraph=True)(xs[rank])
            out[name] = torch.equal(got, expected([v * 2 for v in xs], rank))
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


def test_compiled_collectives_are_right_or_refuse(pool: Any) -> None:
    for result in pool.run(2, compiled):
        for name in [*OPS, "grad"]:
            assert result[name] is True, name
        assert result["vmap"][0] == "raised" and "drop the batching rule" in result["vmap"][1], result["vmap"]
        assert result["vmap of grad"][0] == "raised" and "drop the batching rule" in result["vmap of grad"][1]


def raw_trap() -> float:
    """What torch itself does with its functional collective under vmap under compile."""
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    def f(x: Tensor) -> Tensor:
        return torch.func.vmap(lambda e: funcol.wait_tensor(funcol.all_reduce(e, "sum", dist.group.WORLD)))(x)

    x = torch.arange(1.0, 4.0) * 1e6
    try:
        return float((torch.compile(f, backend="aot_eager")(x) - 2 * x).abs().max())
    except Exception:
        return -1.0


def test_the_trap_is_still_there_in_torch(pool: Any) -> None:
    """If torch mends its vmap over functional collectives under compile, our refusal can go."""
    assert any(wrong != 0 for wrong in pool.run(2, raw_trap))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiling_a_vmapped_simulation_is_right_or_refused() -> None:
    f = torch.compile(
        lambda: tx.simulate(lambda x: tx.psum(x, "data"), {"data": 2}, [torch.tensor(1.0)] * 2, engine="vmap"),
        backend="aot_eager",
    )
    try:  # Dynamo may leave it to eager execution, which is right, or trace into it, which must be refused
        out = f()
    except Exception as error:
        assert "vmapped axis" in str(error)
    else:
        assert [v.item() for v in out] == [2.0, 2.0]
