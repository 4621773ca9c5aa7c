"""Objects of jax, optax and equinox in the wrong place: each error says what to write."""

from __future__ import annotations

import re
import subprocess
import sys
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


TO_TORCH = "fjoin.jax.to_torch(tree)"
STAGE = "tx.from_optax(transformation)"
PIPE = "tx.fuse(tx.chain(tx.mean('data'), tx.from_optax(transformation)), tx.sgd(1.0, maximize=True))"
RATE = "lambda step: float(schedule(int(step)))"
MODEL = "eqx.partition(model, eqx.is_inexact_array)[0]"
LOSS = "fjoin.jax.loss(loss_fn)"

SLIPS: dict[str, tuple[Any, str]] = {
    "optax as hook": (lambda: tx.fuse(OPTAX, SGD), STAGE),
    "optax as optimizer": (lambda: tx.fuse(MEAN, OPTAX), PIPE),
    "optax after": (lambda: tx.fuse(MEAN, SGD, after=OPTAX), STAGE),
    "optax in chain": (lambda: tx.chain(MEAN, OPTAX), STAGE),
    "optax in masked": (lambda: tx.masked(OPTAX, "*"), STAGE),
    "optax in partition": (lambda: tx.partition({"*": OPTAX}), STAGE),
    "optax in a codec's wrapper": (lambda: tx.cast(torch.bfloat16, OPTAX), STAGE),
    "optax in skip_if_nonfinite": (lambda: tx.skip_if_nonfinite(OPTAX), STAGE),
    "optax as pipeline": (lambda: fjoin.train_step(loss_fn, OPTAX), PIPE),
    "optax in ddp.register": (lambda: fjoin.ddp.register(object.__new__(DistributedDataParallel), OPTAX), PIPE),
    "optax in fjoin.Optimizer": (lambda: fjoin.Optimizer([torch.nn.Parameter(torch.ones(1))], OPTAX), PIPE),
    "optax in inject_hyperparameters": (lambda: tx.inject_hyperparameters(OPTAX), PIPE),
    "optax in zero": (lambda: tx.zero(MEAN, OPTAX, "data"), PIPE),
    "optax in diloco": (lambda: tx.diloco(OPTAX, "data", every=2), PIPE),
    "optax in explain": (lambda: tx.explain(OPTAX, OURS, {"data": 2}), PIPE),
    "a schedule of optax": (lambda: stepped(tx.adam(SCHEDULE)), RATE),
    "one that is called with a number": (lambda: stepped(tx.adam(lambda step: SCHEDULE(int(step)))), RATE),
    "one in a train_step": (lambda: run(torch.ones(3), pipeline=tx.fuse(MEAN, tx.adam(SCHEDULE))), RATE),
    "one that is injected": (lambda: stepped(tx.inject_hyperparameters(tx.sgd(SCHEDULE))), RATE),
    "one in warmup": (lambda: stepped(tx.sgd(tx.warmup(3, SCHEDULE))), RATE),
    "an array as lr": (lambda: tx.adam(jnp.asarray(0.1)), "float(array)"),
    "an array as the weight of a pure step": (lambda: PIPELINE.step(OURS, OURS, PIPELINE.init(OURS), weight=jnp.ones(())), "float(array)"),
    "arrays in pipeline.init": (lambda: PIPELINE.init(THEIRS), TO_TORCH),
    "arrays as params of pipeline.step": (lambda: PIPELINE.step(THEIRS, OURS, PIPELINE.init(OURS)), TO_TORCH),
    "arrays as grads of pipeline.step": (lambda: PIPELINE.step(OURS, THEIRS, PIPELINE.init(OURS)), TO_TORCH),
    "arrays in optimizer.init": (lambda: SGD.init(THEIRS), TO_TORCH),
    "arrays in optimizer.step": (lambda: SGD.step(OURS, THEIRS, SGD.init(OURS)), TO_TORCH),
    "arrays in value_and_grad": (lambda: fjoin.value_and_grad(loss_fn)(THEIRS, torch.ones(3)), TO_TORCH),
    "arrays as batch of value_and_grad": (lambda: fjoin.value_and_grad(loss_fn)(OURS, jnp.ones(3)), TO_TORCH),
    "arrays in load_into": (lambda: fjoin.load_into(torch.nn.Linear(3, 1), {"weight": jnp.ones((1, 3))}), TO_TORCH),
    "arrays as batch of a loss of torch": (lambda: run(jnp.ones(3)), TO_TORCH),
    "and that is a loss of jax": (lambda: run(jnp.ones(3), jax_loss), LOSS),
    "a loss of jax with tensors": (lambda: run(torch.ones(3), jax.jit(jax_loss)), LOSS),
    "a loss that is an array": (lambda: run(torch.ones(3), lambda params, batch: jnp.float32(1.0)), LOSS),
    "the same in value_and_grad": (lambda: fjoin.value_and_grad(lambda p, b: jnp.float32(1.0))(OURS, 0), LOSS),
    "nested buffers": (lambda: fjoin.train_step(loss_fn, PIPELINE).init(OURS, {"a": {"mean": jnp.ones(1)}}), "fjoin.jax.flat(buffers)"),
    "a key of jax": (lambda: tx.random.uniform(jax.random.key(0)), "fjoin.jax.to_torch(jax.random.key_data(key)).view(torch.int32)"),
    "a model of equinox": (lambda: fjoin.train_step(loss_fn, PIPELINE).init(MLP), MODEL),
    "one in functional": (lambda: fjoin.functional(MLP), MODEL),
    "one whose arrays are tensors": (lambda: PIPELINE.init(fjoin.jax.to_torch(MLP)), MODEL),
    "one in value_and_grad": (lambda: fjoin.value_and_grad(loss_fn)(fjoin.jax.to_torch(MLP), 0), MODEL),
}  # fmt: skip


@pytest.mark.parametrize("name", SLIPS)
def test_the_error_says_what_to_write(name: str) -> None:
    slip, remedy = SLIPS[name]
    with pytest.raises((TypeError, ValueError)) as caught:
        slip()
    assert remedy in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_what_they_say_works() -> None:
    run(torch.ones(3), pipeline=tx.fuse(tx.chain(MEAN, tx.from_optax(OPTAX)), tx.sgd(1.0, maximize=True)))
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


def test_other_values_get_no_such_text() -> None:
    for slip in (lambda: tx.inject_hyperparameters(tx.sgd), lambda: fjoin.functional(len), lambda: tx.sgd("1")):  # type: ignore[arg-type]
        with pytest.raises(TypeError) as caught:
            slip()
        assert not re.search("jax|optax|equinox", str(caught.value))
    with pytest.raises(TypeError, match="fjoin.functional"):
        PIPELINE.init({"w": torch.nn.Linear(1, 1)})
    with pytest.raises(TypeError) as caught:
        run(3, lambda params, batch: params["w"] @ "3")
    assert not hasattr(caught.value, "__notes__")


def test_a_module_of_flax() -> None:
    """flax need not be installed: the class of its modules is known by the name of its home."""
    module = type("Dense", (), {"__module__": "flax.linen.linear"})()
    for slip in (lambda: SGD.init(module), lambda: fjoin.functional(module)):
        with pytest.raises(TypeError, match=r"fjoin.jax.to_torch\(module.init\(key, x\)\['params'\]\)"):
            slip()


def test_a_model_of_equinox_that_nothing_has_looked_into() -> None:
    code = (
        "import equinox as eqx, jax\nfrom fjoin import transforms as tx\n"
        "tx.sgd(0.1).init(eqx.nn.Linear(2, 1, key=jax.random.key(0)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert MODEL in out.stderr


def test_nothing_of_theirs_is_imported() -> None:
    code = (
        "import sys\nfrom fjoin import transforms as tx\n"
        "try:\n    tx.chain(3)\nexcept TypeError:\n    pass\n"
        "assert not {'jax', 'optax', 'equinox', 'flax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
