"""States as flat dicts: saved to files with shared objects still shared, and refused where they do not fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fjoin import transforms as tx
from fjoin.testing._compare import saved_and_loaded
from tests.helpers import params_like, raises_text, same_bits


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
