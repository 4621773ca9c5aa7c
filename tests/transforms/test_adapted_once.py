"""An `update` is adapted to its signature once, where the transform is made, whatever kind of function it is."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fjoin import transforms as tx
from fjoin.transforms.base import fingerprint


def _plain(grads: Any, state: Any, params: Any = None, *, weight: Any = None) -> Any:
    return grads * weight, state


def _named(grads: Any, state: Any, params: Any = None, *, by: float = 1.0, weight: Any = None) -> Any:
    return grads * weight * by, state


def _first(by: float, grads: Any, state: Any, params: Any = None, *, weight: Any = None) -> Any:
    return grads * weight * by, state


class Scaled:
    def update(self, grads: Any, state: Any, params: Any = None, *, weight: Any = None) -> Any:
        return grads * weight, state

    def __call__(self, grads: Any, state: Any, params: Any = None, *, weight: Any = None) -> Any:
        return grads * weight, state

    @staticmethod
    def still(grads: Any, state: Any, *, weight: Any = None) -> Any:
        return grads * weight, state

    @classmethod
    def of_class(cls, grads: Any, state: Any, *, weight: Any = None) -> Any:
        return grads * weight, state


def _logging(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


KINDS: dict[str, Any] = {
    "function": _plain, "partial": functools.partial(_named, by=1.0),
    "partial by place": functools.partial(_first, 1.0),
    "partial of a partial": functools.partial(functools.partial(_named), by=1.0), "bound method": Scaled().update,
    "static method": Scaled.still, "class method": Scaled.of_class, "object": Scaled(), "decorated": _logging(_plain),
    "decorated partial": _logging(functools.partial(_named, by=1.0)),
    "compiled": torch.compile(_plain, backend="eager"),
    "compiled method": torch.compile(Scaled().update, backend="eager"), "cached": functools.lru_cache(None)(_plain),
    "only by place": lambda grads, state, params=None, /, *, weight=None: (grads * weight, state),
}  # fmt: skip


def three_times(value: Any) -> Any:
    """The transform, and copies of it with other fields."""
    made = tx.Transform(lambda params: (), KINDS[value] if isinstance(value, str) else value)
    again = dataclasses.replace(made, needs=tx.Needs.LEAVES)
    return made, again, dataclasses.replace(again, silent=True), dataclasses.replace(made, pauses=True)


@pytest.mark.parametrize("kind", KINDS)
def test_update_gets_the_keywords_it_names(kind: str) -> None:
    for part in three_times(kind):
        g = torch.tensor(2.0)
        out, _ = part.update(g, (), g, weight=3.0, step=0, persistent=True)
        assert out.item() == 6.0
        inside = tx.chain(tx.every(1, part), tx.masked(tx.identity(), "*"))
        assert inside.update(g, inside.init(g), g, weight=3.0, step=0)[0].item() == 6.0


@pytest.mark.parametrize("kind", KINDS)
def test_accepts_refers_to_the_given_function(kind: str) -> None:
    """`accepts` inspects the given function, not its wrappers."""
    for part in three_times(kind):
        assert part.accepts("weight") and not part.accepts("flush") and not part.accepts("donated")


@tx.factory
def scaled(by: float) -> tx.Transform:
    return tx.Transform(lambda params: (), functools.partial(_named, by=by))


@pytest.mark.parametrize("times", [1, 3])
def test_pickled_transforms_are_adapted_as_before(times: int) -> None:
    """Through the factory; the result, the names, the spec and the fingerprint stay."""
    part, g = scaled(2.0), torch.tensor(2.0)
    for _ in range(times):
        part = pickle.loads(pickle.dumps(part))
    assert part == scaled(2.0) and fingerprint(part) == fingerprint(scaled(2.0))
    assert part.update(g, (), g, weight=3.0, step=0)[0].item() == 12.0
    assert part.accepts("weight") and not part.accepts("step")


def _of(update: Any, **fields: Any) -> tx.Transform:
    return tx.Transform(_no_state, update, **fields)


def _no_state(params: Any) -> Any:
    return ()


@pytest.mark.parametrize("fields", [{}, {"pauses": True}], ids=str)
def test_a_transform_without_a_name_is_identified_by_its_function(fields: Any) -> None:
    assert _of(_plain, **fields) == _of(_plain, **fields) != _of(_named, **fields)
    assert fingerprint(_of(_plain, **fields)) == fingerprint(_of(_plain, **fields))
    other = dataclasses.replace(_of(_plain, **fields), update=_named)
    assert other.update(torch.tensor(1.0), (), weight=5.0)[0].item() == 5.0


def test_copy_with_another_update_takes_its_keywords() -> None:
    hook = tx.mean("data")
    copied = dataclasses.replace(hook, update=lambda grads, state, params=None, *, weight=None: (grads, state))
    assert "wire" in hook.takes and copied.takes == {"weight"}
