"""torch's DistributedDataParallel inside our Join.

torch's hooks discard the gradients that a rank without input receives. These hooks keep them, so that
the optimizer takes the same step on all ranks.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from .._errors import JoinError
from ..agreement import read_now
from ..ddp._buckets import gradients
from ..ddp._hook import REGISTERED, DDPRun
from ..groups import Communicator


class Iteration(Protocol):
    """The part of a `Join` that its hooks use."""

    last_joiner: int | None
    mesh: Communicator

    def notify(self, syncs: bool) -> None: ...

    def use(self, one: Any) -> None: ...

    def live(self) -> tuple[int, ...]: ...

    def syncing(self) -> tuple[int, ...]: ...


# For a module with static_graph, the parameters that no rank uses: found in its first step, and constant from then on.
_UNUSED: weakref.WeakKeyDictionary[DistributedDataParallel, list[int]] = weakref.WeakKeyDictionary()


class DDPHook(JoinHook):
    """A DistributedDataParallel in a Join.

    Args:
        ddp: The module.
        join: Its Join.
        notifies: Whether its forward passes begin the iterations.
        by_world: Whether to divide gradients by the number of all ranks; otherwise by the number of ranks with input.
    """

    def __init__(self, ddp: DistributedDataParallel, join: Iteration, notifies: bool, by_world: bool) -> None:
        self.ddp, self._join, self._notifies = ddp, join, notifies
        self._by_world = by_world or ddp in REGISTERED  # a registered hook divides by itself
        ignored = ddp.parameters_to_ignore
        self.params = [p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]
        self._handles: list[Any] = []
        self._in_window = False  # whether the parameters hold gradients of no_sync passes
        self._scaled = True  # whether the gradients of earlier passes have been scaled, in this pass
        self._waits = False  # whether a forward pass has had no backward pass yet
        self._kept_flag: bool | None = None
        # The Join's setting under torch's name, where other code reads it.
        self._settings, self._settings_before = {"_divide_by_initial_world_size": by_world}, dict[str, Any]()
        self._kept: list[Tensor | None] = []

    def enter(self) -> None:
        ddp, self._waits = self.ddp, False
        if ddp.logger is not None:  # sets join_uneven_inputs in DDP's log
            ddp.logger._set_uneven_input_join()
        self._settings_before = {name: vars(ddp)[name] for name in self._settings if name in vars(ddp)}
        vars(ddp).update(self._settings)
        ddp._sync_buffers = self._sync_buffers  # type: ignore[method-assign]
        self._handles = [ddp.register_forward_hook(self._after_forward)]
        if not self._by_world:
            self._handles += [p.register_hook(self._scale) for p in self.params]

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for name in ("_sync_buffers", *self._settings):
            vars(self.ddp).pop(name, None)
        vars(self.ddp).update(self._settings_before)

    # -- on a rank with input ------------------------------------------------------------------

    def before_forward(self) -> None:
        """Begin an iteration; called where torch's module would notify its own Join."""
        ddp = self.ddp
        if not torch.is_grad_enabled():  # other ranks need not take part in an evaluation
            self._kept_flag, ddp.require_forward_param_sync = ddp.require_forward_param_sync, False
            return
        syncs, self._scaled = ddp.require_backward_grad_sync, False
        if self._waits and syncs:
            raise JoinError(
                f"this {type(ddp.module).__name__} begins a second forward pass before the backward pass of the first one, but ranks "
                f"without input take part in one backward pass for each; evaluate under torch.no_grad(); where several passes have one "
                f"backward pass, loop over fjoin.join(loader) with the loss times loop.scale"
            )
        if self._notifies:
            self._join.notify(syncs)
        self._join.use(ddp)
        if not syncs:
            others = self._join.syncing()
            if others:
                raise JoinError(
                    f"this rank is inside no_sync in an iteration in which rank {others[0]} synchronises gradients; all ranks "
                    f"with input must accumulate in the same iterations",
                    rank=others[0],
                )
            self._in_window = True

    def _after_forward(self, module: Any, args: Any, out: Any) -> None:
        if self._kept_flag is not None:
            module.require_forward_param_sync, self._kept_flag = self._kept_flag, None
        elif torch.is_grad_enabled() and module.require_backward_grad_sync:
            if self._by_world:
                self._in_window = False
            for x in _find_tensors(out):
                if x.requires_grad:
                    self._waits = True
                    x.register_hook(self._begins_backward)

    def _begins_backward(self, grad: Tensor) -> None:
        self._waits = False

    def saw_step(self, optimizer: Any) -> None:
        """Record the parameters without a gradient in a static graph's first step; called on a rank with input."""
        if self.ddp.static_graph and self.ddp not in _UNUSED and any(p.grad is not None for p in self.params):
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if any(id(p) in stepped for p in self.params):
                _UNUSED[self.ddp] = [i for i, p in enumerate(self.params) if p.grad is None]

    def _sync_buffers(self) -> None:
        """Replaces torch's method, which takes the buffers from rank 0, or sends a message to find a rank."""
        ddp = self.ddp
        with torch.no_grad():
            ddp._assign_modules_buffers()
            with torch.autograd._unsafe_preserve_version_counter(tuple(ddp.modules_buffers)):  # type: ignore[attr-defined]
                ddp._sync_module_buffers(min(self._join.live()))

    def _scale(self, grad: Tensor) -> Tensor | None:
        """Scale by ranks / ranks with input, before any hook: the module or its hook divides by all ranks."""
        if not self.ddp.require_backward_grad_sync:
            return None
        factor = self.ddp.process_group.size() / len(self._join.live())
        if not self._scaled:  # the gradients of earlier passes are sent along
            for p in self.params:
                if p.grad is not None and factor != 1.0:
                    p.grad.mul_(factor)
            self._in_window, self._scaled = False, True
        return grad * factor

    # -- on a rank without input -----------------------------------------------------------------

    def main_hook(self) -> None:
        """Take part in one iteration: with zeros, or with the gradients of an open accumulation window."""
        ddp, live, syncs = self.ddp, self._join.live(), bool(self._join.syncing())
        if ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
            raise JoinError(
                "with static_graph=True every rank must have at least one batch: this one has never run the graph that it shadows"
            )
        reducer = ddp.reducer
        reducer._rebuild_buckets()
        for due in (ddp._check_sync_bufs_pre_fwd(), ddp._check_sync_bufs_post_fwd()):
            if due:
                ddp._assign_modules_buffers()
                ddp._sync_module_buffers(min(live))
        ddp.require_forward_param_sync = syncs
        if not syncs:
            return
        works, hooks = [], ddp._comm_hooks
        if self._in_window:
            for _, run in hooks:
                if isinstance(run, DDPRun):
                    run.brings_window()
        for bucket in reducer._get_zeros_like_grad_buckets():
            if self._in_window:
                self._fill(bucket, 1.0 if self._by_world else ddp.process_group.size() / len(live), hooks)
            into = bucket.buffer(), bucket.parameters(), gradients(bucket)  # a hook may put another buffer there
            works.append((*into, reducer._run_comm_hook(bucket)))
        self._kept = [None if self._in_window else p.grad for p in self.params]
        self._in_window = False
        for buffer, params, grads, work in works:
            value = work.wait()
            buffer.copy_(value if isinstance(value, Tensor) else value[0])
            for p, g in zip(params, grads, strict=True):
                p.grad = g
        if ddp.find_unused_parameters and not ddp.static_graph:
            self._leave_out_unused()
        for i in _UNUSED.get(ddp, ()):
            self.params[i].grad = None
        reducer._push_all_rebuilt_params()

    def _leave_out_unused(self) -> None:
        """Remove the gradients of parameters that no rank has used, as on ranks with input."""
        used = self.ddp.reducer._get_local_used_map().zero_()  # this rank's own last pass no longer counts
        self.ddp.process_group.allreduce([used]).wait()
        for p, count in zip(self.params, read_now(self._join.mesh, used), strict=True):
            if not count:
                p.grad = None
        used.zero_()

    def _fill(self, bucket: Any, factor: float, hooks: Any) -> None:
        ddp = self.ddp
        # Without a hook the reducer divides while it fills a bucket; hooks divide by themselves.
        hooked = hooks or ddp._get_ddp_logging_data().get("comm_hook")
        for p, g in zip(bucket.parameters(), gradients(bucket), strict=True):
            if p.grad is not None:
                g.copy_(p.grad).mul_(factor if hooked else factor / ddp.process_group.size())

    def after_main(self) -> None:
        """Restore the parameters' own gradients; called after all hooks of the iteration."""
        for p, grad in zip(self.params, self._kept, strict=False):
            p.grad = grad
        self._kept = []

    def post_hook(self, is_last_joiner: bool) -> None:
        ddp = self.ddp
        assert self._join.last_joiner is not None
        # Older versions of torch have the same by another name.
        syncs = ddp.forward_sync_buffers if hasattr(ddp, "forward_sync_buffers") else ddp.broadcast_buffers
        kept = {*ddp.parameters_to_ignore, *REGISTERED.get(ddp, ())}  # a pipeline has stepped its own on this rank too
        _sync_module_states(
            module=ddp.module,
            process_group=ddp.process_group,
            broadcast_bucket_size=ddp.broadcast_bucket_size,
            src=self._join.last_joiner,
            params_and_buffers_to_ignore=kept,
            broadcast_buffers=syncs,
        )

    def release(self) -> None:
        """Release the process group, so that its connections close; the module cannot be used after that."""
        self.leave()
        for name in ("reducer", "logger", "process_group"):
            self.ddp.__dict__[name] = None


def check_notifies(ddp: DistributedDataParallel) -> None:
    """Raise TypeError for a module whose forward passes do not notify a Join, neither ours nor torch's."""
    if ddp._use_python_reducer or ddp._delay_all_reduce_all_params:
        kind = "with optimize_ddp='python_reducer'" if ddp._use_python_reducer else "that delays all its all-reduces"
        raise TypeError(
            f"a DistributedDataParallel {kind} cannot be in a Join: its forward passes notify none; use fjoin.join(loader), which "
            f"runs the loop's body on all ranks"
        )
