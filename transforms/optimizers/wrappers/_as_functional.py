"""The functional counterparts of torch.optim's classes, and of other optimizer classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import optim

from ...step_param._optimizer import Optimizer
from .._adadelta import adadelta
from .._adafactor import adafactor
from .._adagrad import adagrad
from .._asgd import asgd
from .._muon import muon
from .._rmsprop import rmsprop
from .._rprop import rprop
from .._sgd import sgd
from ..adam._adam import adam, adamw
from ..adam._adamax import adamax
from ..adam._nadam import nadam
from ..adam._radam import radam

OF_TORCH: Mapping[type, Callable[..., Optimizer]] = {
    optim.SGD: sgd,
    optim.Adam: adam,
    optim.AdamW: adamw,
    optim.NAdam: nadam,
    optim.RAdam: radam,
    optim.Adamax: adamax,
    optim.Adagrad: adagrad,
    optim.Adadelta: adadelta,
    optim.Adafactor: adafactor,
    optim.RMSprop: rmsprop,
    optim.Rprop: rprop,
    optim.ASGD: asgd,
    optim.Muon: muon,
}
_KNOWN: dict[Any, Callable[..., Optimizer]] = dict(OF_TORCH)  # and those registered
# Arguments that select torch's implementation of a step and do not change its result.
_HOW = {"foreach", "fused", "capturable", "differentiable"}


def as_functional_optim(optim_cls: Any, *args: Any, **kwargs: Any) -> Optimizer:
    """The functional counterpart of an optimizer class.

    Args:
        optim_cls: A class of torch.optim, or a key given to `register_functional_optim`.
        args, kwargs: The arguments of the class after its parameters. foreach, fused, capturable and differentiable are
            ignored.

    Returns:
        An `Optimizer`.

    Raises:
        ValueError: no counterpart of `optim_cls` is known; the message says how to add one.
        TypeError, ValueError: arguments that the counterpart does not take.

    Same as: torch's function of this name.

    >>> as_functional_optim(torch.optim.SGD, 0.1, momentum=0.9, foreach=True)
    sgd(lr=0.1, momentum=0.9)
    """
    make = _KNOWN.get(optim_cls)
    if make is None:
        known = ", ".join(getattr(key, "__name__", repr(key)) for key in _KNOWN)
        raise ValueError(
            f"{optim_cls!r} has no functional counterpart; there are those of {known}; "
            f"add one with register_functional_optim(key, factory)"
        )
    if inspect.isclass(optim_cls):
        bound = inspect.signature(optim_cls).bind(None, *args, **kwargs).arguments
        given = {name: value for name, value in list(bound.items())[1:] if name not in _HOW}
        if make is adam and given.pop("decoupled_weight_decay", False):
            make = adamw
        return make(**given)
    return make(*args, **kwargs)


def register_functional_optim(key: Any, factory: Callable[..., Optimizer]) -> None:
    """Registers the counterpart of a class, or of any other key, for `as_functional_optim`.

    Args:
        key: The class, or a name. `factory` takes the arguments of the class after its parameters by name.
        factory: Makes the `Optimizer`.

    Raises:
        ValueError: `key` has a counterpart already, which torch's function of this name keeps silently.

    Same as: torch's function of this name.

    >>> from fjoin import transforms as tx
    >>> tx.register_functional_optim("slow sgd", lambda: tx.sgd(1e-6))
    >>> tx.as_functional_optim("slow sgd")
    sgd(lr=1e-06)
    """
    if key in _KNOWN:
        raise ValueError(f"{key!r} has a functional counterpart already, {_KNOWN[key]!r}; choose another key")
    if not callable(factory):
        raise TypeError(f"factory must be a function that makes an Optimizer, got {factory!r}")
    _KNOWN[key] = factory
