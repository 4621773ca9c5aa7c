"""Error feedback: nothing is lost forever; ranks without input send their residual."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.base import Call, restrict
from fjoin.transforms.reductions._compress import ErrorState
from tests.helpers import max_diff, raises_text, same_bits

CODECS: dict[str, Any] = {
    "bfloat16": tx.bfloat16, "int8": lambda: tx.int8(block=4), "int4": lambda: tx.int4(block=4), "fp8": tx.fp8,
    "top_k": lambda: tx.top_k(0.2), "sign": tx.sign, "qsgd": tx.qsgd,
}  # fmt: skip
OVERS: dict[str, Any] = {
    "mean": lambda: tx.mean("data"), "live": lambda: tx.mean("data", over="live"),
    "world": lambda: tx.mean("data", over="world"), "sum": lambda: tx.sum_over("data"),
}  # fmt: skip
STEPS = 12


def _grads(rank: int, step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(100 * rank + step)
    return {"a": torch.randn(5, 3, generator=g), "b": torch.randn((), generator=g), "none": torch.zeros(0, 2)}


def _weight(rank: int, step: int, idle: bool) -> float:
    return 0.0 if idle and (rank + step) % 3 == 0 else 1.0 + rank


def _run(hook: tx.Transform, idle: bool) -> Any:
    """The sum of the results, the final residual, and the sum of the inputs divided as each sum."""
    rank, ranks = int(tx.axis_index("data")), tx.axis_size("data")
    state = hook.init(_grads(rank, 0))
    out: dict[str, Tensor] = {k: torch.zeros_like(v) for k, v in _grads(0, 0).items()}
    given = {k: torch.zeros_like(v) for k, v in out.items()}
    counted, last = "live" in repr(hook) or "world" in repr(hook), 1.0
    for step in range(STEPS):
        weight = _weight(rank, step, idle)
        grads = _grads(rank, step) if weight else {k: v * float("nan") for k, v in _grads(rank, step).items()}
        new, state = hook.update(grads, state, weight=weight)
        weights = [_weight(r, step, idle) for r in range(ranks)]
        if "sum_over" in repr(hook):
            divisor = 1.0
        elif "world" in repr(hook):
            divisor = ranks
        else:
            divisor = sum(w > 0 for w in weights) if counted else sum(weights)
        out = {k: v + new[k] for k, v in out.items()}
        factor, last = float(weight > 0) if counted else weight, divisor or last
        given = {k: v + factor * _grads(rank, step)[k] / last for k, v in given.items()}
    return out, state.error, given


@pytest.mark.sample(16)
@pytest.mark.parametrize("idle", [False, True], ids=["all live", "some idle"])
@pytest.mark.parametrize(
    ("codec", "over"),
    [(c, o) for c in CODECS for o in ("mean", "live", "world", "sum") if o == "mean" or c in ("int8", "int4")],
)
def test_sent_and_residual_add_up_to_the_input(codec: str, over: str, idle: bool) -> None:
    for ranks in (2, 3, 5):
        hook = tx.error_feedback(tx.compress(CODECS[codec](), OVERS[over]()))
        results = tx.simulate(lambda: _run(hook, idle), {"data": ranks})  # noqa: B023
        for key in ("a", "b"):
            residual = sum(error[key] for _, error, _ in results)
            given = sum(all_[key] for _, _, all_ in results)
            assert (results[0][0][key] + residual - given).abs().max() < 1e-4 * STEPS, (ranks, key)
            assert all(same_bits(out, results[0][0]) for out, _, _ in results)
        if codec == "int4":
            plain = tx.simulate(lambda: _sums(hook.spec["hook"], idle), {"data": ranks})[0]  # noqa: B023
            assert max_diff(plain, results[0][0]) > 1e-2, "without feedback something else comes out"


def _sums(hook: tx.Transform, idle: bool) -> Any:
    wrapped = tx.Transform(lambda p: ErrorState(hook.init(p), {}), lambda g, s, p=None, **e: _around(hook, g, s, **e))

    def around() -> Any:
        return _run(_Named(wrapped, hook), idle)[0]

    return around()


class _Named:
    """A transform that prints as another one."""

    def __init__(self, transform: tx.Transform, like: tx.Transform) -> None:
        self.init, self.update, self._like = transform.init, transform.update, like

    def __repr__(self) -> str:
        return repr(self._like)


def _around(hook: tx.Transform, grads: Any, state: Any, **extra: Any) -> Any:
    out, inner = hook.update(grads, state.inner, **extra)
    return out, ErrorState(inner, {})


def test_a_rank_without_input_sends_its_residual() -> None:
    """Two ranks; the second has input only in the first step. Of the mean each has left out 0.2, half of its 0.4."""
    first = torch.tensor([127.0, 0.4])

    def one_rank() -> Any:
        hook = tx.error_feedback(tx.compress(tx.int8(), tx.mean("data")))
        rank = int(tx.axis_index("data"))
        _, state = hook.update(first, hook.init(first), weight=1.0)
        residual = state.error[""].clone()
        out, state = hook.update(torch.zeros(2), state, weight=1.0 - rank)
        return residual.tolist(), out.tolist(), state.error[""].tolist()

    for residual, out, left in tx.simulate(one_rank, {"data": 2}):
        assert residual == pytest.approx([0.0, 0.2]) and out == pytest.approx([0.0, 0.4], abs=0.01)
        assert left == pytest.approx([0.0, 0.0], abs=0.01)


def test_infinite_weight_does_not_enter_the_state() -> None:
    """The weight is a tensor that Python does not read, here one that requires a gradient."""
    hook = tx.error_feedback(tx.compress(tx.int4(), tx.mean("data")))

    def one_rank(rank: int) -> Any:
        grad, state = torch.arange(8.0) + rank, hook.init(torch.zeros(8))
        for weight in (1.0, math.inf if rank else 1.0, 1.0):
            out, state = hook.update(grad, state, weight=torch.tensor(weight, requires_grad=True))
        return out.detach(), state.error[""].detach()

    for tensors in tx.simulate(one_rank, {"data": 2}, [0, 1]):
        assert all(torch.isfinite(x).all() for x in tensors)


# The weights of two ranks, step by step.
WEIGHTS: dict[str, list[tuple[float, float]]] = {
    "all shrink once": [(w, w) for w in [256.0] * 6 + [2.0] + [256.0] * 3],
    "one shrinks once": [(w, 256.0) for w in [256.0] * 6 + [2.0] + [256.0] * 3],
    "one grows once": [(w, 256.0) for w in [2.0] * 6 + [256.0] + [2.0] * 3],
    "one comes back with less": [(w, 256.0) for w in [256.0] * 6 + [0.0] + [2.0] * 4],
    "one comes back when all have less": [(256.0, 256.0)] * 6 + [(0.0, 256.0)] * 2 + [(2.0, 2.0)] * 3,
    "one is away while the other has more": [(1.0, 1.0)] * 6 + [(0.0, 256.0)] + [(1.0, 1.0)] * 3,
    "one has more now and then": [(1.0, 2.0 if step % 2 else 256.0) for step in range(20)],
    "one has input now and then": [(1.0, 4.0 * (step % 2)) for step in range(20)],
    "both at random": [(1.5 ** (7 * step % 11), 1.5 ** (5 * step % 13)) for step in range(40)],
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("how", ["error_feedback", "power_sgd"])
def test_residuals_are_bounded_when_weights_change(how: str, weights: str) -> None:
    """A result is at most as large as if each residual had been sent with its own batch."""
    encoded, matrix = tx.compress(tx.top_k(0.1), tx.mean("data")), tx.power_sgd("data", 2, min_compression_rate=1.0)
    hook: tx.Transform = {
        "error_feedback": tx.error_feedback(encoded), "power_sgd": tx.error_feedback(matrix),
    }[how]  # fmt: skip

    def one_rank(rank: int) -> Any:
        state, ratios, gap = hook.init(torch.zeros(20, 20)), [], torch.zeros(20, 20)
        for step, both in enumerate(WEIGHTS[weights]):
            grads = [torch.randn(20, 20, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
            mean = (both[0] * grads[0] + both[1] * grads[1]) / sum(both)
            out, state = hook.update(grads[rank], state, weight=both[rank])
            ratios.append(float(out.norm() / mean.norm()))
            gap += mean - out
        return ratios, gap, state.error[""]

    (ratios, gap, residual), (_, _, other) = tx.simulate(one_rank, {"data": 2}, [0, 1])
    assert max(ratios) < 2
    assert max_diff(residual + other, gap) < 1e-4


def _loss(params: Any, batch: Tensor) -> Tensor:
    return ((batch @ params["w"] - batch.sum(1, keepdim=True) * 0.5) ** 2).mean()


HOOKS: dict[str, Any] = {
    "none": lambda: tx.mean("data"),
    "coded": lambda: tx.compress(tx.int4(block=128), tx.mean("data")),
    "fed back": lambda: tx.error_feedback(tx.compress(tx.int4(block=128), tx.mean("data"))),
}


def trained(hook: str) -> Any:
    mesh = fjoin.mesh({"data": -1}, timeout_s=60)
    step = fjoin.train_step(_loss, tx.fuse(HOOKS[hook](), tx.sgd(0.02)), mesh=mesh, weight=len)
    state = step.init({"w": torch.zeros(64, 1)})
    scale = torch.logspace(0, -1.5, 64)  # coordinates of very different sizes; int4 keeps only the large ones
    g = torch.Generator().manual_seed(mesh.rank)
    batches = [torch.randn(16, 64, generator=g) * scale for _ in range(100 - 20 * mesh.rank)]
    for batch in step.join(batches):
        state, metrics = step(state, batch)
    out = state.params["w"].clone(), metrics.loss, tx.to_state_dict(state.pipeline.hook)
    step.close()
    return out


def test_train_step_matches_the_simulation_and_reduces_the_error(pool: Any) -> None:
    """Processes match the simulation bitwise; feedback reduces the error of the codec more than ten times."""
    real, simulated = pool.run(2, trained, "fed back"), tx.simulate(lambda: trained("fed back"), {"data": 2})
    for (w, loss, _), (sim_w, sim_loss, _) in zip(real, simulated, strict=True):
        assert same_bits(w, sim_w) and same_bits(w, real[0][0]) and loss == sim_loss
    (want, *_), (coded, *_) = (tx.simulate(lambda: trained(hook), {"data": 2})[0] for hook in ("none", "coded"))  # noqa: B023
    off = [(w - want).norm().item() for w in (real[0][0], coded)]
    assert off[0] < 0.1 * off[1], off
    assert real[0][2]["error.w"].shape == (64, 1) and not same_bits(real[0][2]["error.w"], real[1][2]["error.w"])


def test_raises_on_bad_input() -> None:
    raises_text(TypeError, lambda: tx.error_feedback(tx.mean("data")), "mean('data')", "compress(codec, mean(axis))")
    both = tx.error_feedback(tx.compress(tx.int8(), tx.mean(("node", "local"))))
    x = torch.ones(2)
    raises_text(
        ValueError,
        lambda: tx.simulate(lambda: both.update(x, both.init(x)), {"node": 2, "local": 2}),
        "one axis",
        "chain",
    )


def test_only_encoded_leaves_have_residuals() -> None:
    by_path = tx.partition({"*.bias": tx.mean("data"), "*": tx.chain(tx.compress(tx.int8(), tx.mean("data")))})
    params = {"a.bias": torch.zeros(3), "a.weight": torch.zeros(2, 2, dtype=torch.float64)}
    for hook in (by_path, tx.every(2, by_path), tx.switch_after(2, tx.mean("data"), by_path)):
        error = tx.error_feedback(hook).init(params).error
        assert list(error) == ["a.weight"] and error["a.weight"].dtype is torch.float64
    assert list(tx.error_feedback(tx.masked(tx.compress(tx.int8(), tx.mean("data")), "*.bias")).init(params).error) == [
        "a.bias"
    ]


def test_raises_if_one_feedback_wraps_two_means() -> None:
    """Two successive means inside one feedback would overwrite each other's errors."""
    int4 = tx.int4()
    parts = [tx.compress(int4, tx.mean(axis)) for axis in ("local", "node")]
    x = [torch.randn(40, generator=torch.Generator().manual_seed(r)) for r in range(4)]

    def run(hook: tx.Transform) -> Any:
        def one_rank(g: Tensor) -> Any:
            state, total = hook.init(g), torch.zeros(40)
            for _ in range(200):
                out, state = hook.update(g, state)
                total = total + out
            return total / 200

        return tx.simulate(one_rank, {"node": 2, "local": 2}, x)

    raises_text(
        ValueError,
        lambda: run(tx.error_feedback(tx.chain(*parts))),
        "twice",
        "chain(error_feedback(a), error_feedback(b))",
    )
    apart = tx.chain(*(tx.error_feedback(part) for part in parts))
    want = torch.stack(x).mean(0)
    assert all((out - want).abs().max() < 0.01 for out in run(apart))


@pytest.mark.sample(2)
@pytest.mark.parametrize("over", ["weight", "live", "world"])
def test_call_without_input_gives_zeros(over: Any) -> None:
    """It changes no residual; the next call gives the same result as without it."""
    hook = tx.error_feedback(tx.compress(tx.int4(), tx.mean("data", over)))
    xs = [torch.randn(40, generator=torch.Generator().manual_seed(r)) for r in range(3)]

    def one_rank(g: Tensor, pause: bool) -> Any:
        state = hook.init(g)
        _, state = hook.update(g, state, weight=1.0)
        if pause:
            out, state = hook.update(g * math.nan, state, weight=0.0)
            assert not out.any()
        return hook.update(g, state, weight=1.0)[0]

    for ranks in (2, 3):
        with_it, without = (tx.simulate(one_rank, {"data": ranks}, xs[:ranks], [p] * ranks) for p in (True, False))
        assert max_diff(with_it, without) < 1e-6


SHAPES = {"plain": (3,), "a": (5,), "b": (2, 3)}
BUCKETS = (["plain"], ["a"], ["b"])  # nothing in the first one is encoded
OF_STEPS = [2.0, 0.0, 3.0, 1.0]


def test_buckets_equal_the_whole() -> None:
    def one_rank() -> None:
        encoded = tx.compress(tx.bfloat16(), tx.mean("data"))
        hook = tx.error_feedback(tx.partition({"plain": tx.mean("data"), "*": encoded}))
        rank = int(tx.axis_index("data"))
        g = torch.Generator().manual_seed(rank)
        params = {path: torch.zeros(shape) for path, shape in SHAPES.items()}
        whole = hook.init(params)
        states = [restrict(whole, params, paths) for paths in BUCKETS]
        for step, weight in enumerate(OF_STEPS):
            weight = weight if rank else OF_STEPS[-1 - step]
            grads = {path: torch.randn(shape, generator=g) for path, shape in SHAPES.items()}
            out, whole = hook.update(grads, whole, weight=weight)
            call = Call(weight)
            for i, paths in enumerate(BUCKETS):
                some = {path: grads[path] for path in paths}
                one, states[i] = hook.run(some, states[i], None, call)
                assert same_bits(one, {path: out[path] for path in paths})
                assert same_bits(states[i], restrict(whole, params, paths))

    tx.simulate(one_rank, {"data": 2})  # where no residual depends on the buckets
