"""A model of equinox, whose loss and gradient jax computes, trained over torch.distributed on uneven data, beside jax and optax alone.

torchrun --nproc-per-node 2 examples/with_jax.py
"""

import _small
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fjoin
import fjoin.jax
from fjoin import transforms as tx

model = eqx.nn.MLP(in_size=6, out_size=3, width_size=16, depth=2, activation=jnp.tanh, key=jax.random.key(0))
params, static = eqx.partition(model, eqx.is_inexact_array)


def loss(params, batch):
    x, labels = batch
    logits = jax.vmap(eqx.combine(params, static))(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def with_jax_alone(ranks):
    """The parameters after an epoch of one process on the batches of all ranks."""
    optimizer = optax.sgd(_small.LEARNING_RATE, momentum=0.9)

    @jax.jit
    def one_step(own, state, batch):
        updates, state = optimizer.update(jax.grad(loss)(own, batch), state, own)
        return optax.apply_updates(own, updates), state

    own, batches = params, [_batches(rank) for rank in range(ranks)]
    state = optimizer.init(own)
    for i in range(max(map(len, batches))):
        live = [batch for rank in batches for batch in rank[i : i + 1]]
        batch = [np.concatenate([part.numpy() for part in parts]) for parts in zip(*live, strict=True)]
        own, state = one_step(own, state, batch)
    return fjoin.jax.flat(fjoin.jax.to_torch(own))


def _batches(rank):
    return [(x.float(), labels.int()) for x, labels in _small.make_batches(rank)]


rank, ranks = _small.start()
pipeline = tx.fuse(tx.mean("data"), tx.sgd(_small.LEARNING_RATE, momentum=0.9))
step = fjoin.train_step(fjoin.jax.loss(loss), pipeline, weight=lambda batch: len(batch[1]))
state = step.init(params)  # arrays of jax are copied
for batch in step.join(_batches(rank)):
    state, metrics = step(state, batch)

trained = eqx.combine(fjoin.jax.to_jax(state.params), static)  # an equinox model again
assert jnp.isfinite(trained(jnp.ones(6))).all()
_small.compare(fjoin.jax.flat(state.params), with_jax_alone(ranks), 1e-5)
