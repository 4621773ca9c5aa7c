"""An `update` is adapted to its signature once, where the transform is made, whatever kind of function it is."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import sys
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


def test_a_function_written_in_c() -> None:
    """divmod takes two arguments, by place: of 7 and the state 2 it makes 3 and the state 1."""
    for part in three_times(divmod):
        assert part.update(7, 2, None, weight=3.0, step=0) == (3, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_accepts_refers_to_the_given_function(kind: str) -> None:
    """`accepts` inspects the given function, not its wrappers."""
    for part in three_times(kind):
        assert part.accepts("weight") and not part.accepts("flush") and not part.accepts("donated")


def _depth() -> int:
    frame, found = sys._getframe(), 0
    while (frame := frame.f_back) is not None:
        found += 1
    return found


def _depths(make: Callable[[Any], Any]) -> list[int]:
    """How deep the function is called in each of the transforms, above the first one."""
    found: list[int] = []

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        found.append(_depth())
        return grads, state

    for part in make(update):
        part.update(torch.ones(1), (), step=0)
    return [depth - found[0] for depth in found]


def test_replacing_a_field_does_not_adapt_again() -> None:
    assert _depths(lambda update: three_times(update)[:2]) == [0, 0]


def test_a_refusal_of_vmap_adds_no_call() -> None:
    assert _depths(lambda update: three_times(update)[:1] + three_times(update)[2:]) == [0] * len(
        three_times(_plain)[1:]
    )


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


def test_a_replaced_transform_is_identified_by_its_function_too() -> None:
    assert dataclasses.replace(_of(_plain)) == _of(_plain)
    assert fingerprint(dataclasses.replace(_of(_plain))) == fingerprint(_of(_plain))


def test_copy_with_another_update_takes_its_keywords() -> None:
    hook = tx.mean("data")
    copied = dataclasses.replace(hook, update=lambda grads, state, params=None, *, weight=None: (grads, state))
    assert "wire" in hook.takes and copied.takes == {"weight"}


def test_an_update_can_be_wrapped() -> None:
    inner = tx.clip_by_value(1.0)

    @functools.wraps(inner.update)
    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return inner.update(grads, state, params, **extra)

    assert update.__name__ == "update"
    assert tx.Transform(inner.init, update).update(torch.tensor(3.0), ())[0] == 1.0
