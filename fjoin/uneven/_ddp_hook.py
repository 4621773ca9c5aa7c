"""torch's DistributedDataParallel inside our Join.

On a rank without input it takes part in the module's messages with zeros. torch's hook discards the gradients that
these messages bring. This one keeps them, so that every optimizer takes the same step on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from .._errors import JoinError
from ..buckets import REGISTERED, gradients
from ..records import read_now

if TYPE_CHECKING:
    from ._join import Join


class DDPHook(JoinHook):
    """A DistributedDataParallel in a Join.

    Args:
        ddp: The module.
        join: Its Join.
        by_world: Whether to divide gradients by the number of all ranks; otherwise by the number of ranks with input.

    Raises:
        TypeError: the module's forward passes notify no Join.
    """

    def __init__(self, ddp: DistributedDataParallel, join: Join, by_world: bool) -> None:
        if ddp._use_python_reducer or ddp._delay_all_reduce_all_params:
            raise TypeError(
                "with optimize_ddp='python_reducer', or with all all-reduces delayed, forward passes notify no Join; use fjoin.join(loader)"
            )
        self.ddp, self._join = ddp, join
        self._by_world = by_world or ddp in REGISTERED  # a registered hook divides by itself
        ignored = ddp.parameters_to_ignore
        self.params = [p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]
        self._handles: list[Any] = []
        self._in_window = False  # whether the parameters hold gradients of no_sync passes
        self._scaled = True  # whether the gradients of earlier passes have been scaled, in this pass
        self._waits = False  # whether a forward pass has had no backward pass yet
        self._syncs_next = True  # the module's own flag, which an evaluation changes
        self._kept: list[Tensor | None] = []

    def enter(self) -> None:
        self._waits = False
        vars(self.ddp)["_sync_buffers"] = self._sync_buffers  # in the place of the method of its class
        self._handles = [self.ddp.register_forward_hook(self._after_forward, with_kwargs=True)]
        if not self._by_world:
            self._handles += [p.register_hook(self._scale) for p in self.params]

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        vars(self.ddp).pop("_sync_buffers", None)

    # -- on a rank with input ------------------------------------------------------------------

    def before_forward(self) -> bool:
        """Whether a forward pass takes part in an iteration; called where torch's module would notify its own Join."""
        ddp = self.ddp
        if not torch.is_grad_enabled():  # other ranks need not take part in an evaluation
            self._syncs_next = ddp.require_forward_param_sync
            return False
        if self._waits and ddp.require_backward_grad_sync:
            raise JoinError(
                f"this {type(ddp.module).__name__} begins a second forward pass before the backward pass of the first one, but ranks "
                f"without input take part in one backward pass for each; evaluate under torch.no_grad(); where several passes have one "
                f"backward pass, loop over fjoin.join(loader) with the loss times loop.scale"
            )
        self._scaled, self._in_window = False, self._in_window or not ddp.require_backward_grad_sync
        return True

    def _after_forward(self, module: Any, args: Any, kwargs: Any, out: Any) -> None:
        if not torch.is_grad_enabled():
            module.require_forward_param_sync = self._syncs_next
            return
        for _, run in module._comm_hooks:
            if hasattr(run, "saw"):
                run.saw([*args, *kwargs.values()])
        if module.require_backward_grad_sync:
            self._in_window = self._in_window and not self._by_world
            for x in _find_tensors(out):
                if x.requires_grad:
                    self._waits = True
                    x.register_hook(lambda grad: setattr(self, "_waits", False))

    def _sync_buffers(self) -> None:
        """Replaces torch's method, which takes the buffers from rank 0, or sends a message to find a rank."""
        ddp = self.ddp
        if not (torch.is_grad_enabled() or self._join.shadowing):
            return  # an evaluation
        with torch.no_grad():
            ddp._assign_modules_buffers()
            with torch.autograd._unsafe_preserve_version_counter(tuple(ddp.modules_buffers)):  # type: ignore[attr-defined]
                ddp._sync_module_buffers(min(self._join.live()))

    def _factor(self) -> float:
        """Ranks / ranks with input, since the module or its hook divides by all ranks."""
        return 1.0 if self._by_world else self.ddp.process_group.size() / len(self._join.live())

    def _scale(self, grad: Tensor) -> Tensor | None:
        if not self.ddp.require_backward_grad_sync:
            return None
        factor = self._factor()
        if not self._scaled:  # the gradients of earlier passes are sent along
            for p in self.params:
                if p.grad is not None and factor != 1.0:
                    p.grad.mul_(factor)
            self._in_window, self._scaled = False, True
        return grad * factor

    # -- on a rank without input -----------------------------------------------------------------

    def main_hook(self) -> None:
        """Take part in one iteration: with zeros, or with the gradients of an open accumulation window."""
        ddp, reducer, syncs = self.ddp, self.ddp.reducer, bool(self._join.syncing())
        if ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
            raise JoinError(
                "with static_graph=True every rank must have at least one batch: this one has never run the graph that it shadows"
            )
        reducer._rebuild_buckets()
        for due in (ddp._check_sync_bufs_pre_fwd(), ddp._check_sync_bufs_post_fwd()):
            if due:
                self._sync_buffers()
        ddp.require_forward_param_sync = syncs
        if not syncs:
            return
        if self._in_window:
            for _, run in ddp._comm_hooks:
                if hasattr(run, "brings_window"):  # it counts this rank as one with input
                    run.brings_window()
        works = []
        for bucket in reducer._get_zeros_like_grad_buckets():
            if self._in_window:
                self._fill(bucket)
            into = bucket.buffer(), bucket.parameters(), gradients(bucket)  # a hook may put another buffer there
            works.append((*into, reducer._run_comm_hook(bucket)))
        self._kept = [None if self._in_window else p.grad for p in self.params]
        self._in_window = False
        for buffer, params, grads, work in works:
            value = work.wait()
            buffer.copy_(value if isinstance(value, Tensor) else value[0])
            for p, g in zip(params, grads, strict=True):
                p.grad = g
        for i in self._unused():
            self.params[i].grad = None
        reducer._push_all_rebuilt_params()

    def _unused(self) -> Sequence[int]:
        """The parameters that no rank has used, which have no gradient on ranks with input either."""
        if self.ddp.static_graph or not self.ddp.find_unused_parameters:
            return ()
        used = self.ddp.reducer._get_local_used_map().zero_()  # this rank's own last pass no longer counts
        self.ddp.process_group.allreduce([used]).wait()
        counts = read_now(self._join.mesh, used)
        used.zero_()
        return [i for i, count in enumerate(counts) if not count]

    def _fill(self, bucket: Any) -> None:
        # Without a hook the reducer divides while it fills a bucket; hooks divide by themselves.
        hooked = self.ddp._comm_hooks or self.ddp._get_ddp_logging_data().get("comm_hook")
        factor = self._factor() / (1 if hooked else self.ddp.process_group.size())
        for p, g in zip(bucket.parameters(), gradients(bucket), strict=True):
            if p.grad is not None:
                g.copy_(p.grad).mul_(factor)

    def after_main(self) -> None:
        """Restore the parameters' own gradients; called after all hooks of the iteration."""
        for p, grad in zip(self.params, self._kept, strict=False):
            p.grad = grad
        self._kept = []

    def post_hook(self, is_last_joiner: bool) -> None:
        ddp = self.ddp
        _sync_module_states(
            module=ddp.module,
            process_group=ddp.process_group,
            broadcast_bucket_size=ddp.broadcast_bucket_size,
            src=self._join.last_joiner,  # type: ignore[arg-type]
            # A pipeline has stepped its own parameters on this rank too.
            params_and_buffers_to_ignore={*ddp.parameters_to_ignore, *REGISTERED.get(ddp, ())},
            broadcast_buffers=ddp.forward_sync_buffers,
        )
