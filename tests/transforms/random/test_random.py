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


# Each with (a module, its key, its dtype of a name, its array of numpy's); the width of an unsigned dtype here.
OURS: Any = (tx.random, tx.random.key(3), lambda d: int(d[4:]) if "uint" in d else getattr(torch, d), torch.from_numpy)
JAXS: Any = (jax.random, jax.random.key(3), str, np.asarray)
CHANCES = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
SHUFFLED = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
DRAWS: dict[str, Any] = {
    **{f"{kind} {shape}": lambda r, key, dtype, of, kind=kind, shape=shape: r.bits(key, shape, dtype(kind))
       for kind in ("uint8", "uint16", "uint32", "uint64") for shape in SHAPES},
    **{f"{kind} {shape}": lambda r, key, dtype, of, kind=kind, shape=shape: r.uniform(key, shape, dtype(kind))
       for kind in ("float64", "float32", "float16", "bfloat16") for shape in SHAPES},
    **{f"bernoulli {p}": lambda r, key, dtype, of, p=p: r.bernoulli(key, p, (99,)) for p in (0.0, 0.3, 1.0)},
    "bernoulli of each": lambda r, key, dtype, of: r.bernoulli(key, of(CHANCES)),
    **{f"randint {low} {high}": lambda r, key, dtype, of, low=low, high=high: r.randint(key, (50,), low, high)
       for low, high in ((0, 1), (0, 10), (-7, 1000), (-(2**31), 2**31 - 1), (5, 2**30))},
    **{f"permutation {n}": lambda r, key, dtype, of, n=n: r.permutation(key, n) for n in (0, 1, 2, 50, 3000)},
    **{f"permutation of dim {dim}": lambda r, key, dtype, of, dim=dim: r.permutation(key, of(SHUFFLED), dim)
       for dim in (0, 1, 2, -1)},
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
def test_draws_to_the_bit(name: str) -> None:
    with jax.enable_x64(name.startswith(("uint64", "float64"))):
        got, want = (DRAWS[name](*of) for of in (OURS, JAXS))
        assert "float" not in name or str(got.dtype) == f"torch.{want.dtype}"
        assert same(*((got.float(), want.astype(np.float32)) if "float16" in name else (got.contiguous(), want)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_draws_that_are_rounded_otherwise(dtype: str, shape: Any) -> None:
    kind, room = getattr(torch, dtype), 5 * torch.finfo(getattr(torch, dtype)).eps
    got, want = (of[0].uniform(of[1], shape, of[2](dtype), -2.0, 3.0) for of in (OURS, JAXS))
    np.testing.assert_allclose(got.float(), np.asarray(want, np.float32), atol=room)
    got, want = (of[0].normal(of[1], shape, of[2](dtype)) for of in (OURS, JAXS))
    assert got.dtype is kind
    np.testing.assert_allclose(got.float(), np.asarray(want, np.float32), rtol=2 * room, atol=room)


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
