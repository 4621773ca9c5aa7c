"""Objects that are compared, shown and pickled by their specs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ._spec import Spec


def call_factory(make: Callable[..., Any], args: Iterable[tuple[str, Any]]) -> Any:
    """The result of a factory with the arguments of a spec."""
    bound = inspect.BoundArguments(inspect.signature(make), dict(args))  # type: ignore[arg-type]
    return make(*bound.args, **bound.kwargs)


class PickledBySpec:
    """Pickles a factory and its arguments, where a factory made the object: the functions in it have no names."""

    spec: Spec

    def __reduce_ex__(self, protocol: Any) -> Any:
        make = self.spec.factory
        return super().__reduce_ex__(protocol) if make is None else (call_factory, (make, self.spec.args))

    def __deepcopy__(self, memo: Any) -> Any:
        del memo
        return self  # nothing in it changes


@dataclass(frozen=True, eq=False)
class Specified(PickledBySpec):
    """Equality, hash and repr by spec."""

    @property
    def _spec(self) -> Spec:
        return self.spec  # type: ignore[attr-defined,no-any-return]

    def with_spec(self, spec: Spec) -> Any:
        return replace(self, spec=spec)  # type: ignore[call-arg]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._spec == other._spec  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self._spec)

    def __repr__(self) -> str:
        return repr(self._spec)
