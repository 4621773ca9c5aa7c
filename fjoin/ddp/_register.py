"""`register` and `Handle`."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from ..buckets import REGISTERED
from ..groups import Mesh, check_mesh, linked_mesh
from ..records import compare
from ..step import ModuleHandle, guard_steps
from ..transforms.base import Over, Transform, shares
from ..transforms.optimizers import Optimizer, frozen
from ..transforms.pipelines import Pipeline, axes_of, fuse, warn_if_silent
from ._comm_hooks import comm_hook
from ._ddp_run import DDPRun


def keep_stepped(model: DistributedDataParallel, paths: Iterable[str]) -> None:
    """Note that a hook steps these parameters of a module, so that the end of a Join leaves them as they are."""
    REGISTERED[model] = frozenset(paths)
    vars(model)["join_hook"] = _JoinHookOf(model)


class _JoinHookOf:
    """`join_hook` of a registered module: at the end of a Join, parameters that a pipeline steps stay as they are.

    In a pickled or deep copy of the module, which has no hook, it is the method of the class.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)

    def __call__(self, **kwargs: Any) -> JoinHook:
        model = self._model()
        assert model is not None
        return _KeepsParameters(model, type(model).join_hook(model, **kwargs))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._model(), "join_hook")  # the copy's own, since its attributes are not set yet


class _KeepsParameters(JoinHook):
    def __init__(self, model: DistributedDataParallel, hook: JoinHook) -> None:
        self._model, self._hook = model, hook

    def main_hook(self) -> None:
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        model, before = self._model, self._model.parameters_to_ignore
        model.parameters_to_ignore = {*before, *REGISTERED[model]}
        try:
            self._hook.post_hook(is_last_joiner)
        finally:
            model.parameters_to_ignore = before


def guard(model: DistributedDataParallel, run: DDPRun) -> None:
    """Guard the parameters that a registered pipeline steps.

    Gradients that a step has used are dropped when the next forward pass begins, so that a loop without zero_grad does
    not add to them. An optimizer that steps the same parameters again is warned of.
    """
    assert run.pipeline is not None
    at, still = run.pipeline.optimizer.at, frozen()
    stepped = {path: p for path, p in run.leaves.items() if at(path) != still}
    by = "a pipeline registered by fjoin.ddp.register has stepped in the backward pass already; remove optimizer.step()"
    guard_steps(stepped, f"{by}, or register only the hook")
    model.register_forward_pre_hook(_DropSpent(run, list(stepped.values())))
    model.module.register_forward_hook(_WarnAlone(run, model.module))


class _DropSpent:
    """Before a forward pass: drops the gradients that the last step has used.

    In a copy of the module it does nothing.
    """

    def __init__(self, run: DDPRun, params: list[Tensor]) -> None:
        self._run, self._params, self._used = weakref.ref(run), params, run.body.step

    def __call__(self, module: Any, args: Any) -> None:
        run = self._run()
        if run is None or run.body.step == self._used or not torch.is_grad_enabled():
            return
        self._used = run.body.step
        for p in self._params:
            p.grad = None

    def __reduce__(self) -> Any:
        return _nothing_to_drop, ()


class _WarnAlone:
    """After a forward pass of the module inside, without the DistributedDataParallel around it: its backward pass
    warns.
    """

    def __init__(self, run: DDPRun, module: torch.nn.Module) -> None:
        self._run, self._module = weakref.ref(run), weakref.ref(module)

    def __call__(self, module: Any, args: Any, out: Any) -> None:
        run, inside = self._run(), DistributedDataParallel._active_ddp_module is not None
        if run is not None and run.body.step and not inside and module is self._module():  # not a copy, of `functional`
            for x in _find_tensors(out):
                if x.requires_grad:
                    x.register_hook(_warn_alone)

    def __reduce__(self) -> Any:
        return _nothing_to_drop, ()


def _warn_alone(grad: Tensor) -> None:
    warnings.warn(
        "a backward pass of the module inside a registered DistributedDataParallel, which was called without it, sends nothing "
        "and takes no step; call ddp(x) to train",
        stacklevel=2,
    )


def _nothing_to_drop() -> Any:
    return _nothing


def _nothing(module: Any, args: Any, out: Any = None) -> None:
    """The hook of a copy, in which nothing is registered."""


class Handle(ModuleHandle):
    """A registered hook; made by `fjoin.ddp.register`.

    Attributes:
        step: The number of synchronised backward passes so far.
        skipped: The number of steps left out by `skip_if_nonfinite` or `dynamic_loss_scale`.
        total: The sum of the ranks' weights in the last synchronised pass; see `ModuleHandle`.
    """

    run: DDPRun

    def weight(self, weight: float) -> None:
        """Set this rank's weight in the mean for the next synchronised backward pass; 1 if it is not set.

        It is a number of the host: for a tensor on a device the host waits.

        Raises:
            ValueError: a weight that is neither 0 nor from 1e-30 to 1e30.
            TypeError: no number.
        """
        run = self.run
        run.pending = shares.host_weight("weight", weight)
        if run.unweighed and not run.weighed:
            warnings.warn(
                "handle.weight is called for the first time after a backward pass, which has counted with weight 1; call it before each "
                "backward pass: a weight is that of the next one",
                stacklevel=2,
            )
        run.weighed = True

    @property
    def step(self) -> int:
        return self.run.body.step

    def scale(self, loss: Tensor, weight: float | None = None) -> Tensor:
        """The loss times this rank's weight, and times its scale for a pipeline in `dynamic_loss_scale`, to call
        backward on.

        A model that communicates in its forward pass, as `sync_batch_norm` does, mixes the ranks' losses in its
        backward pass. There the loss must carry the weight: call this in the place of `handle.weight`, on all ranks. In
        a window under no_sync call it for each loss, with the weight of its batch. It counts where backward is called;
        two losses of one batch are added before.

        Args:
            loss: The mean over the local batch, 0-d; finite even where the weight is 0.
            weight: This rank's weight, as for `handle.weight`. None: the loss carries none.

        Returns:
            0-d, in the dtype of the loss.

        Raises:
            TypeError: no weight, and the pipeline scales no losses; the weight is no number.
            ValueError: a weight that is neither 0 nor from 1e-30 to 1e30, or that a 16-bit loss would round; raised by
                backward: `handle.weight` has been called for the same pass.
        """
        run = self.run
        if weight is not None:
            weight = shares.host_weight("weight", weight)
            shares.check_exact(loss, counted := run.plan.counted(weight, run.body.step))
            loss = loss * counted
            if loss.requires_grad:
                loss.register_hook(lambda grad: run.carry(weight))
        elif run.scaling is None:
            raise TypeError(
                "only dynamic_loss_scale scales losses; call loss.backward(), or handle.scale(loss, weight)"
            )
        return loss if run.scaling is None else run.scaling(loss, run.body.outer.scale)

    def state_dict(self) -> dict[str, Any]:
        """The state of the hook and of the optimizer: tensors and numbers, by parameter path, never by bucket."""
        return self.run.dict_of(self.pipeline, **self.run.numbers)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state made by `state_dict`, for the same pipeline and parameters. All ranks must load the same step.

        Between averages each rank has weights and a state of its own. Its weights are loaded after the module is made,
        since DistributedDataParallel(...) sends rank 0's to all ranks:

            model = DistributedDataParallel(inner)
            inner.load_state_dict(own_weights)
            handle = register(model, pipeline)
            handle.load_state_dict(own_state)

        Raises:
            ValueError: the state of another pipeline, or of other parameters.
            DesyncError: in the next backward pass, on all ranks: they have loaded different steps, or a rank has other
                weights than those with which its state was saved.
        """
        if (expected := self.state_dict().keys()) != state_dict.keys():
            raise ValueError(
                f"expected the keys {sorted(expected)}, got {sorted(state_dict)}; a pipeline and a hook alone have other states"
            )
        self.run.load_state_dict(state_dict)


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
    - With a pipeline the next forward pass drops the gradients that the step has used, so `zero_grad()` may stay or go.
      With a hook alone it is needed, since DistributedDataParallel adds new gradients to the existing ones.

    Under `no_sync` nothing is sent or stepped; the accumulated gradients go with the next pass, whose weight is that of
    the whole window.

    The step is taken before backward returns. A second backward pass through the same graph, or a gradient of an input,
    that needs the old parameters no longer finds them, and torch raises an error.

    A mean over weights takes the weight set by `handle.weight(w)` before backward, a number of the host: for a tensor
    on a device the host waits. This adds one small message, with the first bucket, which `handle.explain()` shows. A
    mean with `over="world"`, torch's, is of all ranks alike: where the ranks have no hyperparameters to compare either,
    the gradients are the only messages, and the ranks are not asked whether they run the same pass. In a Join, torch's
    or ours, a rank without input counts 0; so with a pipeline all ranks take every step, and at the end each keeps its
    parameters, where torch sends those of the last rank to all. Divisors of the Join have no effect: the hook divides.

    Where all ranks of a gloo group are on one host, these messages are in shared memory, as in a mesh of `fjoin.mesh`;
    with FJOIN_TRANSPORT=gloo they use the group.

    The module can be pickled and copied, by torch.save or copy.deepcopy; the copy has no hook and can be registered
    again. The state of the hook is in `handle.state_dict()`.

    With a pipeline, parameters that no rank uses, where find_unused_parameters or static_graph allow that, are left
    unchanged, as by torch.optim. This adds one small message to each step.

    Args:
        model: The module; it takes only one hook.
        what: A `Transform` or a `Pipeline`.
        mesh: The ranks, where the hook has several axes; by default those of the module's group, as the hook's one
            axis.

    Returns:
        A `Handle`.

    Warns:
        UserWarning: on rank 0 of several: nothing in `what` reduces, and no `identity` marks this as intended.

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
    ranks = check_mesh("register", mesh)
    if ranks.size != model.process_group.size():
        raise ValueError(f"the mesh has {ranks.size} ranks, but the module's group {model.process_group.size()}")
    if hook.facts.pauses or (isinstance(what, Pipeline) and any(part.facts.pauses for part in what.ends)):
        raise ValueError(f"{what!r} holds accumulate(...): accumulate under model.no_sync() instead")
    if model._delay_all_reduce_params:
        raise ValueError("a module with delay_all_reduce_named_params keeps those parameters from its hook")
    remedy = "Register the same on all ranks"
    compare(ranks, "fjoin.ddp.register", {"hook": what.spec.canonical()}, remedy, shown={"hook": repr(what)})
    if ranks.size > 1 and ranks.rank == 0:
        warn_if_silent(what, tuple(ranks.shape), ranks.size, stacklevel=2)
    run = DDPRun(model, hook, what if isinstance(what, Pipeline) else None, ranks)
    if run.pipeline is not None:
        if rates := run.params.check_rates():
            remedy = "A schedule must not depend on the rank"
            compare(ranks, "fjoin.ddp.register", {"hyperparameters": dict(rates)}, remedy)
        guard(model, run)

    def fjoin_hook(state: DDPRun, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return state(bucket)

    fjoin_hook.__annotations__ = {}  # torch compares annotations with classes, but here they are strings
    model.register_comm_hook(run, fjoin_hook)
    model._comm_hooks = _Live(model._comm_hooks)
    keep_stepped(model, run.leaves if run.pipeline is not None else ())
    return Handle(run)


def register_ddp_comm_hook(
    comm_hook_type: DDPCommHookType | str,
    model: DistributedDataParallel,
    state: ProcessGroup | None = None,
    *,
    optimizer: Optimizer | None = None,
    over: Over = "world",
) -> Handle:
    """Register the equivalent of one of torch's communication hooks, by its name.

    It is `register(model, comm_hook(comm_hook_type))`, or with an optimizer `register(model, fuse(comm_hook(...),
    optimizer))`. For other settings than torch's defaults pass the hook itself to `register`, for example
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

    Same as: torch.distributed.algorithms.ddp_comm_hooks.register_ddp_comm_hook; with an optimizer, _hook_then_optimizer
        around any of its hooks.
    """
    hook = comm_hook(comm_hook_type, over=over)
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"register takes a DistributedDataParallel, got a {type(model).__name__}")
    if state is not None:
        if not isinstance(state, ProcessGroup):
            raise TypeError(
                f"state is the module's process group or None, got {state!r}; settings are arguments of the hook: "
                f"register(model, fjoin.ddp.comm_hook(...))"
            )
        of_state, of_model = (get_process_group_ranks(group) for group in (state, model.process_group))
        if of_state != of_model:
            raise ValueError(
                f"state is a group of the ranks {of_state}, the module's has {of_model}; give DistributedDataParallel process_group="
            )
    return register(model, hook if optimizer is None else fuse(hook, optimizer))
