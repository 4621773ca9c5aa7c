"""A transform inside another one."""

from __future__ import annotations

from typing import Any

from ..tree._tree import State, Tree
from ._call import Call, call_of
from ._transform import Reduction, Transform


class Inner:
    """A transform inside another one, whose state is a field of the outer state.

    Args:
        transform: The inner transform.
        field: The name of the field.
    """

    transform: Transform
    field: str

    def __init__(self, transform: Transform, field: str = "inner") -> None:
        self.transform, self.field = transform, field

    def update(self, grads: Tree, state: Any, params: Tree, **keywords: Any) -> tuple[Tree, State]:
        """Call the inner transform with the keywords of the outer call, and return its result and its new state.

        Args:
            state: The outer state.
        """
        return self.run(grads, state, params, call_of(keywords))

    def run(self, grads: Tree, state: Any, params: Tree, call: Call) -> tuple[Tree, State]:
        """`update` in a given context."""
        if not hasattr(state, self.field):
            raise other_state(state)
        return self.transform.run(grads, getattr(state, self.field), params, call)

    def reduction(self, *own: str, same: bool = False) -> Reduction | None:
        """The reduction of the outer transform.

        Args:
            own: The names that the outer transform has put into the lane itself.
            same: Whether the outer transform computes the same mean or sum as the inner one, in another form.
        """
        if self.transform.reduces is None:
            return None
        sums = self.transform.reduces.sums

        def of_inner(state: State) -> Any:
            found = sums(getattr(state, self.field))
            return found._replace(lane={name: value for name, value in found.lane.items() if name not in own})

        axis, over = self.transform.reduces.axis, self.transform.reduces.over
        return Reduction(of_inner, axis, over) if same else Reduction(of_inner)


def other_state(state: Any, expected: str = "the state") -> ValueError:
    """The error for the state of another transform."""
    return ValueError(
        f"state is a {type(state).__name__}, expected {expected} that this transform's init or update returned; it is another "
        f"pipeline's state"
    )
