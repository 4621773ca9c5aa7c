"""The law that what a function of fjoin.transforms makes is data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import transforms as tx


def is_data(make: Callable[[], Any]) -> None:
    """repr, equality, fingerprint and JSON agree."""
    part = make()
    assert part == make() and hash(part) == hash(make())
    assert tx.fingerprint(part) == tx.fingerprint(make())
    assert part.spec.name in repr(part)
    if not part.spec.name:  # handwritten: identified by its functions, which JSON cannot hold
        return
    functions = {f"{f.__module__}.{f.__qualname__}": f for f in _functions(part)}
    assert tx.from_json(tx.to_json(part), functions) == part


def _functions(part: Any) -> list[Any]:
    found = []
    for _, value in part.spec.args:
        for item in value if isinstance(value, tuple) else (value,):
            if callable(item) and not hasattr(item, "spec"):
                found.append(item)
    return found + [f for child in part.spec.children for f in _functions(child)]
