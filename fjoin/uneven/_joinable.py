"""Participants of a Join: torch's two classes, and pure hooks as objects."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.algorithms.join as torch_join

from ..groups import Mesh, mesh_from_group, world_mesh
from ..transforms.axes import bind_axes
from ..transforms.sync import JoinHook as PureHook


class JoinHook(torch_join.JoinHook):
    """The work of a joinable on a rank that is out of input; override either method.

    Same as: torch.distributed.algorithms.join.JoinHook.
    """

    def main_hook(self) -> None:
        """Call the collectives of one iteration of the other ranks; run once for each iteration."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Run once after all ranks are out of input.

        Args:
            is_last_joiner: Whether this rank was among the ranks that ended last; `Join.last_joiner` is the
                lowest of these.
        """


class Joinable(torch_join.Joinable):
    """A class whose iterations communicate; its constructor must call `super().__init__()`.

    It must call `Join.notify_join_context(self)` before the collectives of each iteration.

    Same as: torch.distributed.algorithms.join.Joinable. Both Joins take both kinds.
    """

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook; `kwargs` are the keyword arguments of the Join, the same for all its joinables."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device of the Join's own messages."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The process group whose ranks join."""


class PureJoinable(Joinable):
    """A state updated by pure functions, as an object for a Join; made by `as_joinable`.

    Attributes:
        state: The state that the hooks take and return; the loop's own code may set it too.
    """

    state: Any
    mesh: Mesh

    def __init__(self, hook: PureHook | Callable[..., PureHook], state: Any, mesh: Mesh) -> None:
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
    if mesh is None:
        mesh = world_mesh()
    elif not isinstance(mesh, Mesh):
        mesh = mesh_from_group(mesh)
    return PureJoinable(hook, state, mesh)
