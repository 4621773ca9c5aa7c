"""The variants of a training step, and the pieces that every variant needs.

Each function sets up one variant and returns `(run, params)`: `run(n)` takes n steps, `params()` returns
the current parameters; `params` is None for a variant that trains nothing.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import floors
import models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from fjoin.buckets import Storage
from fjoin.step import _interleave as _interleaver
from fjoin.transforms.layout import make_layout

with contextlib.redirect_stderr(io.StringIO()):  # the import prints a deprecation notice that filters do not catch
    from torch.distributed.optim.functional_adamw import _FunctionalAdamW
    from torch.distributed.optim.functional_sgd import _FunctionalSGD
    from torch.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer
    from torch.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

LR = 1e-3
ADAMW = partial(torch.optim.AdamW, lr=LR, fused=True)
SGD = partial(torch.optim.SGD, lr=LR, momentum=0.9)
Variant = tuple[Callable[[int], None], Callable[[], list[Tensor]] | None]


def ddp(name: str, batch: Any, mesh: Any, join: str = "", hook: str = "", make: Any = None, **options: Any) -> Variant:
    """torch's DistributedDataParallel with the fused AdamW or another optimizer.

    It runs alone, in torch's or our Join, or with the optimizer in its hook, by torch or by our adapter.
    """
    x, y = batch
    model = DistributedDataParallel(models.model(name), gradient_as_bucket_view=True, **options)
    optimizer = (make or ADAMW)(model.parameters())
    if hook == "bf16":
        # A DistributedDataParallel on CPUs refuses torch's hook by its name.
        model.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
        hook = ""
    elif hook.startswith("power"):
        state = PowerSGDState(None, 4, start_powerSGD_iter=2, batch_tensors_with_same_shape="batched" in hook)
        model.register_comm_hook(state, powerSGD_hook)
        hook = ""
    elif hook == "ours":
        fjoin.ddp.register(model, tx.fuse(tx.mean("data", over="world"), tx.adamw(LR)), mesh)
    elif hook == "torch":
        with contextlib.redirect_stderr(io.StringIO()):  # it prints a deprecation notice that filters do not catch
            model._register_fused_optim(torch.optim.AdamW, lr=LR)

    def run(n: int) -> None:
        for _ in range(n):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if not hook:
                optimizer.step()

    def run_joined(n: int) -> None:
        with Join([model]) if join == "torch" else fjoin.Join([model, optimizer]):
            run(share(n))

    return run_joined if join else run, lambda: list(model.parameters())


def ddp_zero(name: str, batch: Any, mesh: Any, kind: str) -> Variant:
    """A DistributedDataParallel whose optimizer is sharded: by torch's class, by ours, or in our hook."""
    x, y = batch
    model = DistributedDataParallel(models.model(name), gradient_as_bucket_view=True)
    make: Any = ZeroRedundancyOptimizer if kind == "torch" else fjoin.ZeroRedundancyOptimizer
    settings = {"overlap_with_ddp": True} if kind == "hook" else {"parameters_as_bucket_view": True, "fused": True}
    zero = make(model.parameters(), torch.optim.AdamW, lr=LR, **settings)
    if kind == "hook":
        model.register_comm_hook(None, fjoin.ddp.hook_with_zero_step(fjoin.ddp.allreduce_hook, model, zero))

    def run(n: int) -> None:
        for _ in range(n):
            zero.zero_grad()
            F.cross_entropy(model(x), y).backward()
            zero.step()

    return run, lambda: list(model.parameters())


PERIOD = 4  # of the averages


def ddp_local(name: str, batch: Any, mesh: Any, ours: bool = False) -> Variant:
    """Local SGD by torch's classes in a DistributedDataParallel that sends no gradients, or with our averager."""
    x, y = batch
    model = DistributedDataParallel(models.model(name), gradient_as_bucket_view=True)
    model.register_comm_hook(PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False), post_localSGD_hook)
    made = ADAMW(model.parameters())
    optimizer: Any
    if ours:
        optimizer = fjoin.PostLocalSGDOptimizer(made, fjoin.PeriodicModelAverager(PERIOD))
    else:
        optimizer = PostLocalSGDOptimizer(made, PeriodicModelAverager(PERIOD))

    def run(n: int) -> None:
        for _ in range(n):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return run, lambda: list(model.parameters())


def ours_local(name: str, batch: Any, mesh: Any, diloco: bool = False) -> Variant:
    """Our local SGD with the schedule of torch's averager, or DiLoCo."""
    loss_fn, _, params, buffers, _ = functions(name, tx.adamw(LR))
    pipeline = tx.fuse(
        tx.identity(), tx.adamw(LR), after=tx.every(PERIOD, tx.average_parameters("data", over="world"), first=0)
    )
    if diloco:
        pipeline = tx.diloco(tx.adamw(LR), tx.mean("data"), PERIOD)
    step = fjoin.train_step(loss_fn, pipeline, mesh=mesh)
    state = step.init(params, buffers)
    del params

    def run(n: int) -> None:
        nonlocal state
        for _ in range(n):
            state, _ = step(state, batch)

    return run, lambda: list(state.params.values())


def share(n: int) -> int:
    """The number of this rank's batches, out of n, where inputs are uneven: 14 against 10."""
    return n if dist.get_rank() == 0 else n * 10 // 14


class Functions(NamedTuple):
    """A model as functions: the loss of a train_step, that of a loop of one's own, and what they start from."""

    loss: Callable[..., Any]  # (params, batch), or (params, buffers, batch) for a model with buffers
    own_loss: Callable[..., Any]  # (params, buffers, batch) -> (loss, buffers)
    params: dict[str, Tensor]
    buffers: dict[str, Tensor] | None
    pipeline: Any


def functions(name: str, optimizer: tx.Optimizer) -> Functions:
    apply, params, buffers = fjoin.functional(models.model(name))

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return F.cross_entropy(apply(params, {}, batch[0]), batch[1])

    def own_loss(params: Any, buffers: Any, batch: Any) -> tuple[Tensor, Any]:
        out, new = apply.with_buffers(params, buffers, batch[0])
        return F.cross_entropy(out, batch[1]), new

    def with_buffers(params: Any, buffers: Any, batch: Any) -> tuple[Tensor, None, Any]:
        loss, new = own_loss(params, buffers, batch)
        return loss, None, new

    pipeline = tx.fuse(tx.mean("data"), optimizer)
    return Functions(with_buffers if buffers else loss_fn, own_loss, params, buffers or None, pipeline)


def pages_given_back(*args: Any, **settings: Any) -> Variant:
    """fjoin's step where glibc returns freed memory to the kernel; for `alone.py`, since it affects the process."""
    _interleaver.keep_freed = lambda: None
    return ours(*args, **settings)


def ours(
    name: str,
    batch: Any,
    mesh: Any,
    join: str = "",
    sgd: bool = False,
    hook: tx.Transform | None = None,
    gather: tx.Codec | None = None,
    **settings: Any,
) -> Variant:
    """fjoin's step: alone, or inside its join on even or uneven inputs."""
    loss_fn, _, params, buffers, pipeline = functions(name, tx.sgd(LR, momentum=0.9) if sgd else tx.adamw(LR))
    pipeline = tx.fuse(hook, pipeline.optimizer, gather_codec=gather) if hook else pipeline
    step = fjoin.train_step(loss_fn, pipeline, mesh=mesh, **settings)
    state = step.init(params, buffers)
    del params

    def run(n: int) -> None:
        nonlocal state
        for _ in range(n):
            state, _ = step(state, batch)

    def run_joined(n: int) -> None:
        nonlocal state
        for b in step.join([batch] * (share(n) if join == "uneven" else n)):
            state, _ = step(state, b)

    return run_joined if join else run, lambda: list(state.params.values())


@functools.cache
def shared_mesh() -> Any:
    return fjoin.mesh({"data": -1}, transport="shared")


def shared(name: str, batch: Any, mesh: Any, make: Callable[..., Variant] = ours, **settings: Any) -> Variant:
    """A variant whose ranks exchange gradients through shared memory."""
    return make(name, batch, shared_mesh(), **settings)


def own_loop(name: str, batch: Any, mesh: Any, donate: bool = False, func: bool = False) -> Variant:
    """A loop of one's own: gradients by `fjoin.value_and_grad` or torch.func, and the pure pipeline on copies or on what is given up."""
    _, loss_fn, params, buffers, pipeline = functions(name, tx.adamw(LR))
    grad = fjoin.value_and_grad(loss_fn, has_aux=True)
    if func:
        of_func = torch.func.grad_and_value(loss_fn, has_aux=True)
        grad = lambda *args: of_func(*args)[::-1]  # noqa: E731
    state = pipeline.init(params)

    def run(n: int) -> None:
        nonlocal params, buffers, state
        with fjoin.bind(mesh):
            for _ in range(n):
                (_, new), grads = grad(params, buffers or {}, batch)
                params, state = pipeline.step(params, grads, state, donate=donate)
                buffers = new
                del grads  # else they stay while the next ones are made

    return run, lambda: list(params.values())


pure = partial(own_loop, func=True)
donate = partial(own_loop, donate=True)


def power_sgd(cast: torch.dtype | None = None) -> tx.Transform:
    hook = tx.power_sgd("data", 4)
    return tx.error_feedback(hook if cast is None else tx.compress(cast, hook))


def compute(name: str, batch: Any, mesh: Any) -> Variant:
    """C: forward and backward, without any message."""
    x, y = batch
    model = models.model(name)

    def run(n: int) -> None:
        for _ in range(n):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()

    return run, None


def messages(name: str, batch: Any, mesh: Any) -> Variant:
    """M: all gradients all-reduced, one message after the other, 5 MiB each; large tensors are one message."""
    sizes = [p.numel() for p in models.model(name).parameters()]
    big = [n for n in sizes if n >= 10**6]
    small = torch.zeros(sum(sizes) - sum(big))
    buffers = [*map(torch.zeros, big), *small.split(5 * 2**20 // 4)]

    def run(n: int) -> None:
        for _ in range(n):
            works = [dist.all_reduce(buffer, async_op=True) for buffer in buffers]
            for work in works:
                work.wait()

    return run, None


def with_grads(name: str) -> torch.nn.Module:
    model = models.model(name)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    return model


def optimizer(name: str, batch: Any, mesh: Any, make: Callable[[Any], Any] = ADAMW) -> Variant:
    """The step of an optimizer alone; O is torch's fused AdamW."""
    stepped = make(with_grads(name).parameters())

    def run(n: int) -> None:
        for _ in range(n):
            stepped.step()

    return run, None


def loop(name: str, batch: Any, mesh: Any, make: Callable[..., Any]) -> Variant:
    """torch's functional optimizer, parameter by parameter."""
    params = list(with_grads(name).parameters())
    with contextlib.redirect_stderr(io.StringIO()):
        functional = make(params, lr=LR)

    def run(n: int) -> None:
        for _ in range(n):
            for p in params:
                functional.step_param(p, p.grad)

    return run, None


def flat(name: str, batch: Any, mesh: Any, made: tx.Optimizer) -> Variant:
    """Our step on the flat buffers of a training step."""
    params = {path: p.detach() for path, p in models.model(name).named_parameters()}
    layout = make_layout(params, lambda path: "")
    storage = Storage(layout, params, made)
    storage.make_slots()
    grads = [torch.full_like(buffer, 1e-3) for buffer in storage.flats]

    def run(n: int) -> None:
        for _ in range(n):
            for i, grad in enumerate(grads):
                for part, param, g, slots in storage.ranges(i, grad):
                    part.step_param_(param, g, slots)

    return run, None


def with_optax(name: str, batch: Any, mesh: Any, flat: bool) -> Variant:
    """optax's AdamW as a stage, and the addition of its updates: on the tree, or on one flat tensor."""
    import optax  # jax takes its time to load

    import fjoin.jax

    params = {path: p.detach() for path, p in models.model(name).named_parameters()}
    if flat:
        params = {"flat": torch.cat([p.reshape(-1) for p in params.values()])}
    grads = {path: torch.full_like(p, 1e-3) for path, p in params.items()}
    stage = fjoin.jax.from_optax(optax.adamw(LR, weight_decay=1e-2))
    state = stage.init(params)

    def run(n: int) -> None:
        nonlocal state
        for _ in range(n):
            out, state = stage.update(grads, state, params)
            torch._foreach_add_(list(params.values()), list(out.values()))

    return run, None


MAKE: dict[str, Callable[..., Variant]] = {
    "ddp": ddp,
    "ddp again": ddp,
    "ddp 5": lambda *a: ddp(*a, bucket_cap_mb=5),
    "ddp 10": lambda *a: ddp(*a, bucket_cap_mb=10),
    "ddp join": lambda *a: ddp(*a, join="torch"),
    "ddp our join": lambda *a: ddp(*a, join="ours"),
    "ddp fused hook": lambda *a: ddp(*a, hook="torch"),
    "ddp our hook": lambda *a: ddp(*a, hook="ours"),
    "ddp foreach": lambda *a: ddp(*a, make=partial(torch.optim.AdamW, lr=LR, foreach=True)),
    "ddp sgd": lambda *a: ddp(*a, make=partial(SGD, fused=True)),
    "ours": ours,
    "ddp bf16": lambda *a: ddp(*a, hook="bf16"),
    "ddp bf16 5": lambda *a: ddp(*a, hook="bf16", bucket_cap_mb=5),
    "ours bf16": lambda *a: ours(*a, hook=tx.compress(torch.bfloat16, tx.mean("data"))),
    "ours int8": lambda *a: ours(*a, hook=tx.compress(tx.int8(), tx.mean("data"))),
    "ours int8, pages given back": lambda *a: pages_given_back(*a, hook=tx.compress(tx.int8(), tx.mean("data"))),
    "ours int8 fed back": lambda *a: ours(*a, hook=tx.error_feedback(tx.compress(tx.int8(), tx.mean("data")))),
    "ours int4": lambda *a: ours(*a, hook=tx.compress(tx.int4(), tx.mean("data"))),
    # One bucket, since torch's hook hangs on gloo with several.
    "ddp power": lambda *a: ddp(*a, hook="power", bucket_cap_mb=10**4),
    "ddp power batched": lambda *a: ddp(*a, hook="power, batched", bucket_cap_mb=10**4),
    # Large buckets, since little of each is sent, in two messages.
    "ours power": lambda *a: ours(*a, hook=power_sgd(), bucket_bytes=20 * 2**20),
    "ours power 5": lambda *a: ours(*a, hook=power_sgd()),
    "ours power bf16": lambda *a: ours(*a, hook=power_sgd(torch.bfloat16), bucket_bytes=20 * 2**20),
    "ddp local": ddp_local,
    "ddp our local": lambda *a: ddp_local(*a, ours=True),
    "ours local": ours_local,
    "ours diloco": lambda *a: ours_local(*a, diloco=True),
    "ours zero": lambda *a: ours(*a, hook=tx.scatter_mean("data")),
    "ours zero int8": lambda *a: ours(
        *a, hook=tx.error_feedback(tx.compress(tx.int8(), tx.scatter_mean("data"))), gather_codec=tx.int8()
    ),
    "ddp zero": lambda *a: ddp_zero(*a, "torch"),
    "ddp our zero": lambda *a: ddp_zero(*a, "ours"),
    "ddp our zero hook": lambda *a: ddp_zero(*a, "hook"),
    "shared": shared,
    "shared our hook": lambda *a: shared(*a, make=ddp, hook="ours"),
    "shared zero": lambda *a: shared(*a, hook=tx.scatter_mean("data")),
    "ours sgd": lambda *a: ours(*a, sgd=True),
    "ours join": lambda *a: ours(*a, join="even"),
    "ours join uneven": lambda *a: ours(*a, join="uneven"),
    "pure": pure,
    "pure value_and_grad": own_loop,
    "donate": donate,
    "shared donate": lambda *a: shared(*a, make=donate),
    **{name: lambda *a, make=make: make(*a[:2], floors.summed) for name, make in floors.LOOPS.items()},
    **{
        f"shared {name}": lambda *a, make=make: make(*a[:2], floors.in_shared_memory(shared_mesh().axes["data"]))
        for name, make in floors.LOOPS.items()
    },
    "shared pure": lambda *a: shared(*a, make=pure),
    "C": compute,
    "M": messages,
    "O": optimizer,
    "O foreach": lambda *a: optimizer(*a, partial(torch.optim.AdamW, foreach=True)),
    "O loop": lambda *a: loop(*a, _FunctionalAdamW),
    "O list": lambda *a: optimizer(*a, lambda ps: fjoin.Optimizer(ps, tx.adamw(LR))),
    "O flat": lambda *a: flat(*a, tx.adamw(LR)),
    "O optax": lambda *a: with_optax(*a, flat=False),
    "O optax flat": lambda *a: with_optax(*a, flat=True),
    "O sgd": lambda *a: optimizer(*a, partial(SGD, fused=True)),
    "O sgd foreach": lambda *a: optimizer(*a, partial(SGD, foreach=True)),
    "O sgd loop": lambda *a: loop(*a, partial(_FunctionalSGD, momentum=0.9)),
    "O sgd list": lambda *a: optimizer(*a, lambda ps: fjoin.Optimizer(ps, tx.sgd(LR, momentum=0.9))),
    "O sgd flat": lambda *a: flat(*a, tx.sgd(LR, momentum=0.9)),
}
