"""What the names for modules, optimizers, checkpoints and jax refuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fjoin
import fjoin.checkpoint
import fjoin.ddp
import fjoin.jax
from fjoin import transforms as tx

V, T = ValueError, TypeError
MODEL, X = nn.Linear(2, 2), torch.ones(1)
PARAMS, SGD, NOWHERE = list(MODEL.parameters()), tx.sgd(0.1), "/nowhere"
HOOKS = (
    fjoin.ddp.allreduce_hook,
    fjoin.ddp.bf16_compress_hook,
    fjoin.ddp.fp16_compress_hook,
    fjoin.ddp.quantization_pertensor_hook,
)
ROWS: dict[str, list[tuple[Any, ...]]] = {
    # -- modules in DistributedDataParallel
    **{hook.__name__: [(lambda hook=hook: hook(axis=3), T, "named by a string", "got 3")] for hook in HOOKS},
    **{hook.__name__: [(lambda hook=hook: hook(0), V, "matrix_approximation_rank must be", "got 0")]
       for hook in (fjoin.ddp.powerSGD_hook, fjoin.ddp.batched_powerSGD_hook)},
    **{name: [(lambda name=name: getattr(fjoin.ddp, name)(3, MODEL, 3), T, "hook_with_zero_step", "got Linear"),
       (lambda name=name: getattr(fjoin.ddp, name)(3, object.__new__(nn.parallel.DistributedDataParallel), 3), T, "builtins.int")]
       for name in ("hook_with_zero_step", "hook_with_zero_step_interleaved")},
    "quantization_perchannel_hook": [(lambda: fjoin.ddp.quantization_perchannel_hook(0), V, "bucket_size must be", "got 0")],
    "post_localSGD_hook": [(lambda: fjoin.ddp.post_localSGD_hook(-1), V, "step must be", "got -1")],
    "PostLocalSGDState": [(lambda: fjoin.ddp.PostLocalSGDState(None, None, "x"), V, "start_localSGD_iter must be", "'x'")],
    "comm_hook": [(lambda: fjoin.ddp.comm_hook("x"), T, "DDPCommHookType", "ALLREDUCE")],
    "register": [(lambda: fjoin.ddp.register(MODEL, tx.mean("data")), T, "takes a DistributedDataParallel", "Linear")],
    "register_ddp_comm_hook": [(lambda: fjoin.ddp.register_ddp_comm_hook("ALLREDUCE", MODEL), T, "DistributedDataParallel", "Linear")],
    "load_into": [
        (lambda: fjoin.load_into(3, {}), T, "takes a module", "int"),
        *((lambda none=none: fjoin.load_into(MODEL, none), V, "there is no value in", repr(none)) for none in ({}, None)),
        (lambda: fjoin.load_into(MODEL, {"weight": X}), V, "'weight' has shape (1,)", "(2, 2)"),
    ],
    "checkpoint_wrapper": [(lambda: fjoin.checkpoint_wrapper(3), T, "takes a module", "int")],
    "offload_wrapper": [(lambda: fjoin.offload_wrapper(3), T, "takes a module", "int")],
    "value_and_grad": [
        (lambda: fjoin.value_and_grad(3), T, "loss_fn must be a function, got 3"),
        (lambda: fjoin.value_and_grad(len, has_aux=1), T, "has_aux"),
        *((lambda f=f, p=p, aux=aux: fjoin.value_and_grad(f, has_aux=aux)({"w": p}), kind, *words) for f, p, aux, kind, *words in (
            (lambda p: p["w"].sum(), X.long(), False, T, "'w'", "int64"), (lambda p: p["w"], 3.0, False, T, "'w'", "float"),
            (lambda p: p["w"], torch.ones(2), False, RuntimeError, "scalar outputs"),
            (lambda p: torch.ones(()), X, False, RuntimeError, "does not require grad"),
            (lambda p: 3.0, X, False, T, "must return a tensor"), (lambda p: p["w"].sum(), X, True, T, "(loss, aux)"),
        )),
    ],
    "sync_batch_norm": [
        (lambda: tx.sync_batch_norm(torch.ones(2, 3), (torch.ones(3),) * 2, axis=3), T, "named by a string", "got 3"),
        *((lambda a=a: tx.sync_batch_norm(*a, axis="data"), kind, *words) for a, kind, *words in (
            ((3, None), V, "(N, C, ...)", "3"), ((torch.ones(2, 3), None), T, "state must be a pair", "None"),
            ((torch.ones(2, 3), (torch.ones(2),) * 2), V, "state[0]", "(3,)"), ((torch.ones(2, 3), (torch.ones(3), 1)), V, "state[1]", "1"),
            ((torch.ones(2, 3), (torch.ones(3),) * 2, 3.0), V, "scale", "3.0"),
        )),
    ],
    # -- Join, optimizers and averagers
    "as_joinable": [
        (lambda bad=bad: fjoin.as_joinable(bad), T, "as_joinable: hook must be", repr(bad)) for bad in ("x", tx.JoinHook(3, 4))
    ],
    "Join": [
        (lambda: fjoin.Join([3]), V, "at least one joinable that communicates", "fjoin.as_joinable"),
        (lambda: fjoin.Join([torch.optim.SGD(PARAMS, 0.1)]), V, "communicates"),
        (lambda: fjoin.Join([MODEL]), V, "got ['Linear']; wrap a module in DistributedDataParallel"),
        (lambda: fjoin.Join([fjoin.as_joinable(tx.JoinHook()), MODEL]), T, "Linear"),
        (lambda: fjoin.Join([fjoin.as_joinable(lambda: 3)]), T, "tx.JoinHook(main, post)", "3"),
    ],
    "last_joiner": [(lambda: tx.last_joiner(True, "nowhere"), tx.UnboundAxis, "'nowhere'", "fjoin.bind")],
    "Optimizer": [(lambda: fjoin.Optimizer(PARAMS, 3), T, "takes an Optimizer of fjoin.transforms", "got 3")],
    "ZeroRedundancyOptimizer": [(lambda: fjoin.ZeroRedundancyOptimizer(PARAMS, torch.optim.SGD), V, "init_process_group first")],
    "PostLocalSGDOptimizer": [(lambda: fjoin.PostLocalSGDOptimizer(3, fjoin.PeriodicModelAverager(2)), T, "optim must be", "got 3")],
    "PeriodicModelAverager": [(lambda: fjoin.PeriodicModelAverager(0), V, "period must be", "got 0")],
    "HierarchicalModelAverager": [(lambda: fjoin.HierarchicalModelAverager({}), V, "at least one period", "{}")],
    "average_parameters": [(lambda: tx.average_parameters(()), V, "at least one axis", "()")],
    "average_state": [(lambda: tx.average_state(3), T, "named by a string", "got 3")],
    "ema_params": [(lambda: tx.ema_params({"w": X}, ()), V, "the state holds 0 averages", "state.pipeline")],
    "as_functional_optim": [(lambda: tx.as_functional_optim(3), V, "3 has no functional counterpart", "register")],
    "register_functional_optim": [(lambda: tx.register_functional_optim("x", 3), T, "factory must be a function", "got 3")],
    "cosine": [(lambda: tx.cosine("a", 3), T, "start", "'a'"), (lambda: tx.cosine(0.1, 0), V, "total_steps", "got 0")],
    "linear": [(lambda: tx.linear(0.1, 0.0, 0), V, "total_steps", "got 0")],
    "warmup": [(lambda: tx.warmup(-1, tx.linear(0.1, 0.0, 3)), V, "warmup_steps", "got -1")],
    "from_torch_scheduler": [
        (lambda: tx.from_torch_scheduler(lambda o: torch.optim.lr_scheduler.StepLR(o, 1), 0.1, 0), V, "total_steps", "0"),
    ],
    # -- codecs
    "bfloat16": [(lambda: tx.bfloat16(3), T, "stochastic must be True or False", "got 3")],
    **{make.__name__: [(lambda make=make: make(0), V, make.__name__, "block must be", "got 0")] for make in (tx.fp8, tx.int4, tx.uint8)},
    "auto_quantize": [(lambda: fjoin.auto_quantize(3, tx.int8()), T, "all_gather", "got 3")],
    # -- loops, checkpoints and jax
    "Shuffled": [
        (lambda: fjoin.Shuffled(4, 0), V, "batch_size must be", "got 0"), (lambda: fjoin.Shuffled(-1, 2), V, "n must", "-1"),
        (lambda: fjoin.Shuffled(10, 2, seed=1.5), T, "seed", "1.5"), (lambda: fjoin.Shuffled(10, 2).set_epoch(-1), V, "epoch", "-1"),
        (lambda: tx.simulate(lambda: fjoin.Shuffled(10, 2), {"data": 3}), V, "batch_size"),
        (lambda: fjoin.Shuffled(10, 2).set_epoch(0, -1), V, "step", "-1"),
    ],
    "show": [
        *((lambda every=every: fjoin.show(every), V, "every must be", f"got {every}") for every in (0, 2.5)),
        (lambda: fjoin.show(to=["run.log"]), T, "to=", "run.log", "(numbers, step)"),
    ],
    "trace": [(lambda: fjoin.trace(3).__enter__(), T, "os.PathLike")],
    "Checkpoints": [(lambda: fjoin.Checkpoints("x", 3), T, "a int cannot be saved", "pass a train_step")],
    "save": [(lambda: fjoin.save(NOWHERE, 3, 0), T, "a int cannot be saved", "pass a train_step")],
    "load": [(lambda: fjoin.load(NOWHERE, MODEL), T, "a Linear cannot be saved", "pass a train_step")],
    "export": [(lambda: fjoin.checkpoint.export(NOWHERE, "/x"), fjoin.CheckpointError, "/nowhere holds no step")],
    "verify": [(lambda: fjoin.checkpoint.verify(NOWHERE), fjoin.CheckpointError, "/nowhere holds no step")],
    "loss": [(lambda: fjoin.jax.loss(3), T, "takes a function", "got 3")],
    "from_optax": [(lambda: fjoin.jax.from_optax(3), T, "takes an optax.GradientTransformation", "got 3")],
    "to_optax": [(lambda: fjoin.jax.to_optax(3), T, "Transform", "got 3")],
}  # fmt: skip
