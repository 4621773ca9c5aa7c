"""The counterparts of torch's functional optimizers."""

from __future__ import annotations

import pytest
import torch

from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text
from tests.oracle import optim


@pytest.mark.parametrize(
    "cls",
    [
        "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "Adafactor", "RMSprop", "Rprop",
        "ASGD", "Muon",
    ],
)  # fmt: skip
def test_every_class_has_a_counterpart(cls: str) -> None:
    """One step with the defaults of the class gives the same result."""
    made = getattr(torch.optim, cls)
    p, g = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(3, 4)
    opt = tx.as_functional_optim(made)
    out, _ = opt.step({"p": p}, {"p": g}, opt.init({"p": p}))
    (want,) = optim.run(lambda ps: made(ps), [p], [[g]])
    assert max_diff(out["p"] - p, want) < 1e-6


def test_arguments_of_a_class() -> None:
    assert tx.as_functional_optim(torch.optim.Adam, 0.1, (0.5, 0.9), fused=True) == tx.adam(0.1, (0.5, 0.9))
    raises_text(TypeError, lambda: tx.as_functional_optim(torch.optim.SGD, learning_rate=0.1), "learning_rate")
    raises_text(ValueError, lambda: tx.as_functional_optim(torch.optim.SGD, lr=-1.0), "lr must be at least 0")
    raises_text(ValueError, lambda: tx.as_functional_optim(torch.optim.LBFGS), "LBFGS", "register_functional_optim", "AdamW")  # fmt: skip


def test_a_key_can_be_taken_once() -> None:
    tx.register_functional_optim("mine", lambda lr: tx.sgd(lr))
    assert tx.as_functional_optim("mine", 0.5) == tx.sgd(0.5)
    raises_text(ValueError, lambda: tx.register_functional_optim("mine", tx.adam), "'mine'", "already")
    raises_text(TypeError, lambda: tx.register_functional_optim("other", 3), "factory", "3")  # type: ignore[arg-type]
