"""torch.compiler's decorators without the import of torch's compiler, which takes seconds, before a program uses it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """The function, never compiled, and nothing that it calls.

    Same as: torch.compiler.disable.
    """

    disabled: Any = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:  # nothing is compiled
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # a compiled caller breaks its graph here
    return call  # type: ignore[return-value]


def constant(function: F) -> F:
    """The function, of arguments that a compiler knows, which is called once while it traces.

    Same as: torch.compiler.assume_constant_result.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
