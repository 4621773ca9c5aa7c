"""The rows for collectives, their gradients, and training."""

from __future__ import annotations

from tests.from_jax.row import Row, Section

COLLECTIVES = Section(
    "Collectives",
    "ranks",
    "Inside `shard_map` over 8 ranks; `x` is this rank's part, float32 (8, 3).",
    [
        Row('lax.psum(x, "data")', 'tx.psum(x, "data")'),
        Row('lax.psum({"a": x, "b": 2 * x}, "data")', 'tx.psum({"a": x, "b": 2 * x}, "data")'),
        Row('lax.psum(x > 3, "data")', 'tx.psum(x > 3, "data")', "booleans are counted, here as int64", exact=True),
        Row('lax.pmean(x, "data")', 'tx.pmean(x, "data")'),
        Row('lax.pmax(x, "data")', 'tx.pmax(x, "data")', exact=True),
        Row('lax.pmin(x, "data")', 'tx.pmin(x, "data")', exact=True),
        Row('lax.ppermute(x, "data", [(0, 1), (1, 2)])', 'tx.ppermute(x, "data", [(0, 1), (1, 2)])', exact=True),
        Row('lax.pshuffle(x, "data", [7, 6, 5, 4, 3, 2, 1, 0])', 'tx.ppermute(x, "data", [(7 - r, r) for r in range(8)])',
            "there is no pshuffle: pairs (source, target)", exact=True),
        Row('lax.all_gather(x, "data")', 'tx.all_gather(x, "data")', exact=True),
        Row('lax.all_gather(x, "data", axis=1, tiled=True)', 'tx.all_gather(x, "data", dim=1, tiled=True)',
            "`dim`: an axis is a set of ranks here, a dimension is a dim", exact=True),
        Row('lax.psum_scatter(x, "data")', 'tx.psum_scatter(x, "data")'),
        Row('lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True)', 'tx.psum_scatter(x, "data", dim=0, tiled=True)', "`dim`"),
        Row('lax.all_to_all(x, "data", 0, 1)', 'tx.all_to_all(x, "data", 0, 1)', exact=True),
        Row('lax.all_to_all(x, "data", 0, 1, tiled=True)', 'tx.all_to_all(x, "data", 0, 1, tiled=True)', exact=True),
        Row('lax.axis_index("data")', 'tx.axis_index("data")', "int32 in jax, int64 in torch", exact=True),
        Row('lax.axis_size("data")', 'tx.axis_size("data")', exact=True),
        Row('lax.psum(jnp.where(lax.axis_index("data") == 2, x, 0), "data")', 'tx.pbroadcast(x, "data", 2)',
            "`lax.pbroadcast` does not run on CPUs", exact=True),
    ],
)  # fmt: skip

GRID = Section(
    "Several axes",
    "grid",
    'Inside `shard_map` over {"node": 2, "local": 4}.',
    [
        Row('lax.psum(x, ("node", "local"))', 'tx.psum(x, ("node", "local"))'),
        Row('lax.pmean(x, "local")', 'tx.pmean(x, "local")'),
        Row('lax.axis_index(("node", "local"))', 'tx.axis_index(("node", "local"))', exact=True),
        Row('lax.all_gather(x, ("node", "local"))', 'tx.all_gather(x, ("node", "local"))', exact=True),
    ],
)  # fmt: skip

SUMMED = "jax's `check_vma` counts a loss that is equal on all ranks once; here the derivative is that of the sum of all ranks' losses"
OWN = "jax sums the gradient of a `w` that all ranks share; here it is that of this rank's loss, until a transform averages it"

GRADIENTS = Section(
    "Gradients of collectives",
    "ranks",
    "`grad` is `jax.grad` and `torch.func.grad`; `c` is 1 + the rank's index; `w`, (3,), is equal on all ranks.",
    [
        Row('grad(lambda x: (c * lax.psum(x, "data")).sum())(x)', 'grad(lambda x: (c * tx.psum(x, "data")).sum())(x)'),
        Row('grad(lambda x: (c * lax.pmean(x, "data")).sum())(x)', 'grad(lambda x: (c * tx.pmean(x, "data")).sum())(x)'),
        Row('grad(lambda x: lax.psum(x**2, "data").sum())(x)',
            'grad(lambda x: tx.psum(x**2, "data").sum() / tx.axis_size("data"))(x)', SUMMED),
        Row('grad(lambda x: lax.pmean(x**2, "data").sum())(x)', 'grad(lambda x: (x**2).sum())(x) / tx.axis_size("data")', "as above"),
        Row("grad(lambda w: (w * x).sum())(w)", 'tx.psum(grad(lambda w: (w * x).sum())(w), "data")', OWN),
        Row('grad(lambda w: lax.pmean((w * x).sum(), "data"))(w)', 'tx.pmean(grad(lambda w: (w * x).sum())(w), "data")',
            "as above; `tx.mean` in a pipeline"),
        Row('grad(lambda w: (w * x).sum())(lax.pcast(w, "data", to="varying"))', "grad(lambda w: (w * x).sum())(w)",
            "there is no pcast, and no pvary: every value may differ between ranks"),
        Row('grad(lambda x: (c * lax.all_gather(x, "data") ** 2).sum())(x)',
            'grad(lambda x: (c * tx.all_gather(x, "data") ** 2).sum())(x)'),
        Row('grad(lambda x: (c * lax.all_gather(x, "data", axis=1, tiled=True) ** 2).sum())(x)',
            'grad(lambda x: (c * tx.all_gather(x, "data", dim=1, tiled=True) ** 2).sum())(x)', "`dim`"),
        Row('grad(lambda x: (c * lax.psum(jnp.where(lax.axis_index("data") == 2, x, 0), "data")).sum())(x)',
            'grad(lambda x: (c * tx.pbroadcast(x, "data", 2)).sum())(x)', "`lax.pbroadcast` does not run on CPUs"),
        Row('grad(lambda x: (c * lax.psum_scatter(x, "data") ** 2).sum())(x)',
            'grad(lambda x: (c * tx.psum_scatter(x, "data") ** 2).sum())(x)'),
        Row('grad(lambda x: (c * lax.all_to_all(x, "data", 0, 1, tiled=True) ** 2).sum())(x)',
            'grad(lambda x: (c * tx.all_to_all(x, "data", 0, 1, tiled=True) ** 2).sum())(x)'),
        Row('grad(lambda x: (c * lax.all_to_all(x, "data", 0, 0) ** 2).sum())(x)',
            'grad(lambda x: (c * tx.all_to_all(x, "data", 0, 0) ** 2).sum())(x)', "jax 0.10 cannot differentiate it from 0 to 1"),
        Row('grad(lambda x: (c * lax.ppermute(x, "data", [(0, 1), (1, 2)]) ** 2).sum())(x)',
            'grad(lambda x: (c * tx.ppermute(x, "data", [(0, 1), (1, 2)]) ** 2).sum())(x)'),
    ],
)  # fmt: skip

TRAINING = Section(
    "Training on 8 ranks",
    "ranks",
    '`loss` is the mean over this rank\'s `x`; `p` is {"w": w}; `opt` is `optax.adam(0.1)`, '
    '`pipeline` is `tx.fuse(tx.mean("data"), tx.adam(0.1))`.',
    [
        Row('optax.apply_updates(p, opt.update(grad(lambda p: lax.pmean(loss(p, x), "data"))(p), opt.init(p))[0])',
            "pipeline.step(p, grad(loss)(p, x), pipeline.init(p))[0]",
            "the mean is a stage of the pipeline; the state has no other place"),
        Row('optax.apply_updates(p, opt.update(grad(lambda p: lax.pmean(loss(p, x), "data"))(p), opt.init(p))[0])',
            "step(step.init(p), x)[0].params",
            "`step` is `fjoin.train_step(loss, pipeline)`; its state is params, pipeline state and step in one, as flax's TrainState"),
        Row('lax.pmean(loss(p, x), "data")', "step(step.init(p), x)[1].loss", "no message of its own"),
        Row('optax.tree.get(opt.update(grad(lambda p: lax.pmean(loss(p, x), "data"))(p), opt.init(p))[1], "count")',
            "pipeline.step(p, grad(loss)(p, x), pipeline.init(p))[1].step", "a number on the host"),
        Row('optax.tree.get(opt.update(grad(lambda p: lax.pmean(loss(p, x), "data"))(p), opt.init(p))[1], "mu")["w"]',
            'pipeline.step(p, grad(loss)(p, x), pipeline.init(p))[1].optimizer["w"].exp_avg',
            "an optimizer's state lies at its parameter"),
    ],
)  # fmt: skip
