"""Pure hooks as objects that take part in a Join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook

from ..groups import Communicator, Mesh, mesh_from_group, mesh_or_world
from ..transforms.axes import bind_axes
from ..transforms.sync import JoinHook as PureHook


class PureJoinable(Joinable):
    """A state updated by pure functions, as an object for a Join; made by `as_joinable`.

    Attributes:
        state: The state that the hooks take and return; the loop's own code may set it too.
    """

    state: Any
    mesh: Communicator

    def __init__(self, hook: PureHook | Callable[..., PureHook], state: Any, mesh: Communicator) -> None:
        super().__init__()
        self._hook, self.state, self.mesh = hook, state, mesh

    def join_hook(self, **kwargs: Any) -> JoinHook:
        hook = self._hook if isinstance(self._hook, PureHook) else self._hook(**kwargs)
        if not isinstance(hook, PureHook):
            raise TypeError(f"the hook must be a transforms.JoinHook, got {hook!r}; write tx.JoinHook(main, post)")
        return _OnState(self, hook)

    @property
    def join_device(self) -> torch.device:
        return self.mesh.device

    @property
    def join_process_group(self) -> Any:
        return self.mesh.group


class _OnState(JoinHook):
    def __init__(self, owner: PureJoinable, hook: PureHook) -> None:
        self._owner, self._hook = owner, hook

    def main_hook(self) -> None:
        with bind_axes(self._owner.mesh.axes):
            self._owner.state = self._hook.main(self._owner.state)

    def post_hook(self, is_last_joiner: bool) -> None:
        with bind_axes(self._owner.mesh.axes):
            self._owner.state = self._hook.post(self._owner.state, is_last_joiner)


def as_joinable(
    hook: PureHook | Callable[..., PureHook],
    state: Any = None,
    *,
    mesh: Mesh | dist.ProcessGroup | None = None,
) -> PureJoinable:
    """A pure join hook and its state as an object that `fjoin.Join` and torch's own Join accept.

    Args:
        hook: A `transforms.JoinHook`, or a function that makes one from the keyword arguments of the Join.
        state: The initial state, passed to its functions.
        mesh: The ranks that join, with the axes that the hook names. A process group becomes one axis "data".
            By default all ranks of the default group do, as with torch's own joinables.

    Returns:
        A joinable with the attribute `state`.

    Raises:
        TypeError: `hook` is neither a JoinHook nor a function.

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
    if not isinstance(hook, PureHook) and not callable(hook):
        raise TypeError(f"as_joinable takes a transforms.JoinHook or a function that makes one, got {hook!r}")
    if mesh is None or isinstance(mesh, Mesh):
        return PureJoinable(hook, state, mesh_or_world("as_joinable", mesh))
    return PureJoinable(hook, state, mesh_from_group(mesh))
