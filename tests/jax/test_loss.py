"""A loss that jax computes: its value and gradient, its memory, dtypes, keys and buffers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fjoin
import fjoin.jax
from fjoin import transforms as tx
from fjoin.jax import _loss
from fjoin.jax._trees import to_tensor
from tests.helpers import raises_text


def net(params: Any, batch: Any) -> Any:
    x, y = batch
    hidden = jnp.tanh(x @ params["a"] + params["b"])
    return ((hidden @ params["c"]) ** 2).mean() - (hidden.sum(1) * y).mean()


def arrays(dtype: Any = np.float32, wide: int = 4) -> dict[str, np.ndarray]:
    of = np.random.default_rng(0)
    return {
        "a": of.normal(size=(3, wide)).astype(dtype),
        "b": np.zeros(wide, dtype),
        "c": of.normal(size=(wide, 2)).astype(dtype),
    }


def batch_of(n: int, seed: int, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    of = np.random.default_rng(seed)
    return of.normal(size=(n, 3)).astype(dtype), of.normal(size=n).astype(dtype)


def tensors(tree: Any) -> Any:
    return jax.tree.map(lambda x: torch.from_numpy(np.array(x)), tree)


@pytest.mark.parametrize(("dtype", "wide"), [(np.float32, 40_000), (np.float64, 4)])
def test_the_value_and_the_gradient_are_jaxs(dtype: Any, wide: int) -> None:
    params, batch = arrays(dtype, wide), batch_of(5, 1, dtype)
    with jax.enable_x64(dtype is np.float64):
        want, grads = jax.jit(jax.value_and_grad(net))(params, batch)
        want, grads = np.array(want), jax.tree.map(np.array, grads)
    got, ours = fjoin.value_and_grad(fjoin.jax.loss(net))(tensors(params), tensors(batch))
    room = 1e-6 if dtype is np.float32 else 1e-14
    assert got.dtype == torch.from_numpy(want).dtype and abs(got.item() - want) <= room * abs(want)
    for path, grad in grads.items():
        assert ours[path].numpy().dtype == dtype and np.abs(ours[path].numpy() - grad).max() <= 10 * room, path


def test_a_factor_and_other_users_of_the_parameters() -> None:
    """The gradient adds to that of other operations, times the gradient of the loss."""
    params = {path: p.requires_grad_() for path, p in tensors(arrays()).items()}
    loss = fjoin.jax.loss(net)(params, tensors(batch_of(5, 1)))
    (3.0 * loss + params["b"].sum()).backward()
    plain = fjoin.value_and_grad(fjoin.jax.loss(net))(params, tensors(batch_of(5, 1)))[1]
    assert torch.allclose(params["a"].grad, 3 * plain["a"]) and torch.allclose(params["b"].grad, 3 * plain["b"] + 1)  # type: ignore[arg-type]
    p = torch.ones(4, requires_grad=True)
    loss = fjoin.jax.loss(lambda p, x: (p * x).sum())(p, 2.0)
    loss.backward(retain_graph=True)
    loss.backward()
    assert p.grad is not None and p.grad.tolist() == [4.0] * 4


def test_a_second_derivative_is_an_error_and_not_zero() -> None:
    loss_fn = fjoin.jax.loss(lambda p, x: (p["w"] ** 2 * x).sum())
    w = torch.ones(3, requires_grad=True)
    (g,) = torch.autograd.grad(loss_fn({"w": w}, 1.0), w, create_graph=True)
    raises_text(RuntimeError, lambda: (g.sum() + w.sum()).backward(), "differentiable once")
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.func.grad(lambda w: torch.func.grad(loss_fn)({"w": w}, 1.0)["w"].sum())(torch.ones(3))


NUMPY: dict[str, Any] = {
    "0-d": np.array(2.0, np.float32), "a scalar": np.float32(2.0), "an index": np.int64(2),
    "read-only": np.asarray(jnp.arange(3.0)), "backwards": np.arange(3.0, dtype=np.float32)[::-1],
    "big-endian": np.arange(3, dtype=">f4"),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMPY)
def test_arrays_of_numpy(name: str) -> None:
    x = NUMPY[name]
    run = fjoin.value_and_grad(fjoin.jax.loss(lambda p, x: (p["w"] * x.sum(), x)), has_aux=True)
    (value, seen), grads = run({"w": torch.tensor(3.0)}, x)
    assert seen.shape == x.shape and np.array_equal(seen.numpy(), x)
    assert value == 3 * x.sum() and grads["w"] == x.sum()


def test_lazy_signs_go_to_jax() -> None:
    """Tensors whose memory holds other values than they have."""
    z = torch.tensor([1 + 2j]).conj()
    assert fjoin.jax.to_jax(z)[0] == 1 - 2j and fjoin.jax.to_jax(z.imag)[0] == -2.0


def test_large_parameters_go_in_without_a_copy(monkeypatch: Any) -> None:
    """Also those that a step keeps in its flat buffers; the addresses are those of the tensors."""
    seen: list[int] = []
    from_dlpack = jax.dlpack.from_dlpack

    def watched(x: Any, *args: Any) -> Any:
        out = from_dlpack(x, *args)
        seen.append(out.unsafe_buffer_pointer())
        return out

    monkeypatch.setattr(jax.dlpack, "from_dlpack", watched)
    step = fjoin.train_step(fjoin.jax.loss(net), tx.fuse(tx.mean("data"), tx.sgd(0.0)))
    state = step.init(tensors(arrays(wide=40_000)))
    state, _ = step(state, tensors(batch_of(5, 1)))
    assert {state.params["a"].data_ptr(), state.params["c"].data_ptr()} <= set(seen)


def test_the_call_has_ended_before_torch_writes(monkeypatch: Any) -> None:
    """All of its results are there before any is handed to torch, which may then write into the parameters."""
    ready: list[bool] = []

    def watched(array: Any) -> torch.Tensor:
        ready.append(array.is_ready())
        return to_tensor(array)

    def slow(p: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 40, lambda i, y: jnp.tanh(y @ p["w"]), x).sum()

    params, x = {"w": torch.randn(500, 500) / 25}, torch.randn(500, 500)
    loss = fjoin.jax.loss(slow)
    want, _ = fjoin.value_and_grad(loss)(params, x)
    monkeypatch.setattr(_loss, "to_tensor", watched)
    for _ in range(3):
        own = {path: p.clone() for path, p in params.items()}
        got, grads = fjoin.value_and_grad(loss)(own, x)
        own["w"].fill_(torch.nan)
        assert got == want and torch.isfinite(grads["w"]).all()
    assert len(ready) == 6 and all(ready)


def test_gradients_do_not_share_memory() -> None:
    """Equal gradients, one that is an argument, and one of a parameter that is not used."""
    n = 2**16

    def f(p: Any, x: Any) -> Any:
        return p["a"].sum() + p["b"].sum() + (p["c"] * x).sum()

    p = {name: torch.ones(n) for name in "abcd"}
    x = torch.full((n,), 2.0)
    _, grads = fjoin.value_and_grad(fjoin.jax.loss(f))(p, x)
    assert len({g.data_ptr() for g in [*grads.values(), x]}) == 5
    for g, want in zip(grads.values(), (1.0, 1.0, 2.0, 0.0), strict=True):
        assert torch.equal(g, torch.full((n,), want))


def test_16_bits(dtype: torch.dtype = torch.bfloat16) -> None:
    value, grads = fjoin.value_and_grad(fjoin.jax.loss(lambda p, x: (p["w"] * x).sum()))(
        {"w": torch.ones(3, dtype=dtype)}, torch.ones(3, dtype=dtype)
    )
    assert value.dtype is grads["w"].dtype is dtype and value == 3


def labels(p: Any, batch: Any) -> Any:
    return (p["w"][batch["i"]]).sum(), {"i": batch["i"], "n": len(batch["i"])}


def test_whole_numbers_of_64_bits_are_served_or_refused() -> None:
    run = fjoin.value_and_grad(fjoin.jax.loss(labels), has_aux=True)
    params = {"w": torch.arange(3.0)}
    (value, aux), grads = run(params, {"i": torch.tensor([2, 2, 0])})
    assert value == 4 and aux["i"].dtype is torch.int32 and aux["n"] == 3 and grads["w"].tolist() == [1, 0, 2]
    with pytest.raises(
        ValueError, match=r"the argument '0.i' has whole numbers of torch.int64 that do not fit torch.int32"
    ):
        run(params, {"i": torch.tensor([2**40 + 1])})
    (value, aux), _ = run({"w": torch.arange(3.0, dtype=torch.float64)}, {"i": torch.tensor([2, 2**40])})
    assert aux["i"].dtype is torch.int64 and aux["i"][1] == 2**40, "with a parameter of float64 jax has 64 bits"


def with_norm(p: Any, stats: Any, batch: Any) -> Any:
    x = batch @ p["w"]
    mean = 0.5 * stats["bn"]["mean"] + 0.5 * x.mean(0)
    return (
        ((x - mean) ** 2).mean(), {"x": x}, {"bn": {"mean": jax.lax.stop_gradient(mean)}, "count": stats["count"] + 1},
    )  # fmt: skip


def test_buffers_in_a_step_beside_plain_jax() -> None:
    p, stats = {"w": jnp.ones((3, 2))}, {"bn": {"mean": jnp.zeros(2)}, "count": jnp.zeros((), jnp.int32)}
    step = fjoin.train_step(
        fjoin.jax.loss(with_norm, buffers=True),
        tx.fuse(tx.mean("data"), tx.sgd(0.5)),
        on_buffers=tx.average_buffers("data"),
    )
    state = step.init(p, fjoin.jax.flat(stats))
    for i in range(3):
        x = jnp.asarray(batch_of(4, i)[0])
        state, metrics = step(state, torch.from_numpy(np.array(x)))
        (loss, (_, stats)), grads = jax.value_and_grad(
            lambda p, s, x: (lambda out: (out[0], out[1:]))(with_norm(p, s, x)), has_aux=True
        )(p, stats, x)
        p = jax.tree.map(lambda a, g: a - 0.5 * g, p, grads)
        assert abs(metrics.loss - float(loss)) < 1e-6 and metrics.aux["x"].shape == (4, 2)
    got = fjoin.jax.nested(state.buffers)  # type: ignore[arg-type]
    assert np.allclose(got["bn"]["mean"], stats["bn"]["mean"]) and int(got["count"]) == int(stats["count"]) == 3
    assert np.allclose(fjoin.jax.to_jax(state.params)["w"], p["w"], atol=1e-6)


def noisy(p: Any, batch: Any, key: Any) -> Any:
    noise = jax.random.normal(key, batch.shape)
    return (p["w"] * (batch + noise)).sum(), noise


def test_keys_differ_by_call_and_rank_and_are_those_of_seed_call_and_rank() -> None:
    def noises(n: int, first: int = 0) -> list[torch.Tensor]:
        step = fjoin.train_step(fjoin.jax.loss(noisy, seed=7), tx.fuse(tx.mean("data"), tx.sgd(0.1)), accumulate=2)
        state, out = step.init({"w": torch.ones(3)}), []
        for _ in range(n):
            state, metrics = step(state, torch.zeros(3))
            out.append(metrics.aux)
        return out

    both = tx.simulate(lambda: noises(4), {"data": 2})
    for rank, seen in enumerate(both):
        for call, noise in enumerate(seen):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), call), rank)
            assert np.array_equal(noise.numpy(), jax.random.normal(key, (3,)))


def test_in_a_loop_of_ones_own_the_key_is_given() -> None:
    run = fjoin.value_and_grad(fjoin.jax.loss(noisy, seed=0), has_aux=True)
    key = jax.random.key(3)
    (_, noise), _ = run({"w": torch.ones(3)}, torch.zeros(3), key=key)
    assert np.array_equal(noise.numpy(), jax.random.normal(key, (3,)))
    with pytest.raises(RuntimeError, match=r"in a loop of your own pass it: loss_fn\(params, batch, key=...\)"):
        run({"w": torch.ones(3)}, torch.zeros(3))


class Pair(NamedTuple):
    left: Any
    right: Any


class Module:
    """A class that jax knows as a node, and optree does not."""

    def __init__(self, w: Any, inner: Any, name: str) -> None:
        self.w, self.inner, self.name = w, inner, name


jax.tree_util.register_pytree_with_keys(
    Module,
    lambda m: (((jax.tree_util.GetAttrKey("w"), m.w), (jax.tree_util.GetAttrKey("inner"), m.inner)), m.name),
    lambda name, children: Module(*children, name),
)


def test_classes_of_jax_are_parameters() -> None:
    """Arrays of jax are copied at `init`; paths have the names of attributes; the loss gets the class."""

    def f(m: Any, x: Any) -> Any:
        assert isinstance(m, Module) and m.name == "outer" and isinstance(m.inner[0], Module)
        return (m.w * m.inner[0].w * m.inner[1].left * x).sum()

    m = Module(jnp.ones(2), [Module(jnp.full(2, 2.0), None, "inner"), Pair(jnp.ones(()), None)], "outer")
    step = fjoin.train_step(fjoin.jax.loss(f), tx.fuse(tx.mean("data"), tx.sgd(0.5)))
    state = step.init(m)
    state, _ = step(state, torch.ones(2))
    assert isinstance(state.params, Module) and state.params.w.tolist() == [0.0, 0.0]
    assert state.params.inner[1].left == -1.0 and state.params.inner[0].w.tolist() == [1.5, 1.5]
    assert m.w.tolist() == [1.0, 1.0], "the arrays are as before"
    back = fjoin.jax.to_jax(state.params)
    assert isinstance(back, Module) and isinstance(back.inner[0].w, jax.Array)


ERRORS: dict[str, tuple[Any, Any, str]] = {
    "no function": (lambda: fjoin.jax.loss(3), TypeError, "takes a function, got 3"),  # type: ignore[arg-type]
    "a large seed": (lambda: fjoin.jax.loss(noisy, seed=2**32), ValueError, "seed must be a whole number from 0 to 4294967295"),
    "no key": (lambda: fjoin.jax.loss(net, seed=0), TypeError, "called with key="),
    "a key without a seed": (lambda: fjoin.jax.loss(net)({}, 1, key=2), TypeError, "made without a seed"),
    "text": (lambda: fjoin.jax.loss(net)({"w": torch.ones(1)}, "x"), TypeError, "the argument '0' is a str"),
    "a gradient": (
        lambda: fjoin.jax.loss(net)({"w": torch.ones(1)}, torch.ones(1, requires_grad=True)), TypeError, "by params only; detach it"
    ),
    "whole parameters": (lambda: fjoin.jax.loss(net)({"w": torch.ones(1).int()}, 1), TypeError, r"params\['w'\] must be.*torch.int32"),
    "arrays": (lambda: fjoin.jax.loss(net)({"w": jnp.ones(1)}, 1), TypeError, r"fjoin.jax.to_torch\(params\)"),
    "a vector": (lambda: fjoin.jax.loss(lambda p, x: p["w"])({"w": torch.ones(2)}, 1), TypeError, "scalar"),
    "64 bits": (lambda: fjoin.jax.to_jax(torch.ones(1).double()), ValueError, "jax would narrow a tensor of torch.float64"),
    "a key in aux": (
        lambda: fjoin.jax.loss(lambda p, x: (p["w"].sum(), jax.random.key(0)))({"w": torch.ones(1)}, 1), TypeError, "a random key is no"
    ),
    "a key as a parameter": (lambda: fjoin.jax.to_torch(jax.random.key(0)), TypeError, "a random key is no tensor"),
    "a dot": (lambda: fjoin.jax.flat({"a.b": jnp.ones(1)}), ValueError, "must have no dots"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_to_do(case: str) -> None:
    run, kind, words = ERRORS[case]
    with pytest.raises(kind, match=words):
        run()


def test_other_buffers_are_refused() -> None:
    def f(p: Any, stats: Any, x: Any) -> Any:
        return p["w"].sum(), None, {"other": stats["mean"]}

    with pytest.raises(ValueError, match="the loss returned buffers"):
        fjoin.jax.loss(f, buffers=True)({"w": torch.ones(1)}, {"mean": torch.ones(1)}, torch.ones(1))


def test_without_gradients_only_the_value_is_computed() -> None:
    def f(p: Any, x: Any) -> Any:  # jax has no gradient of this loop
        return jax.lax.while_loop(lambda y: y < 10, lambda y: 2 * y, p["w"] * x), {"x": x}

    loss, p = fjoin.jax.loss(f), {"w": torch.ones((), requires_grad=True)}
    with torch.no_grad():
        value, aux = loss(p, torch.tensor(3.0))
    assert value == 12 and not value.requires_grad and aux["x"] == 3
    raises_text(ValueError, lambda: loss(p, torch.tensor(3.0)), "while_loop")
