"""torch's apply_activation_checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ._checkpoint_wrapper import checkpoint_wrapper


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
    auto_wrap_policy: Any = None,
) -> None:
    """Wrap submodules of a model, in place; the model itself is not wrapped.

    A module that the model holds in several places is wrapped in all of them.

    Args:
        model: The model.
        checkpoint_wrapper_fn: Wraps a module: `checkpoint_wrapper`, `offload_wrapper`, or a partial of them.
        check_fn: Which modules to wrap.
        auto_wrap_policy: A policy of torch.distributed.fsdp.wrap instead of `check_fn`: a function
            `(module, recurse, nonwrapped_numel) -> bool`, or an object such as a ModuleWrapPolicy.

    Raises:
        TypeError: no module, or no function.

    >>> import fjoin
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> fjoin.apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    >>> [type(module).__name__ for module in model]
    ['CheckpointedLinear', 'ReLU', 'CheckpointedLinear']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply_activation_checkpointing takes a module, got a {type(model).__name__}")
    for name, fn in (("checkpoint_wrapper_fn", checkpoint_wrapper_fn), ("check_fn", check_fn)):
        if not callable(fn):
            raise TypeError(f"apply_activation_checkpointing: {name} must be a function, got {fn!r}")
    from torch.distributed.fsdp.wrap import _Policy, _recursive_wrap  # here, since its import takes as long as torch's

    chosen: dict[nn.Module, dict[str, Any]] = {}
    if auto_wrap_policy is None:
        chosen = {module: {} for module in model.modules() if check_fn(module)}
    elif isinstance(auto_wrap_policy, _Policy):
        chosen = auto_wrap_policy._run_policy(model, ignored_modules=set(), root_kwargs={})
    elif callable(auto_wrap_policy):

        def choose(module: nn.Module) -> nn.Module:
            chosen[module] = {}
            return module

        _recursive_wrap(model, auto_wrap_policy, choose, set(), set(), only_wrap_children=True)
    else:
        raise TypeError(
            f"apply_activation_checkpointing: auto_wrap_policy must be a policy or None, got {auto_wrap_policy!r}"
        )
    wrapped: dict[nn.Module, nn.Module] = {}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child in chosen and child is not None:
                if child not in wrapped:
                    wrapped[child] = checkpoint_wrapper_fn(child, **chosen[child])
                module._modules[name] = wrapped[child]
