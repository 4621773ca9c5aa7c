"""What is predicted to be kept is what saved-tensor hooks count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies

from .transformer import Counted, Transformer, tokens

pytestmark = pytest.mark.usefixtures("host")
WRAPS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda f: f,
    "default": tx.remat,
    "everything": lambda f: tx.remat(f, policies.everything_saveable),
    "dots": lambda f: tx.remat(f, policies.dots_saveable),
    "no batch": lambda f: tx.remat(f, policies.dots_with_no_batch_dims_saveable),
    "only names": lambda f: tx.remat(f, policies.save_only_these_names("mlp")),
    "but names": lambda f: tx.remat(f, policies.save_any_names_but_these("mlp")),
    "both": lambda f: tx.remat(f, policies.save_from_both_policies(policies.dots_saveable, policies.save_only_these_names("mlp"))),
    "own": lambda f: tx.remat(f, lambda op, *args, **kwargs: "gelu" in str(op)),
    "arguments to the host": lambda f: tx.remat(f, offload="cpu"),
    "dots to the host": lambda f: tx.remat(f, policies.dots_saveable, "cpu"),
    "all to the host": lambda f: tx.remat(f, policies.everything_saveable, "cpu"),
    "names to the host": lambda f: tx.remat(
        f, policies.save_and_offload_only_these_names(names_which_can_be_saved=["attention"], names_which_can_be_offloaded=["mlp"]), "cpu"
    ),
    "dots without batch to the host": lambda f: tx.remat(f, policies.offload_dot_with_no_batch_dims(), "cpu"),
    "nested": lambda f: tx.remat(tx.remat(f, policies.dots_saveable), policies.save_only_these_names("mlp")),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", WRAPS)
def test_predicted_is_counted(how: str) -> None:
    model, x = Transformer(), tokens()
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
    assert of["plain"] == of["everything"] > of["dots"] > of["only names"] > of["default"]
    assert of["dots"] > of["names to the host"] > of["dots to the host"] == of["all to the host"]
    assert (
        of["default"] > of["arguments to the host"]
        and of["dots"] > of["no batch"] > of["default"]
        and of["but names"] > of["default"]
    )


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
