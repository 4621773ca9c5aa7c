"""The axes that `loss_fn` sees in a loop in which ranks without input do not call it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from torch import Tensor

from ..._errors import JoinError
from ...transforms._axis_env import Axis


class ShadowedAxis(Axis):
    """An axis over which collectives are refused, since ranks that are out of input would not take part in them.

    Args:
        axis: The axis that runs the collectives elsewhere.
        name: Its name.
        along: The axes along which ranks may be out of input.
    """

    def __init__(self, axis: Any, name: str, along: Collection[str]) -> None:
        self._axis, self._name, self._along = axis, name, along
        self.size = axis.size

    def index(self) -> Tensor:
        out: Tensor = self._axis.index()
        return out

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        if self._name in self._along:
            self._refuse(op)
        out: Tensor = self._axis.run(op, x, arg)
        return out

    def joint(self, axes: tuple[str, ...]) -> Axis | None:
        mixed = next((name for name in axes if name in self._along), None)
        if mixed is not None:
            return ShadowedAxis(self._axis, mixed, self._along)
        out: Axis | None = self._axis.joint(axes)
        return out

    def note(self, what: str) -> None:
        if self._name not in self._along:
            self._axis.note(what)

    def check_rows(self, width: int, give: tuple[int, ...], take: tuple[int, ...]) -> None:
        if self._name in self._along:
            self._refuse("all_to_all_single")
        self._axis.check_rows(width, give, take)

    def _refuse(self, op: str) -> NoReturn:
        raise JoinError(
            f"loss_fn calls {op} over {self._name!r}, in which ranks that are out of input would not take part: they do not call "
            f"loss_fn; pass step.join(loader, when_exhausted='replay'), with which they do"
        )


def shadowed(axes: Mapping[str, Any], along: Collection[str]) -> dict[str, Axis]:
    """The axes of a mesh, with collectives refused over those along which ranks may be out of input."""
    return {name: ShadowedAxis(axis, name, along) for name, axis in axes.items()}
