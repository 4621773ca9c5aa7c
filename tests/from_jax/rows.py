"""The rows of the table in docs/from-jax.md: a line of jax, and ours. `python -m tests.from_jax.rows` writes them into the page.

The texts are what the test runs, on both sides, so the page cannot say anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Row(NamedTuple):
    jax: str  # an expression
    ours: str
    why: str = ""  # where a name or a meaning differs
    exact: bool = False  # bits are compared, else up to `room`
    room: float = 1e-6
    residuals: bool = True  # of policies: whether the sizes of residuals are compared


class Section(NamedTuple):
    title: str
    kind: str  # the function that runs its rows, in theirs.py and test_from_jax.py
    intro: str
    rows: list[Row]


class Case(NamedTuple):
    kind: str
    row: Row


def table(sections: Sequence[Section]) -> str:
    """The sections of the page, in Markdown."""
    lines: list[str] = []
    for section in sections:
        lines += [f"### {section.title}", "", section.intro, "", "| jax | fjoin | why |", "| --- | --- | --- |"]
        lines += [f"| `{row.jax}` | `{row.ours}` | {row.why} |".replace("  |", " |") for row in section.rows]
        lines += [""]
    return "\n".join(lines)


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
SHARDED = "[sharded parameters](fully-shard.md#in-pure-functions), which are gathered again in the backward pass"
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
        Row('grad(jax.checkpoint(lambda x: (c * lax.all_gather(x, "data", tiled=True) ** 2).sum()))(x)',
            'grad(tx.remat(lambda x: (c * tx.all_gather(x, "data", tiled=True) ** 2).sum()))(x)', SHARDED),
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

FUNCTIONS = Section(
    "Functions, and trees",
    "values",
    '`loss(w, x) -> (loss, aux)`; `f` is the loss alone; `tree` is `{"b": [2.0, None], "a": (1.0, 3.0)}`.',
    [
        Row("jax.value_and_grad(loss, has_aux=True)(w, x)", "fjoin.value_and_grad(loss, has_aux=True)(w, x)"),
        Row("jax.grad(f)(w, x)", "torch.func.grad(f)(w, x)"),
        Row("jax.vmap(f, (None, 0))(w, x)", "torch.func.vmap(f, (None, 0))(w, x)"),
        Row("jax.jacrev(f)(w, x)", "torch.func.jacrev(f)(w, x)"),
        Row('jax.shard_map(lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())(x)',
            'tx.simulate(lambda x: tx.psum(x, "data"), {"data": 8}, x.chunk(8))[0]',
            "names and sizes in the place of a mesh, a list of parts in the place of specs; the result of each rank"),
        Row("jax.tree.map(lambda v: 2 * v, tree)", "optree.tree_map(lambda v: 2 * v, tree)"),
        Row("jax.tree.leaves(tree)", "optree.tree_leaves(tree)"),
        Row("jax.tree.structure(tree).num_leaves", "optree.tree_structure(tree).num_leaves"),
        Row("jax.tree.reduce(lambda a, b: a - b, tree)", "optree.tree_reduce(lambda a, b: a - b, tree)"),
        Row('jax.tree.map_with_path(lambda path, v: keystr(path, simple=True, separator="."), tree)',
            'optree.tree_map_with_path(lambda path, v: ".".join(map(str, path)), tree)',
            "a path is a tuple of names and numbers; `masked` and `partition` match it with dots", exact=True),
        Row("ravel_pytree(w)[0]", "optree.integrations.torch.tree_ravel(w)[0]"),
    ],
)  # fmt: skip

SAME = "the policies of the same names; `remat` is for `jax.checkpoint`"
POLICIES = Section(
    "Checkpoint policies",
    "policy",
    "`p` is `jax.checkpoint_policies`. Gradients of `jax.checkpoint(block, policy=...)` and `tx.remat(block, policy=...)`, and the sizes "
    "of what `print_saved_residuals` and `tx.saved_residuals` list beside the arguments. `block` names two values by `checkpoint_name`.",
    [
        Row("p.nothing_saveable", "tx.checkpoint_policies.nothing_saveable", SAME),
        Row("p.everything_saveable", "tx.checkpoint_policies.everything_saveable",
            "gradients only: backward formulas of torch keep other values", residuals=False),
        Row("p.dots_saveable", "tx.checkpoint_policies.dots_saveable"),
        Row("p.dots_with_no_batch_dims_saveable", "tx.checkpoint_policies.dots_with_no_batch_dims_saveable"),
        Row('p.save_only_these_names("h")', 'tx.checkpoint_policies.save_only_these_names("h")'),
        Row('p.save_any_names_but_these("s")', 'tx.checkpoint_policies.save_any_names_but_these("s")'),
        Row('p.save_from_both_policies(p.dots_saveable, p.save_only_these_names("h"))', "tx.checkpoint_policies.save_from_both_policies("
            'tx.checkpoint_policies.dots_saveable, tx.checkpoint_policies.save_only_these_names("h"))'),
        Row('p.save_and_offload_only_these_names(names_which_can_be_saved=["s"], names_which_can_be_offloaded=["h"], '
            'offload_src="device", offload_dst="pinned_host")',
            'tx.checkpoint_policies.save_and_offload_only_these_names(names_which_can_be_saved=["s"], names_which_can_be_offloaded=["h"])',
            "from a GPU"),
        Row('p.offload_dot_with_no_batch_dims("device", "pinned_host")', "tx.checkpoint_policies.offload_dot_with_no_batch_dims()",
            "as above"),
    ],
)  # fmt: skip

KEYS = Section(
    "Keys and random numbers",
    "values",
    "`random` is `jax.random` and `tx.random`; `k` is `random.key(7)`. To the bit, but for `normal`, whose last bits differ.",
    [
        Row("random.key_data(random.key(42))", "random.key(42)", "a key is a tensor, (2,) int32", exact=True),
        Row("random.key_data(random.split(k, 3))", "random.split(k, 3)", exact=True),
        Row("random.key_data(random.fold_in(k, 5))", "random.fold_in(k, 5)", exact=True),
        Row("random.bits(k, (4,))", "random.bits(k, (4,))", "uint32 in jax, the same bits as int32 here", exact=True),
        Row("random.uniform(k, (3, 4))", "random.uniform(k, (3, 4))", exact=True),
        Row("random.uniform(k, (4,), minval=-1.0, maxval=2.0)", "random.uniform(k, (4,), minval=-1.0, maxval=2.0)",
            "up to the last bit: XLA multiplies and adds at once"),
        Row("random.normal(k, (3, 4))", "random.normal(k, (3, 4))"),
        Row("random.bernoulli(k, 0.3, (16,))", "random.bernoulli(k, 0.3, (16,))", exact=True),
        Row("random.randint(k, (16,), -5, 100)", "random.randint(k, (16,), -5, 100)", exact=True),
        Row("random.permutation(k, 20)", "random.permutation(k, 20)", exact=True),
        Row("jax.vmap(lambda k: random.uniform(k, (3,)))(random.split(k, 4))",
            "torch.vmap(lambda k: random.uniform(k, (3,)))(random.split(k, 4))", exact=True),
    ],
)  # fmt: skip

BETAS = "`betas` for `b1`, `b2`, as in torch"
OPTIMIZERS = Section(
    "Optimizers",
    "optimizer",
    "Parameters after 6 steps. Learning rate first, as in optax; other names and defaults are torch's.",
    [
        Row("optax.sgd(0.1, momentum=0.9)", "tx.sgd(0.1, momentum=0.9)"),
        Row("optax.sgd(0.1, momentum=0.9, nesterov=True)", "tx.sgd(0.1, momentum=0.9, nesterov=True)"),
        Row("optax.adam(1e-2, b1=0.8, b2=0.99)", "tx.adam(1e-2, betas=(0.8, 0.99))", BETAS),
        Row("optax.adamw(1e-2, weight_decay=0.1)", "tx.adamw(1e-2, weight_decay=0.1)", "default 1e-2, in optax 1e-4"),
        Row("optax.amsgrad(1e-2)", "with_optax(optax.amsgrad(1e-2))", "`amsgrad=True` is torch's: the maximum before bias correction"),
        Row("optax.radam(1e-2)", "tx.radam(1e-2)", "up to 5e-6, the rounding of jax's float32 factors", room=5e-6),
        Row("optax.adamax(1e-2)", "tx.adamax(1e-2)"),
        Row("optax.adagrad(0.1, 0.1)", "tx.adagrad(0.1, initial_accumulator_value=0.1)", "default 0, in optax 0.1"),
        Row("optax.adadelta(1.0, rho=0.9)", "tx.adadelta(1.0, rho=0.9)"),
        Row("optax.rmsprop(1e-2, decay=0.99, eps_in_sqrt=False)", "tx.rmsprop(1e-2, alpha=0.99)", "`alpha`; eps outside of the root"),
        Row("optax.rprop(1e-2)", "with_optax(optax.rprop(1e-2))", "optax 0.2.8 takes each step one call late; `tx.rprop` does not"),
        Row("optax.lion(1e-2, weight_decay=0.1)", "tx.lion(1e-2, weight_decay=0.1)", "default 0, in optax 1e-3"),
        Row("optax.lamb(1e-2)", "tx.lamb(1e-2)"),
        Row("optax.contrib.muon(1e-2)", "with_optax(optax.contrib.muon(1e-2))", "`tx.muon` is torch's: bfloat16, no bias correction"),
        Row("optax.nadam(1e-2)", "with_optax(optax.nadam(1e-2))", "`tx.nadam` is torch's, whose momentum has a schedule"),
        Row("optax.adafactor(1e-2)", "with_optax(optax.adafactor(1e-2))", "`tx.adafactor` is torch's, with another schedule of the decay"),
        Row("optax.adan(1e-2)", "with_optax(optax.adan(1e-2))", "any other of optax; see below for `with_optax`"),
        Row("optax.sgd(optax.linear_schedule(0.1, 0.0, 5))", "tx.sgd(tx.linear(0.1, 0.0, 5))", "a schedule in the place of a number"),
        Row("optax.sgd(optax.linear_schedule(0.1, 0.0, 5))", "tx.sgd(lambda step: float(optax.linear_schedule(0.1, 0.0, 5)(int(step))))",
            "a schedule of optax: it gets the step as a tensor"),
    ],
)  # fmt: skip

STAGES = Section(
    "Transforms of gradients",
    "stage",
    "What comes out in each of 6 calls.",
    [
        Row("optax.identity()", "tx.identity()"),
        Row("optax.clip_by_global_norm(1.0)", "tx.clip_by_global_norm(1.0)"),
        Row("optax.clip(0.1)", "tx.clip_by_value(0.1)"),
        Row("optax.chain(optax.clip(0.5), optax.clip_by_global_norm(1.0))", "tx.chain(tx.clip_by_value(0.5), tx.clip_by_global_norm(1.0))"),
        Row("optax.scale(2.0)", "tx.stateless(lambda g: 2.0 * g)"),
        Row('optax.masked(optax.clip(0.1), {"w": True, "b": False})', 'tx.masked(tx.clip_by_value(0.1), "w")',
            "patterns of paths, or a function of the path, in the place of a tree of booleans"),
        Row('optax.partition({"small": optax.clip(0.1), "large": optax.clip(1.0)}, {"w": "small", "b": "large"})',
            'tx.partition({"w": tx.clip_by_value(0.1), "*": tx.clip_by_value(1.0)})',
            "patterns of paths in the place of labels; the first match wins"),
        Row("optax.ema(0.9)", "fjoin.jax.from_optax(optax.ema(0.9))", "of gradients; `tx.ema` is that of parameters"),
        Row("optax.scale_by_adam()", "fjoin.jax.from_optax(optax.scale_by_adam())", "optimizers here return no updates"),
        Row("optax.adaptive_grad_clip(0.01)", "fjoin.jax.from_optax(optax.adaptive_grad_clip(0.01))"),
    ],
)  # fmt: skip

STEPS = Section(
    "Whole steps",
    "steps",
    "Parameters after 6 steps; the gradients of the third have a NaN where the row says so. `none` is `tx.identity()`.",
    [
        Row("optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))", "tx.fuse(tx.clip_by_global_norm(1.0), tx.adam(1e-2))",
            "`fuse` joins gradient transforms and the optimizer: a pipeline"),
        Row("optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))", "tx.fuse(none, tx.sgd(0.1, weight_decay=0.1))"),
        Row('optax.partition({"on": optax.adamw(1e-2, weight_decay=0.1), "off": optax.adam(1e-2)}, {"w": "on", "b": "off"})',
            'tx.fuse(none, tx.partition({"b": tx.adam(1e-2), "*": tx.adamw(1e-2, weight_decay=0.1)}))',
            "`multi_transform` too; optimizers as well as transforms"),
        Row('optax.partition({"on": optax.sgd(0.1), "off": optax.set_to_zero()}, {"w": "on", "b": "off"})',
            'tx.fuse(none, tx.partition({"b": tx.frozen(), "*": tx.sgd(0.1)}))', "`frozen`"),
        Row("optax.MultiSteps(optax.adam(1e-2), 2)", "tx.fuse(tx.accumulate(2, none), tx.adam(1e-2))",
            'inside: what a window ends with, such as `tx.mean("data")`'),
        Row("optax.apply_if_finite(optax.adam(1e-2), 5)", "tx.skip_if_nonfinite(tx.fuse(none, tx.adam(1e-2)))",
            "NaN in the third; around the pipeline; no limit of errors in a row"),
        Row("optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)", "tx.fuse(none, tx.inject_hyperparameters(tx.adam(1e-2)))",
            "of an optimizer that is made; `tx.with_hyperparameters(state, lr=...)` changes it"),
        Row("slower(optax.inject_hyperparams(optax.adam)(learning_rate=1e-2))",
            "slower(tx.fuse(none, tx.inject_hyperparameters(tx.adam(1e-2))))",
            "after the third step `slower` sets 1e-3: `state.hyperparams[\"learning_rate\"] = 1e-3`, and here "
            "`state._replace(optimizer=tx.with_hyperparameters(state.optimizer, lr=1e-3))`"),
        Row("averaged(optax.sgd(0.1), 0.9)", "tx.fuse(none, tx.sgd(0.1), after=tx.ema(0.9))",
            "the average of parameters: `averaged` calls `optax.incremental_update(params, average, 0.1)` in each step, from the "
            "parameters after the first; here `tx.ema_params(params, state)`"),
    ],
)  # fmt: skip

SCHEDULES = Section(
    "Schedules",
    "schedule",
    "Values in the steps 0 to 25. A schedule here returns a 0-d float64 tensor.",
    [
        Row("optax.constant_schedule(0.1)", "lambda step: 0.1", "or the number alone"),
        Row("optax.linear_schedule(1.0, 0.1, 20)", "tx.linear(1.0, 0.1, 20)"),
        Row("optax.cosine_decay_schedule(1.0, 20, alpha=0.1)", "tx.cosine(1.0, 20, end=0.1)", "the last value, not its share of the first"),
        Row("optax.piecewise_constant_schedule(1.0, {5: 0.1, 10: 0.5})", "lambda step: 0.1 ** int(step >= 5) * 0.5 ** int(step >= 10)"),
        Row("optax.join_schedules([optax.linear_schedule(0.2, 1.0, 4), optax.cosine_decay_schedule(1.0, 15)], [5])",
            "tx.warmup_cosine(1.0, warmup_steps=5, total_steps=20)", "the first step has peak / warmup_steps, and not 0"),
        Row("optax.warmup_cosine_decay_schedule(0.0, 1.0, warmup_steps=5, decay_steps=20)",
            "lambda step: float(optax.warmup_cosine_decay_schedule(0.0, 1.0, 5, 20)(int(step)))", "optax's own, whose first step is 0"),
        Row("optax.cosine_onecycle_schedule(20, 1.0, pct_start=0.3)",
            "tx.from_torch_scheduler(lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 1.0, 21, pct_start=7 / 21), 0.1, 21)",
            "torch counts steps, the first and the last included: the peak is step 21 pct_start - 1"),
        Row("optax.exponential_decay(1.0, 1, 0.9)", "lambda step: 0.9 ** int(step)", "any function of the step"),
    ],
)  # fmt: skip

# -- what the rows are run on, on both sides --

_random = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return _random.normal(size=shape).astype(np.float32)


X, W = _normal(64, 3), _normal(3)  # of all ranks, (8, 3) of each
SMALL = {"a": _normal(3, 4), "b": _normal(4)}
BLOCK, BLOCK_X = {"a": 0.3 * _normal(4, 6), "b": 0.3 * _normal(6, 3)}, _normal(2, 5, 4)
TREE = {"b": [2.0, None], "a": (1.0, 3.0)}
PARAMS = {"w": _normal(4, 5), "b": _normal(3, 3)}
_GRADS = [{"w": _normal(4, 5), "b": _normal(3, 3)} for _ in range(6)]


def gradients(nan: bool = False) -> list[Any]:
    """Those of 6 steps."""
    if not nan:
        return _GRADS
    bad = {"w": _GRADS[2]["w"] * np.float32("nan"), "b": _GRADS[2]["b"]}
    return [*_GRADS[:2], bad, *_GRADS[3:]]


PAGE = Path(__file__).parents[2] / "docs" / "from-jax.md"
BEGIN, END = "<!-- rows of tests/from_jax/rows.py -->\n\n", "\n<!-- end of rows -->"
SECTIONS = [COLLECTIVES, GRID, GRADIENTS, TRAINING, FUNCTIONS, POLICIES, OPTIMIZERS, STAGES, STEPS, SCHEDULES, KEYS]
CASES = {f"{section.title}: {row.ours}": Case(section.kind, row) for section in SECTIONS for row in section.rows}

if __name__ == "__main__":
    text, end = PAGE.read_text(), END.strip()
    before, after = text.split(BEGIN.strip())[0], text.split(end)[1]
    PAGE.write_text(before + BEGIN + table(SECTIONS) + END + after)
