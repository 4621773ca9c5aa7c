"""An axis over a torch.distributed process group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from ._errors import JoinError

_REDUCE = {"psum": dist.ReduceOp.SUM, "pmax": dist.ReduceOp.MAX, "pmin": dist.ReduceOp.MIN}


class Work(Protocol):
    def wait(self) -> Any: ...


class Done:
    """The work of a collective that has run already."""

    def wait(self) -> None:
        return None


class _Swapped:
    """A sum of two ranks in which each has sent its buffer to the other."""

    def __init__(self, work: Work, buffer: Tensor, received: Tensor) -> None:
        self._work, self._buffer, self._received = work, buffer, received

    def wait(self) -> None:
        self._work.wait()
        self._buffer.add_(self._received)  # a + b = b + a, to the bit: both ranks have the same


class Once:
    """A message that is waited for once, and then let go of: a handle in a traceback would keep a broken connection open."""

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work

    def wait(self) -> None:
        work, self._work = self._work, None
        try:
            if work is not None:
                work.wait()
        finally:
            del work


# Up to this size two gloo ranks swap buffers and add: one hop in the place of all_reduce's several, the
# same bytes, 3 to 4 times faster at 40 to 320 kB (docs/design.md has the script). From about 1 MB on it
# gains nothing.
_SWAP_BYTES = 512 * 1024


class GroupAxis:
    """What a real rank binds to one axis name.

    Args:
        group: The process group.
        ordered: Sum in rank order, bit for bit as the lockstep simulator does: for tests, since it
            gathers every rank's value to do so.
    """

    token: Tensor | None = None

    def __init__(
        self,
        group: dist.ProcessGroup,
        ordered: bool = False,
        joint: Callable[[tuple[str, ...]], GroupAxis | None] = lambda axes: None,
    ) -> None:
        self.group: Any = group
        self.size, self.rank = group.size(), group.rank()
        self.ordered, self.joint = ordered, joint
        self.broken = False  # a collective has failed
        self._swaps = self.size == 2 and "gloo" in dist.get_backend_config(group)

    def index(self) -> Tensor:
        return torch.tensor(self.rank)

    def _open(self) -> Any:
        if self.group is None:  # to torch that would mean all ranks
            raise JoinError("this mesh was taken down after a failure; make another one with fjoin.mesh(...)")
        return self.group

    def reduce_(self, buffer: Tensor) -> Work:
        """Start summing a contiguous buffer in place."""
        group = self._open()
        if self.ordered:
            buffer.copy_(self.run("psum", buffer, None))
            return Done()
        if self._swaps and buffer.device.type == "cpu" and buffer.numel() * buffer.element_size() <= _SWAP_BYTES:
            received = torch.empty_like(buffer)
            sizes = [0, buffer.numel()] if self.rank == 0 else [buffer.numel(), 0]
            work = dist.all_to_all_single(received, buffer, sizes, sizes, group=group, async_op=True)
            return _Swapped(work, buffer, received)
        return dist.all_reduce(buffer, group=group, async_op=True)  # type: ignore[no-any-return]

    def run_(self, x: Tensor) -> Tensor:
        """psum in place."""
        self.reduce_(x).wait()
        return x

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return self._traced(op, x.contiguous(), arg)
        return self.begin(op, x, arg)()

    def _after(self, work: Work, out: Tensor) -> Callable[[], Tensor]:
        """Wait for a message, then give what it has brought."""
        once = Once(work)

        def wait() -> Tensor:
            try:
                once.wait()
            except BaseException:
                self.broken = True
                raise
            return out

        return wait

    def begin(self, op: str, x: Tensor, arg: Any) -> Callable[[], Tensor]:
        """Start a collective; what is returned waits for it and gives the result."""
        n, group = self.size, self._open()
        x = x.contiguous()
        if self.ordered and op in ("psum", "psum_scatter"):
            parts = self.begin("all_gather" if op == "psum" else "all_to_all", x, None)
            return lambda: functools.reduce(torch.add, parts().unbind(0)).clone()
        if op == "psum":
            out = x.clone()
            return self._after(self.reduce_(out), out)
        if op in _REDUCE:
            out = x.clone()
            return self._after(dist.all_reduce(out, _REDUCE[op], group=group, async_op=True), out)
        if op == "pbroadcast":
            out = x.clone()
            return self._after(dist.broadcast(out, group=group, group_src=arg, async_op=True), out)
        if op == "all_gather":
            out = x.new_empty((n, *x.shape))
            return self._after(dist.all_gather(list(out.unbind(0)), x, group=group, async_op=True), out)
        if op == "psum_scatter":
            if x.device.type == "cpu":  # whose reduce_scatter takes twice its all_reduce
                parts = self.begin("all_to_all", x, None)
                return lambda: parts().sum(0, dtype=x.dtype)
            out = x.new_empty(x.shape[1:])
            return self._after(dist.reduce_scatter_tensor(out, x, group=group, async_op=True), out)
        if op == "all_to_all":
            out = torch.empty_like(x)
            return self._after(dist.all_to_all_single(out, x, group=group, async_op=True), out)
        if op == "all_to_all_single":
            give, take = arg
            out = x.new_empty((sum(take), *x.shape[1:]))
            work = dist.all_to_all_single(out, x, list(take), list(give), group=group, async_op=True)
            return self._after(work, out)
        send = dict(arg).get(self.rank)
        receive = {target: source for source, target in arg}.get(self.rank)
        flat = x.reshape(-1)
        out = torch.zeros_like(flat)
        to_get, to_give = ([flat.numel() if r == peer else 0 for r in range(n)] for peer in (receive, send))
        given, got = flat if send is not None else flat[:0], out if receive is not None else out[:0]
        work = dist.all_to_all_single(got, given, to_get, to_give, group=group, async_op=True)
        return self._after(work, out.view(x.shape))

    def _traced(self, op: str, x: Tensor, arg: Any) -> Tensor:
        """The same in operations that torch.compile traces."""
        _refuse_traced_vmap(op, x)
        n, group = self.size, self._open()
        if op in _REDUCE:
            return functional.wait_tensor(functional.all_reduce(x, op.removeprefix("p"), group))
        if op == "pbroadcast":
            return functional.wait_tensor(functional.broadcast(x, arg, group))
        if op == "all_gather":
            return functional.wait_tensor(functional.all_gather_tensor(x.unsqueeze(0), 0, group))
        if op == "psum_scatter":
            return functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", 0, group)).squeeze(0)
        if op == "all_to_all":
            return functional.wait_tensor(functional.all_to_all_single(x, None, None, group))
        if op == "all_to_all_single":
            give, take = arg
            return functional.wait_tensor(functional.all_to_all_single(x, list(take), list(give), group))
        send = dict(arg).get(self.rank)
        receive = {target: source for source, target in arg}.get(self.rank)
        flat = x.reshape(-1)
        inputs = [flat.numel() if r == send else 0 for r in range(n)]
        outputs = [flat.numel() if r == receive else 0 for r in range(n)]
        out = functional.all_to_all_single(flat if send is not None else flat[:0], outputs, inputs, group)
        out = functional.wait_tensor(out)
        return out.view(x.shape) if receive is not None else torch.zeros_like(x) + out.sum()


def _refuse_traced_vmap(op: str, x: Tensor) -> None:
    """Raise where torch.compile traces a vmap around a collective.

    Dynamo drops the vmap rule of an autograd.Function, and torch's functional collectives have none:
    the result would be an unreduced or partly reduced tensor, without a word. What is wrapped twice
    cannot be looked into while tracing, so that a derivative of a derivative is refused as well.
    """
    if torch._C._functorch.is_batchedtensor(x) or _transform_level() > 1:
        raise RuntimeError(
            f"{op} inside torch.func.vmap, or inside nested torch.func transforms, inside torch.compile: the compiler "
            f"would drop the batching rule and return wrong sums. Call {op} outside the vmap (it takes batched tensors "
            f"as they are), or do not compile this part."
        )


def _transform_level() -> int:
    """How many torch.func transforms are active, in calls that Dynamo traces."""
    if not torch._C._are_functorch_transforms_active():
        return 0
    return retrieve_current_functorch_interpreter().level()
