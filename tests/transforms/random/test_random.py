"""Random numbers from keys are jax's, on the CPU, under vmap, in remat and in the simulator, and streams do not overlap."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fjoin import transforms as tx

SHAPES = [(), (0, 4), (2, 3, 4)]


def words(key: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(key)).view(np.int32)


def same(ours: torch.Tensor, theirs: Any) -> bool:
    theirs = np.asarray(theirs)
    return ours.shape == theirs.shape and ours.numpy().tobytes() == theirs.tobytes()


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31, 2**32 - 1])
def test_keys(seed: int) -> None:
    key, theirs = tx.random.key(seed), jax.random.key(np.uint32(seed))
    assert same(key, words(theirs))
    for data in (0, 1, 12345, 2**32 - 1):
        assert same(tx.random.fold_in(key, data), words(jax.random.fold_in(theirs, np.uint32(data))))
    assert same(
        tx.random.fold_in(key, torch.tensor(-1, dtype=torch.int32)),
        words(jax.random.fold_in(theirs, np.uint32(2**32 - 1))),
    )
    for num in (1, 2, 5, (2, 3)):
        assert same(tx.random.split(key, num), words(jax.random.split(theirs, num)))


def test_seeds_of_64_bits() -> None:
    with jax.enable_x64(True):
        for seed in (2**32, 2**40 + 3, 2**63 + 5):
            assert same(tx.random.key(seed), words(jax.random.key(np.uint64(seed))))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [8, 16, 32])
def test_bits(width: int, shape: Any) -> None:
    theirs = jax.random.bits(jax.random.key(3), shape, f"uint{width}")
    assert same(tx.random.bits(tx.random.key(3), shape, width), theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_64_bits(shape: Any) -> None:
    with jax.enable_x64(True):
        assert same(tx.random.bits(tx.random.key(3), shape, 64), jax.random.bits(jax.random.key(3), shape, "uint64"))
        theirs = jax.random.uniform(jax.random.key(3), shape, "float64")
        assert same(tx.random.uniform(tx.random.key(3), shape, torch.float64), theirs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_uniform_and_normal(dtype: str, shape: Any) -> None:
    kind, key, theirs = getattr(torch, dtype), tx.random.key(5), jax.random.key(5)
    got, want = tx.random.uniform(key, shape, kind), jax.random.uniform(theirs, shape, dtype)
    assert got.dtype is kind and same(got.float(), np.asarray(want).astype(np.float32))
    got = tx.random.uniform(key, shape, kind, -2.0, 3.0)
    room = 5 * torch.finfo(kind).eps
    np.testing.assert_allclose(
        got.float(), np.asarray(jax.random.uniform(theirs, shape, dtype, -2.0, 3.0), np.float32), atol=room
    )
    got, want = tx.random.normal(key, shape, kind), jax.random.normal(theirs, shape, dtype)
    assert got.dtype is kind
    np.testing.assert_allclose(got.float(), np.asarray(want, np.float32), rtol=2 * room, atol=room)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_bernoulli(p: float) -> None:
    assert same(tx.random.bernoulli(tx.random.key(1), p, (99,)), jax.random.bernoulli(jax.random.key(1), p, (99,)))
    each = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    assert same(
        tx.random.bernoulli(tx.random.key(1), torch.from_numpy(each)), jax.random.bernoulli(jax.random.key(1), each)
    )


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 10), (-7, 1000), (-(2**31), 2**31 - 1), (5, 2**30)])
def test_randint(low: int, high: int) -> None:
    got, want = (r.randint(r.key(2), (50,), low, high) for r in (tx.random, jax.random))
    assert same(got, want)


def test_permutation() -> None:
    key, theirs = tx.random.key(4), jax.random.key(4)
    for n in (0, 1, 2, 50, 3000):
        assert same(tx.random.permutation(key, n), jax.random.permutation(theirs, n))
    x = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    for axis in (0, 1, 2, -1):
        got = tx.random.permutation(key, torch.from_numpy(x), axis)
        assert same(got.contiguous(), jax.random.permutation(theirs, x, axis))


def test_the_same_under_vmap_and_compile() -> None:
    keys = tx.random.split(tx.random.key(0), 4)

    def draw(key: torch.Tensor) -> torch.Tensor:
        step = tx.random.fold_in(key, torch.tensor(3))
        return tx.random.normal(step, (2,)) + tx.random.permutation(key, 2) + tx.random.randint(key, (2,), 0, 9)

    alone = torch.stack([draw(key) for key in keys])
    assert torch.equal(torch.vmap(draw)(keys), alone)
    assert torch.equal(torch.compile(draw, backend="aot_eager")(keys[1]), alone[1])


def test_a_device_gets_numbers_of_the_host_without_a_copy() -> None:
    """A copy waits for the device, and cannot be captured in a graph."""
    with torch.device("cpu"), NoCopies():
        key = tx.random.fold_in(tx.random.key(3, "meta"), 2**32 - 1)
        tx.random.uniform(key, (3,), minval=-1.0, maxval=2)
        tx.random.normal(key, (3,), torch.bfloat16)
        tx.random.bernoulli(key, 0.3, (3,))
        tx.random.randint(key, (3,), -5, 7)
        tx.random.permutation(key, 5)
    with torch.device("meta"):
        assert tx.random.fold_in(tx.random.key(0), 2).tolist() == tx.random.fold_in(KEY, 2).tolist()


class NoCopies(TorchDispatchMode):
    """Refuses tensors of the host beside those of a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        assert not isinstance(out, torch.Tensor) or out.is_meta, func
        return out


KEY = tx.random.key(0)
ERRORS: dict[str, tuple[Any, Any, str]] = {
    "a seed": (lambda: tx.random.key(-1), ValueError, "seed"),
    "a large seed": (lambda: tx.random.key(2**64), ValueError, "below 2\\^64"),
    "no key": (lambda: tx.random.bits(3), TypeError, "a key, .*got 3"),
    "several keys": (lambda: tx.random.normal(tx.random.split(tx.random.key(0), 3)), TypeError, "torch.vmap over them"),
    "data": (lambda: tx.random.fold_in(tx.random.key(0), 2**32), ValueError, "below 2\\^32"),
    "a float": (lambda: tx.random.fold_in(KEY, torch.tensor(3.7)), TypeError, "whole numbers.*float32"),
    "a width": (lambda: tx.random.bits(tx.random.key(0), (), 4), ValueError, "8, 16, 32 or 64"),
    "a dtype": (lambda: tx.random.uniform(tx.random.key(0), (), torch.int32), TypeError, "floating point"),
    "no numbers": (lambda: tx.random.randint(tx.random.key(0), (), 3, 3), ValueError, "from 3 to below 3"),
    "fewer draws than chances": (lambda: tx.random.bernoulli(KEY, torch.full((3, 4), 0.5), (4,)), RuntimeError, "expand"),
    "fewer draws than bounds": (lambda: tx.random.uniform(KEY, (), minval=torch.zeros(2)), RuntimeError, "expand"),
    "a fraction": (lambda: tx.random.randint(KEY, (3,), 0, 5.5), TypeError, "integer"),
    "a negative number": (lambda: tx.random.permutation(KEY, -2), ValueError, "permutation: x"),
    "a number of items": (lambda: tx.random.permutation(KEY, 3.0), ValueError, "permutation: x"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    run, kind, text = ERRORS[case]
    with pytest.raises(kind, match=text):
        run()
