"""optax's transformations as stages, and stages in optax."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from torch import Tensor

import fjoin.jax
from fjoin import transforms as tx
from fjoin.jax import _optax, _trees as _jax_arrays
from tests.helpers import max_diff, params_like
from tests.oracle import optim

ADD = tx.sgd(1.0, maximize=True)  # the result of an optax optimizer is to be added
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw, a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 10), weight_decay=0.1),
    "lamb, per leaf": lambda: optax.lamb(0.1, weight_decay=0.1),
    "clipped, by path": lambda: optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.partition(
            {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"layer.weight": "a", "layer.bias": "b", "scale": "b"}
        ),
    ),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=1),
}


def _trees(dtype: torch.dtype, n: int = 6) -> list[dict[str, Tensor]]:
    return [{k: v for k, v in params_like(i, dtype).items() if v.numel()} for i in range(n)]


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "room"), [(torch.float64, 1e-14), (torch.float32, 1e-5)])
@pytest.mark.parametrize("alone", [4, 2**16])  # the least size of leaves that cross alone
def test_it_is_optax(name: str, dtype: torch.dtype, room: float, alone: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(_jax_arrays, "_ALONE", alone)
    start, *grads = _trees(dtype)
    pipeline = tx.fuse(fjoin.jax.from_optax(OPTIMIZERS[name]()), ADD)
    params, state = start, pipeline.init(start)
    for g in grads:
        params, state = pipeline.step(params, g, state)
    for path, want in optim.run_optax(OPTIMIZERS[name](), start, grads).items():
        assert (params[path] - start[path] - want).abs().max() < room, path


def test_several_dtypes_and_empty_trees() -> None:
    """Tensors of each dtype cross together; optax's own state, counters included, comes back as tensors."""
    grads = {
        "a": torch.tensor([3.0, -0.5]),
        "b": [torch.tensor(2.0).bfloat16(), torch.zeros(0, 2)],
        "c": torch.tensor(4.0).double(),
    }
    clip = fjoin.jax.from_optax(optax.clip(1.0))
    out, _ = clip.update(grads, clip.init(grads))
    assert out["a"].tolist() == [1.0, -0.5] and out["b"][0].dtype is torch.bfloat16 and out["b"][0] == 1
    assert out["b"][1].shape == (0, 2) and out["c"].dtype is torch.float64
    assert clip.update({}, clip.init({})) == ({}, _optax.OptaxState(()))
    adam = fjoin.jax.from_optax(optax.scale_by_adam())
    state = adam.init({"w": torch.ones(3)})
    _, state = adam.update({"w": torch.ones(3)}, state)
    assert sorted(str(flat.dtype) for flat in state.flats) == ["torch.float32", "torch.int32"]
    assert {flat.numel() for flat in state.flats} == {6, 1}


def test_explain_runs_no_jax_on_tensors_without_data() -> None:
    hook = tx.chain(tx.mean("data"), fjoin.jax.from_optax(optax.adam(0.5)))
    what = tx.explain(tx.fuse(hook, tx.sgd(1.0)), {"w": torch.zeros(3)}, {"data": 2})
    assert what.messages == 1 and what.rows[1].state_bytes == 4 * (3 + 3 + 1)


@pytest.mark.parametrize("jit", [False, True])
def test_a_stage_in_optax(jit: bool) -> None:
    """Our clipping runs inside an optax chain, and its host counter counts."""
    every = fjoin.jax.to_optax(tx.every(2, tx.clip_by_value(0.5)))
    chain = optax.chain(every, optax.sgd(0.1))
    params = {"w": jnp.array([1.0, 2.0])}
    state = chain.init(params)
    update = jax.jit(chain.update) if jit else chain.update
    seen = []
    for _ in range(4):
        updates, state = update({"w": jnp.array([3.0, 0.25])}, state, params)
        seen.append([round(x, 4) for x in (-10 * updates["w"]).tolist()])
    plain, kept = tx.every(2, tx.clip_by_value(0.5)), tx.every(2, tx.clip_by_value(0.5)).init({"w": torch.zeros(2)})
    for got in seen:
        want, kept = plain.update({"w": torch.tensor([3.0, 0.25])}, kept)
        assert got == want["w"].tolist()
    assert [3.0, 0.25] in seen and [0.5, 0.25] in seen


def test_without_jax_the_import_says_what_to_install() -> None:
    program = "import sys; sys.modules['jax'] = None; import fjoin.jax"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ImportError: fjoin.jax needs jax: pip install 'fjoin[jax]'" in done.stderr


def test_noise_with_random_keys(impl: str = "rbg") -> None:
    """jax's typed keys cross as their bits, so that saved and loaded the same noise follows."""
    grads = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    theirs = {path: jax.numpy.asarray(g.numpy()) for path, g in grads.items()}
    noise = optax.add_noise(0.1, 0.55, jax.random.key(3, impl=impl))
    hook, state, held = fjoin.jax.from_optax(noise), fjoin.jax.from_optax(noise).init(grads), noise.init(theirs)
    for _ in range(3):
        state = tx.from_state_dict(hook.init(grads), tx.to_state_dict(state))
        out, state = hook.update(grads, state, grads)
        want, held = noise.update(theirs, held)
        assert max_diff(out, {path: torch.tensor(w.tolist()) for path, w in want.items()}) < 1e-6
