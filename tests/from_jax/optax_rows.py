"""The rows for optax."""

from __future__ import annotations

from tests.from_jax.row import Row, Section

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
