"""Steps whose loss jax computes, beside jax and optax alone: uneven inputs, ZeRO, DiLoCo, checkpoints, loaders."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import fjoin
import fjoin.jax
from fjoin import transforms as tx
from tests.helpers import stepped

SIZES = [[4, 3, 2, 6], [5, 1], []]  # of the batches of three ranks


def loss(p: Any, batch: Any) -> Any:
    x, y = batch
    return ((jnp.tanh(x @ p["a"]) @ p["b"] - y) ** 2).mean()


def in_torch(p: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    return ((torch.tanh(x @ p["a"]) @ p["b"] - y) ** 2).mean()


def start() -> dict[str, np.ndarray]:
    of = np.random.default_rng(0)
    return {"a": of.normal(size=(3, 5)).astype(np.float32), "b": of.normal(size=5).astype(np.float32)}


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    of = torch.Generator().manual_seed(rank)
    return [(torch.randn(n, 3, generator=of), torch.randn(n, generator=of)) for n in SIZES[rank]]


def trained(loss_fn: Any, pipeline: tx.Pipeline) -> dict[str, np.ndarray]:
    """The parameters after two epochs on three ranks, of which one has no batch."""

    def run(rank: int) -> Any:
        step = fjoin.train_step(loss_fn, pipeline, weight=lambda batch: len(batch[0]))
        state = step.init({path: jnp.asarray(p) for path, p in start().items()})
        for _ in range(2):
            state = stepped(step, state, step.join(batches(rank), empty=None))
        state = step.flush(state)
        return {path: p.numpy().copy() for path, p in state.params.items()}

    first, *others = tx.simulate(run, {"data": 3}, [0, 1, 2])
    for other in others:
        assert all(np.array_equal(first[path], other[path]) for path in first)
    return first  # type: ignore[no-any-return]


def by_optax(optimizer: Any) -> dict[str, np.ndarray]:
    """One process on the batches of all ranks together."""
    own: Any = {path: jnp.asarray(p) for path, p in start().items()}
    state = optimizer.init(own)
    for _ in range(2):
        for i in range(4):
            live = [batches(rank)[i] for rank in range(3) if i < len(SIZES[rank])]
            x, y = (jnp.concatenate([part.numpy() for part in parts]) for parts in zip(*live, strict=True))
            updates, state = optimizer.update(jax.grad(loss)(own, (x, y)), state, own)
            own = optax.apply_updates(own, updates)
    return {path: np.array(p) for path, p in own.items()}


def near(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    for path, p in start().items():
        assert np.abs(want[path] - p).max() > 0.01
        assert np.abs(got[path] - want[path]).max() < 1e-5, path


MEAN = tx.mean("data")
PIPELINES: dict[str, tuple[Any, Any]] = {
    "adam": (tx.fuse(MEAN, tx.adam(0.05)), optax.adam(0.05)),
    "momentum, clipped": (
        tx.fuse(tx.chain(MEAN, tx.clip_by_global_norm(0.5)), tx.sgd(0.1, momentum=0.9)),
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)),
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_uneven_inputs_equal_jax_and_optax_on_all_of_them(name: str) -> None:
    pipeline, optimizer = PIPELINES[name]
    near(trained(fjoin.jax.loss(loss), pipeline), by_optax(optimizer))


def test_diloco_equals_that_of_the_same_loss_in_torch() -> None:
    pipeline = tx.diloco(tx.adam(0.05), tx.mean("data"), every=2, outer=tx.sgd(0.7, momentum=0.9, nesterov=True))
    near(trained(fjoin.jax.loss(loss), pipeline), trained(in_torch, pipeline))


def noisy(p: Any, batch: Any, key: Any) -> Any:
    x, y = batch
    return loss(p, (x + 0.1 * jax.random.normal(key, x.shape), y))


def test_a_run_that_is_resumed_goes_on_with_the_same_keys(tmp_path: pathlib.Path) -> None:
    def step_of() -> Any:
        return fjoin.train_step(fjoin.jax.loss(noisy, seed=1), tx.fuse(MEAN, tx.adam(0.05)))

    step, whole = step_of(), None
    state = step.init(start_in_torch())
    with fjoin.Checkpoints(tmp_path / "run", step, every=2) as runs:
        for i, batch in enumerate(batches(0)):
            state, _ = step(state, batch)
            if i == 1:
                runs.save(state)
        whole = state
    again = step_of()
    with fjoin.Checkpoints(tmp_path / "run", again) as runs:
        state = runs.restore(start_in_torch())
    assert state.step == 2
    state = stepped(again, state, batches(0)[2:])
    assert all(torch.equal(state.params[path], whole.params[path]) for path in state.params)


def start_in_torch() -> Any:
    return {path: torch.from_numpy(p) for path, p in start().items()}
