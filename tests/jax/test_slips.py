"""Objects of jax, optax and equinox in the wrong place: each is an error."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import fjoin
import fjoin.jax
from fjoin import transforms as tx

OPTAX, SCHEDULE = optax.adam(1e-2), optax.linear_schedule(0.1, 0.0, 10)
THEIRS, OURS = {"w": jnp.ones(3)}, {"w": torch.ones(3)}
PIPELINE, SGD, MEAN = tx.fuse(tx.identity(), tx.sgd(0.1)), tx.sgd(0.1), tx.mean("data")
MLP = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))


def loss_fn(params: Any, batch: Any) -> Any:
    return (params["w"] * batch).sum()


def jax_loss(params: Any, batch: Any) -> Any:
    return jnp.sum(params["w"] * batch)


def run(batch: Any, loss_fn: Any = loss_fn, pipeline: Any = PIPELINE, **options: Any) -> Any:
    step = fjoin.train_step(loss_fn, pipeline, **options)
    return step(step.init(OURS), batch)


def stepped(optimizer: Any) -> Any:
    return optimizer.step(OURS, OURS, optimizer.init(OURS))


SLIPS: dict[str, Any] = {
    "optax as hook": lambda: tx.fuse(OPTAX, SGD), "optax as optimizer": lambda: tx.fuse(MEAN, OPTAX),
    "optax after": lambda: tx.fuse(MEAN, SGD, after=OPTAX), "optax in chain": lambda: tx.chain(MEAN, OPTAX),
    "optax in masked": lambda: tx.masked(OPTAX, "*"), "optax in partition": lambda: tx.partition({"*": OPTAX}),
    "optax in a codec's wrapper": lambda: tx.compress(torch.bfloat16, OPTAX),
    "optax in skip_if_nonfinite": lambda: tx.skip_if_nonfinite(OPTAX),
    "optax as pipeline": lambda: fjoin.train_step(loss_fn, OPTAX),
    "optax in ddp.register": lambda: fjoin.ddp.register(object.__new__(DistributedDataParallel), OPTAX),
    "optax in fjoin.Optimizer": lambda: fjoin.Optimizer([torch.nn.Parameter(torch.ones(1))], OPTAX),
    "optax in inject_hyperparameters": lambda: tx.inject_hyperparameters(OPTAX),
    "optax in zero": lambda: tx.zero(MEAN, OPTAX, "data"),
    "optax in diloco": lambda: tx.diloco(OPTAX, tx.mean("data"), every=2),
    "optax in explain": lambda: tx.explain(OPTAX, OURS, {"data": 2}),
    "a schedule of optax": lambda: stepped(tx.adam(SCHEDULE)),
    "one that is called with a number": lambda: stepped(tx.adam(lambda step: SCHEDULE(int(step)))),
    "one in a train_step": lambda: run(torch.ones(3), pipeline=tx.fuse(MEAN, tx.adam(SCHEDULE))),
    "one that is injected": lambda: stepped(tx.inject_hyperparameters(tx.sgd(SCHEDULE))),
    "one in warmup": lambda: stepped(tx.sgd(tx.warmup(3, SCHEDULE))),
    "an array as lr": lambda: tx.adam(jnp.asarray(0.1)), "arrays in pipeline.init": lambda: PIPELINE.init(THEIRS),
    "arrays as params of pipeline.step": lambda: PIPELINE.step(THEIRS, OURS, PIPELINE.init(OURS)),
    "arrays as grads of pipeline.step": lambda: PIPELINE.step(OURS, THEIRS, PIPELINE.init(OURS)),
    "arrays in optimizer.init": lambda: SGD.init(THEIRS),
    "arrays in optimizer.step": lambda: SGD.step(OURS, THEIRS, SGD.init(OURS)),
    "arrays in value_and_grad": lambda: fjoin.value_and_grad(loss_fn)(THEIRS, torch.ones(3)),
    "arrays as batch of value_and_grad": lambda: fjoin.value_and_grad(loss_fn)(OURS, jnp.ones(3)),
    "arrays in load_into": lambda: fjoin.load_into(torch.nn.Linear(3, 1), {"weight": jnp.ones((1, 3))}),
    "arrays as batch of a loss of torch": lambda: run(jnp.ones(3)),
    "and that is a loss of jax": lambda: run(jnp.ones(3), jax_loss),
    "a loss of jax with tensors": lambda: run(torch.ones(3), jax.jit(jax_loss)),
    "a loss that is an array": lambda: run(torch.ones(3), lambda params, batch: jnp.float32(1.0)),
    "the same in value_and_grad": lambda: fjoin.value_and_grad(lambda p, b: jnp.float32(1.0))(OURS, 0),
    "nested buffers": lambda: fjoin.train_step(loss_fn, PIPELINE).init(OURS, {"a": {"mean": jnp.ones(1)}}),
    "a key of jax": lambda: tx.random.uniform(jax.random.key(0)),
    "a model of equinox": lambda: fjoin.train_step(loss_fn, PIPELINE).init(MLP),
    "one in functional": lambda: fjoin.functional(MLP),
    "one whose arrays are tensors": lambda: PIPELINE.init(fjoin.jax.to_torch(MLP)),
    "one in value_and_grad": lambda: fjoin.value_and_grad(loss_fn)(fjoin.jax.to_torch(MLP), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", SLIPS)
def test_objects_of_other_libraries_are_refused(name: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        SLIPS[name]()


def test_what_they_say_works() -> None:
    run(torch.ones(3), pipeline=tx.fuse(tx.chain(MEAN, fjoin.jax.from_optax(OPTAX)), tx.sgd(1.0, maximize=True)))
    run(torch.ones(3), pipeline=tx.fuse(MEAN, tx.adam(lambda step: float(SCHEDULE(int(step))))))
    PIPELINE.step(fjoin.jax.to_torch(THEIRS), OURS, PIPELINE.init(OURS), weight=float(jnp.ones(())))
    run(jnp.ones(3), fjoin.jax.loss(jax_loss))
    run(fjoin.jax.to_torch(jnp.ones(3)))
    key = fjoin.jax.to_torch(jax.random.key_data(jax.random.key(3))).view(torch.int32)
    assert torch.equal(key, tx.random.key(3))
    arrays = eqx.partition(MLP, eqx.is_inexact_array)[0]
    assert len(fjoin.train_step(loss_fn, PIPELINE).init(arrays).params.layers) == 2
    PIPELINE.init(fjoin.jax.to_torch(arrays))


def test_what_takes_arrays() -> None:
    assert fjoin.train_step(loss_fn, PIPELINE).init(THEIRS).params["w"].tolist() == [1.0] * 3
    assert run(torch.ones(3), weight=lambda batch: jnp.asarray(2.0))[1].weight == 2.0
    found = tx.simulate(lambda x: tx.psum({"x": x}, "data"), {"data": 2}, [jnp.ones(2), jnp.ones(2)])
    assert found[0]["x"].tolist() == [2.0, 2.0]
