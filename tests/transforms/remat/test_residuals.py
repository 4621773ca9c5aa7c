"""What is predicted to be kept is what saved-tensor hooks count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fjoin import transforms as tx

from .functions import POLICIES, again
from .transformer import Counted, Transformer, tokens

pytestmark = pytest.mark.usefixtures("host")
WRAPS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda f: f,
    **{name: lambda f, policy=name: again(f, policy) for name in POLICIES},
    "nested": lambda f: again(again(f, "dots"), "names"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", WRAPS)
def test_predicted_is_counted(how: str) -> None:
    model, x = Transformer(3), tokens()
    predicted = tx.saved_residuals(model, x, WRAPS[how])
    for outside, want in (([], predicted.bytes), ([*model.parameters(), x], predicted.activation_bytes)):
        counted = Counted(outside)
        with counted.context():
            out = model(x, WRAPS[how])
        assert counted.now == want
        out.backward()
        del out
        assert counted.now == 0


def test_policies_are_told_apart() -> None:
    model, x = Transformer(2), tokens()
    of = {how: tx.saved_residuals(model, x, wrap).activation_bytes for how, wrap in WRAPS.items()}
    assert of["plain"] == of["everything"] > of["dots"] > of["names"] > of["nothing"] > of["arguments to the host"]
    assert of["dots"] > of["names, some to the host"] > of["dots to the host"] == of["host"]
    assert of["dots"] > of["no batch"] > of["nothing"] and of["but names"] > of["nothing"]


def test_parameters_on_meta_and_as_arguments() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 4000), nn.GELU(), nn.Linear(4000, 1000))
    params = dict(model.named_parameters())

    def loss(params: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x,)).sum()

    found = tx.saved_residuals(
        loss, {name: p.detach() for name, p in params.items()}, torch.empty(50000, 1000, device="meta")
    )
    assert found.activation_bytes == 2 * 50000 * 4000 * 4
    assert {one.name for one in found if one.given} == {"argument 1", "argument 0['2.weight']"}
    assert [one.shape for one in found if not one.given] == [(50000, 4000)] * 2
    assert "1,600,000,000 without arguments" in str(found)


def test_names() -> None:
    def f(w: Tensor, x: Tensor, scale: Any) -> Tensor:
        h = tx.checkpoint_name(torch.tanh(x @ w), "h")
        return torch.exp(h).sum() * scale["by"]

    found = tx.saved_residuals(
        f, torch.ones(3, 3).requires_grad_(), torch.ones(2, 3), scale={"by": torch.ones((), requires_grad=True)}
    )
    names = {one.name for one in found}
    assert "h" in names and "argument 'scale'['by']" in names
    assert any(name.startswith("exp at test_residuals.py:") for name in names)


def test_dropout_masks_are_kept_or_drawn_again() -> None:
    x = torch.ones(100, requires_grad=True)
    assert tx.saved_residuals(lambda x: F.dropout(x * 2, 0.5), x).activation_bytes == 400
    assert tx.saved_residuals(tx.remat(lambda x: F.dropout(x * 2, 0.5)), x).activation_bytes == 0


def test_empty_and_no_gradient() -> None:
    assert tx.saved_residuals(lambda: torch.ones(3)).bytes == 0
    assert tx.saved_residuals(lambda tree: tree["a"].sum(), {"a": torch.zeros(0, 3), "n": 3}).bytes == 0
