"""A pipeline as data: its repr is the code that makes it, and it has a JSON form; its state as a flat dict."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from fjoin.testing._compare import saved_and_loaded
from fjoin.transforms.base.specs import fingerprint
from tests.helpers import params_like, raises_text, same_bits

FULL = tx.fuse(
    tx.chain(tx.clip_by_value(9.0), tx.mean(("node", "local"), over="live"), tx.clip_by_global_norm(1.0)),
    tx.partition(
        {
            ("*bias", "*norm*"): tx.sgd(tx.linear(0.1, 0.0, 9)),
            "*": tx.adamw(tx.warmup_cosine(3e-4, 100, 2000), weight_decay=0.1),
        }
    ),
)


def _double(g: Tensor) -> Tensor:
    return g * 2


def test_repr_evaluates_to_the_pipeline() -> None:
    assert repr(FULL) == (
        "fuse(chain(clip_by_value(9.0), mean(('node', 'local'), over='live'), clip_by_global_norm(1.0)), "
        "partition({('*bias', '*norm*'): sgd(lr=linear(0.1, 0.0, 9)), "
        "'*': adamw(lr=warmup_cosine(0.0003, 100, 2000), weight_decay=0.1)}))"
    )
    assert eval(repr(FULL), vars(tx)) == FULL


def test_factory_results_can_be_pickled_and_copied() -> None:
    grads = {"a.bias": torch.tensor([3.0]), "b": torch.tensor([-20.0])}
    for made in FULL, tx.skip_if_nonfinite(FULL), tx.clip_by_value(1.0), tx.int8(), tx.cosine(0.1, 9):
        assert pickle.loads(pickle.dumps(made)) == made and copy.deepcopy(made) == made
    clip = pickle.loads(pickle.dumps(tx.chain(tx.clip_by_value(9.0), tx.stateless(_double))))
    assert clip.update(grads, clip.init(grads))[0] == {"a.bias": 6.0, "b": -18.0}


def test_equality_compares_the_meaning() -> None:
    assert tx.sgd(0.1) == tx.sgd(lr=0.1) == tx.sgd(0.1, momentum=0.0)
    assert tx.sgd(0.1) != tx.sgd(0.2) and tx.adam(0.1) != tx.adamw(0.1) and tx.mean("a") != tx.mean("b")
    assert tx.chain(tx.mean("a"), tx.chain(tx.identity(), tx.identity())) == tx.chain(tx.mean("a"), tx.identity())
    assert tx.chain() == tx.identity() and tx.chain(tx.identity()) == tx.identity()
    assert fingerprint(tx.stateless(lambda g: g * 2)) != fingerprint(tx.stateless(lambda g: g * 3))
    assert len({tx.mean("a"), tx.mean("a"), tx.mean("b")}) == 2


def _times(k: Any, grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    return {path: g * k for path, g in grads.items()}, state


class _Negates:
    def __call__(self, grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return {path: -g for path, g in grads.items()}, state

    def method(self, grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return grads, state


def _by_hand(update: Any) -> tx.Transform:
    return tx.Transform(lambda params: (), update, needs=tx.Needs.LEAVES)


def test_custom_parts_are_identified_by_their_function() -> None:
    """Different functions, partials, callable objects and methods have different fingerprints."""
    made = [_Negates(), _Negates().method, *(functools.partial(_times, k) for k in (2.0, 3.0)),
            functools.partial(_times, object())]  # fmt: skip
    for wrap in (lambda t: t, lambda t: tx.chain(tx.mean("data"), t), lambda t: tx.fuse(t, tx.sgd(0.1))):
        assert len({fingerprint(wrap(_by_hand(update))) for update in made}) == len(made)
        assert fingerprint(wrap(_by_hand(_Negates()))) == fingerprint(wrap(_by_hand(_Negates())))
        assert wrap(_by_hand(made[0])) != wrap(_by_hand(made[1]))
    both = tx.chain(tx.mean("data"), _by_hand(made[2]))
    assert repr(both) == "chain(mean('data'), custom(partial(_times, 2.0)))"
    assert repr(_by_hand(made[0])) == "custom(_Negates)"


TWO, THREE = torch.tensor(2.0), torch.tensor(3.0)
TWOS, THREES = np.full(2, 2), np.full(2, 3)


def _functions(k: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Two functions of each kind, by the number of one of them, which differ in what the name says."""
    pairs: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "a constant": (lambda g: g * 2.0, lambda g: g * 3.0),
        "a tuple of constants": (lambda g: g * (1.0, 2.0)[g.dim() % 2], lambda g: g * (1.0, 3.0)[g.dim() % 2]),
        "a set of constants": (lambda g: g * (g.dim() in {1, 2}), lambda g: g * (g.dim() in {0, 3})),
        "a function inside": (lambda g: (lambda x: x * 2)(g), lambda g: (lambda x: x * 3)(g)),
        "a default argument": (lambda g, k=2.0: g * k, lambda g, k=3.0: g * k),
        "a default argument by name": (lambda g, *, k=2.0: g * k, lambda g, *, k=3.0: g * k),
        "a default that is an array": (lambda g, k=TWOS: g * k, lambda g, k=THREES: g * k),
        "a default of arrays": (lambda g, k=(TWOS, {"a": {2}}): g * k, lambda g, k=(TWOS, {"a": {3}}): g * k),
        "a default that is a tensor": (lambda g, k=TWO: g * k, lambda g, k=THREE: g * k),
        "a list inside": (lambda g: sum([g * i for i in range(2)]), lambda g: sum([g * i for i in range(3)])),
    }  # fmt: skip
    return {name: pair[k] for name, pair in pairs.items()}


@pytest.mark.parametrize("name", _functions(0))
def test_functions_that_do_something_else_are_other_functions(name: str) -> None:
    one, same, other = _functions(0)[name], _functions(0)[name], _functions(1)[name]
    for make in (tx.stateless, tx.sgd, lambda f: tx.tap(f)):
        assert make(one) == make(same) and fingerprint(make(one)) == fingerprint(make(same))
        assert make(one) != make(other) and fingerprint(make(one)) != fingerprint(make(other))


SET = "{'b', 'c', 'd', 'e'}"
IMPORTS = "from fjoin import transforms as tx\nfrom fjoin.transforms.base.specs import fingerprint"
PROGRAM = f"{IMPORTS}\nfound = fingerprint(tx.stateless(lambda g: g * ('a' in {SET})))"


def in_another_process(program: str, seed: str) -> str:
    environ = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_fingerprint_is_equal_in_another_process() -> None:
    """Sets of strings have another order there."""
    order = f"print(*frozenset({SET}))"
    seed = next(
        seed for seed in map(str, range(9)) if in_another_process(order, seed).split() != [*frozenset(eval(SET))]
    )
    here = {"__name__": "__main__"}
    exec(PROGRAM, here)
    assert in_another_process(f"{PROGRAM}\nprint(found)", seed) == here["found"]


def test_shared_step_count_is_shared_after_loading() -> None:
    opt, params = tx.adam(0.1), params_like()
    _, state = opt.step(params, params_like(100), opt.init(params))
    loaded = tx.from_state_dict(opt.init(params), tx.to_state_dict(state))
    assert len({id(s.step) for s in loaded.values()}) == 1
    aged = {**state, "scale": state["scale"]._replace(step=torch.tensor(7.0))}
    loaded = tx.from_state_dict(opt.init(params), tx.to_state_dict(aged))
    assert loaded["scale"].step == 7 and len({id(s.step) for s in loaded.values()}) == 2


def test_trees_of_any_form() -> None:
    trees: list[Any] = [torch.tensor(3.0), {}, (), [], {"a": ()}, {"a": [1, {"b": torch.ones(2)}, None, 2.5]}, 7]
    for tree in trees:
        assert same_bits(saved_and_loaded(tree, tree), tree)
    raises_text(ValueError, lambda: tx.from_state_dict({}, {"a": 1, "b.c": 2}), "['a', 'b.c']", "lacks [], and")
    grown = tx.from_state_dict({"a": torch.zeros(2)}, {"a": torch.ones(2, requires_grad=True) * 2})
    assert not grown["a"].requires_grad
    narrow = tx.from_state_dict({"a": torch.zeros(2, dtype=torch.bfloat16)}, {"a": torch.ones(2)})
    assert narrow["a"].dtype is torch.bfloat16
    kept: Tensor = torch.ones(2)
    loaded = tx.from_state_dict({"a": kept}, {"a": kept})
    assert loaded["a"].data_ptr() != kept.data_ptr()
