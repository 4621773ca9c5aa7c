"""Registering a hook or a pipeline with a DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType
from torch.nn.parallel import DistributedDataParallel

from ..agreement._consistency import same_hook, same_rates
from ..groups._mesh import Mesh
from ..groups._transport import linked_mesh
from ..transforms.pipelines._fuse import fuse
from ..transforms.pipelines._pipeline import Pipeline
from ..transforms.plan._plan import axes_of, warn_if_silent
from ..transforms.step_param._optimizer import Optimizer
from ..transforms.transform._transform import Transform
from ..transforms.transform._weights import Over
from ._handle import Handle
from ._hook import DDPRun
from ._join_hook import keep_stepped
from ._steps_in_backward import guard
from .comm_hooks._comm_hook_types import comm_hook


class _Live(list[Any]):
    """The hooks of a registered module. A pickled or deep copy of the module has no hook: its buckets are its own."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, ()


def register(model: DistributedDataParallel, what: Transform | Pipeline, mesh: Mesh | None = None) -> Handle:
    """Register a hook, or a whole fused pipeline, as the communication hook of a DistributedDataParallel.

    The buckets' messages travel during backward, in a fixed order. After the last bucket the stages run that need all
    gradients, and with a pipeline the optimizer steps the module's own parameters in place. After `loss.backward()`:

    - The gradients are the hook's result.
    - With a pipeline the parameters have been stepped: there is no `optimizer.step()`.
    - With a pipeline the next forward pass drops the gradients that the step has used, so `zero_grad()` may stay or go. With a
      hook alone it is needed, since DistributedDataParallel adds new gradients to the existing ones.

    Under `no_sync` nothing is sent or stepped; the accumulated gradients go with the next pass, whose weight is that of the
    whole window.

    The step is taken before backward returns. A second backward pass through the same graph, or a gradient of an input,
    that needs the old parameters no longer finds them, and torch raises an error.

    A mean over weights takes the weight set by `handle.weight(w)` before backward, a number of the host: for a tensor on
    a device the host waits. This adds one small message, with the first bucket, which `handle.explain()` shows. In a Join,
    torch's or ours, a rank without input counts 0; so with a pipeline all ranks take every step, and at the end each keeps
    its parameters, where torch sends those of the last rank to all. Divisors of the Join have no effect: the hook divides.

    Where all ranks of a gloo group are on one host, these messages are in shared memory, as in a mesh of `fjoin.mesh`; with
    FJOIN_TRANSPORT=gloo they use the group.

    The module can be pickled and copied, by torch.save or copy.deepcopy; the copy has no hook and can be registered
    again. The state of the hook is in `handle.state_dict()`.

    With a pipeline, parameters that no rank uses, where find_unused_parameters or static_graph allow that, are left
    unchanged, as by torch.optim. This adds one small message to each step.

    Args:
        model: The module; it takes only one hook.
        what: A `Transform` or a `Pipeline`.
        mesh: The ranks, where the hook has several axes; by default those of the module's group, as the hook's one axis.

    Returns:
        A `Handle`.

    Warns:
        UserWarning: on rank 0 of several: nothing in `what` reduces, and no `noop` marks this as intended.

    Raises:
        TypeError: `model` is no DistributedDataParallel, `what` neither transform nor pipeline.
        ValueError: the module already has a hook, or has parameters that it keeps from hooks; the hook's axes are not
            those of the module's group; `accumulate`, which no_sync replaces.
        DesyncError: on all ranks: they register different hooks or pipelines.
        NonFinite: raised by backward, on all ranks, with a pipeline that does not leave such steps out; nothing is
            stepped.
        RuntimeError: raised by backward: a pipeline in `dynamic_loss_scale` got gradients of a loss without
            `handle.scale`.

    Same as: register_comm_hook, _register_fused_optim.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"register takes a DistributedDataParallel, got a {type(model).__name__}")
    if not isinstance(what, (Transform, Pipeline)):
        raise TypeError(f"register takes a transform or a pipeline, got {what!r}; for example mean('data')")
    if model._comm_hooks:
        raise ValueError("this module has a communication hook already; a module can be given one only")
    hook = what.hook if isinstance(what, Pipeline) else what
    if mesh is None:
        named = axes_of(hook, ())
        if len(named) > 1:
            raise ValueError(f"{hook!r} has the axes {sorted(named)}; pass mesh=fjoin.mesh(...) that has them")
        mesh = linked_mesh(model.process_group, next(iter(named), "data"), "fjoin.ddp.register")
    if mesh.size != model.process_group.size():
        raise ValueError(f"the mesh has {mesh.size} ranks, but the module's group {model.process_group.size()}")
    if hook.pauses or (isinstance(what, Pipeline) and any(part.pauses for part in what.ends)):
        raise ValueError(f"{what!r} holds accumulate(...): accumulate under model.no_sync() instead")
    if model._delay_all_reduce_params:
        raise ValueError("a module with delay_all_reduce_named_params keeps those parameters from its hook")
    same_hook(mesh, what)
    if mesh.size > 1 and mesh.rank == 0:
        parts = (what.hook, *what.ends) if isinstance(what, Pipeline) else (what,)
        warn_if_silent(what, parts, tuple(mesh.shape), mesh.size, stacklevel=2)
    run = DDPRun(model, hook, what if isinstance(what, Pipeline) else None, mesh)
    if run.pipeline_step is not None:
        if rates := run.pipeline_step.rates():
            same_rates(mesh, rates)
        guard(model, run)

    def fjoin_hook(state: DDPRun, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return state(bucket)

    fjoin_hook.__annotations__ = {}  # torch compares annotations with classes, but here they are strings
    model.register_comm_hook(run, fjoin_hook)
    model._comm_hooks = _Live(model._comm_hooks)
    keep_stepped(model, run.leaves if run.pipeline_step is not None else ())
    return Handle(run)


def register_comm_hook_type(
    comm_hook_type: DDPCommHookType | str,
    model: DistributedDataParallel,
    state: ProcessGroup | None = None,
    *,
    optimizer: Optimizer | None = None,
    over: Over = "world",
) -> Handle:
    """Register the equivalent of one of torch's communication hooks, chosen as by torch's register_ddp_comm_hook.

    It is `register(model, comm_hook(comm_hook_type))`, or with an optimizer `register(model, fuse(comm_hook(...), optimizer))`. For
    other settings than torch's defaults pass the hook itself to `register`, for example
    `quantization_perchannel_hook(bucket_size=128)`.

    Args:
        comm_hook_type: A member of torch's DDPCommHookType, its name, or torch's BuiltinCommHookType.
        model: The module.
        state: The module's own process group, or None: a hook has the ranks of its module.
        optimizer: Steps the module's parameters after the last bucket; there is no `optimizer.step()`.
        over: The divisor, see `tx.mean`: by default all ranks count alike, as in torch.

    Returns:
        A `Handle`.

    Raises:
        TypeError: no such type; `state` is no process group; as `register`.
        ValueError: `state` has other ranks than the module's group; as `register`.

    Same as: register_ddp_comm_hook; with an optimizer, _hook_then_optimizer around any of its hooks.
    """
    hook = comm_hook(comm_hook_type, over=over)
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"a communication hook is registered with a DistributedDataParallel, got a {type(model).__name__}"
        )
    if state is not None:
        if not isinstance(state, ProcessGroup):
            raise TypeError(
                f"state is the module's process group or None, got {state!r}; settings are arguments of the hook: "
                f"register(model, fjoin.ddp.comm_hook(...))"
            )
        of_state, of_model = (get_process_group_ranks(group) for group in (state, model.process_group))
        if of_state != of_model:
            raise ValueError(
                f"state is a process group of the ranks {of_state}, but the module's has {of_model}; give "
                f"DistributedDataParallel(process_group=...) the group"
            )
    return register(model, hook if optimizer is None else fuse(hook, optimizer))
