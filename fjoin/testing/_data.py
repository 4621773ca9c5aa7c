"""The law that what a function of fjoin.transforms makes is data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import transforms as tx
from ..transforms.spec._specified import call_factory


def is_data(make: Callable[[], Any]) -> None:
    """repr, equality and fingerprint agree, and the spec has all that makes the object again."""
    part = make()
    assert part == make() and hash(part) == hash(make())
    assert tx.fingerprint(part) == tx.fingerprint(make())
    assert part.spec.name in repr(part)
    if part.spec.factory is not None:  # otherwise handwritten: identified by its functions
        assert call_factory(part.spec.factory, part.spec.args) == part
