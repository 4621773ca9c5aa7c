"""A module whose parameters a pipeline steps, in torch's Join."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from ._hook import REGISTERED


def keep_stepped(model: DistributedDataParallel, paths: Iterable[str]) -> None:
    """Note that a hook steps these parameters of a module, so that the end of a Join leaves them as they are."""
    REGISTERED[model] = frozenset(paths)
    vars(model)["join_hook"] = _JoinHookOf(model)


class _JoinHookOf:
    """`join_hook` of a registered module: at the end of a Join, parameters that a pipeline steps stay as they are.

    In a pickled or deep copy of the module, which has no hook, it is the method of the class.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)

    def __call__(self, **kwargs: Any) -> JoinHook:
        model = self._model()
        assert model is not None
        return _KeepsParameters(model, type(model).join_hook(model, **kwargs))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._model(), "join_hook")  # the copy's own, since its attributes are not set yet


class _KeepsParameters(JoinHook):
    def __init__(self, model: DistributedDataParallel, hook: JoinHook) -> None:
        self._model, self._hook = model, hook

    def main_hook(self) -> None:
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        model, before = self._model, self._model.parameters_to_ignore
        model.parameters_to_ignore = {*before, *REGISTERED[model]}
        try:
            self._hook.post_hook(is_last_joiner)
        finally:
            model.parameters_to_ignore = before
