"""Pure hooks as objects that take part in a Join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook

from ..groups import Communicator, Mesh, mesh_or_world, mesh_over
from ..transforms.axes import bind_axes
from ..transforms.sync import JoinHook as PureHook


class PureJoinable(Joinable, JoinHook):
    """A state updated by pure functions, as an object for a Join; made by `as_joinable`.

    Attributes:
        state: The state that the hooks take and return; the loop's own code may set it too.
    """

    state: Any
    mesh: Communicator

    def __init__(self, hook: PureHook | Callable[..., PureHook], state: Any, mesh: Communicator) -> None:
        super().__init__()
        self._given, self.state, self.mesh = hook, state, mesh

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self._hook = self._given if isinstance(self._given, PureHook) else self._given(**kwargs)
        if not isinstance(self._hook, PureHook):
            raise TypeError(f"the hook must be a tx.JoinHook, got {self._hook!r}; write tx.JoinHook(main, post)")
        return self

    def main_hook(self) -> None:
        with bind_axes(self.mesh.axes):
            self.state = self._hook.main(self.state)

    def post_hook(self, is_last_joiner: bool) -> None:
        with bind_axes(self.mesh.axes):
            self.state = self._hook.post(self.state, is_last_joiner)

    @property
    def join_device(self) -> torch.device:
        return self.mesh.device

    @property
    def join_process_group(self) -> Any:
        return self.mesh.group


def as_joinable(
    hook: PureHook | Callable[..., PureHook], state: Any = None, *, mesh: Mesh | dist.ProcessGroup | None = None
) -> PureJoinable:
    """A pure join hook and its state as an object that `fjoin.Join` and torch's own Join accept.

    Args:
        hook: A `transforms.JoinHook`, or a function that makes one from the keyword arguments of the Join.
        state: The initial state, passed to its functions.
        mesh: The ranks that join, with the axes that the hook names. A process group becomes one axis "data".
            By default all ranks of the default group do, as with torch's own joinables.

    Returns:
        A joinable with the attribute `state`.

    >>> from fjoin import transforms as tx
    >>> counter = fjoin.as_joinable(tx.JoinHook(main=lambda n: n + tx.psum(0, "data")), 0)
    >>> with fjoin.Join([counter]):
    ...     for n in (1, 2):
    ...         _ = fjoin.Join.notify_join_context(counter)
    ...         with fjoin.bind(counter.mesh):
    ...             counter.state += tx.psum(n, "data")
    >>> counter.state
    tensor(3)
    """
    if not callable(hook) and not (callable(getattr(hook, "main", None)) and callable(getattr(hook, "post", None))):
        raise TypeError(f"as_joinable: hook must be a JoinHook, or a function that makes one, got {hook!r}")
    ranks = mesh_over(mesh) if isinstance(mesh, dist.ProcessGroup) else mesh_or_world("as_joinable", mesh)
    return PureJoinable(hook, state, ranks)
