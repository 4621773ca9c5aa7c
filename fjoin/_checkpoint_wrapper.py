"""torch's activation checkpointing, by its names."""

from __future__ import annotations

import enum
import functools
import importlib.util
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import SelectiveCheckpointContext, _CachingTorchDispatchMode

from .transforms.rematerialization import Policy, Runner, checkpoint_policies, runner_of

# torch's arguments that say how to run again; they have no effect, since both forms of its checkpoint are one here.
_IGNORED = ("use_reentrant", "determinism_check", "respect_saved_tensors_hooks", "debug")


def run_with(given: dict[str, Any]) -> Runner:
    """What calls a module's forward as these arguments say."""
    options = {name: value for name, value in given.items() if name not in _IGNORED}
    context_fn = options.pop("context_fn", None)
    if context_fn is None:
        return runner_of(**options)

    def run(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Made for each call, as torch does: a policy may count.
        return runner_of(policy_of(context_fn()), **options)(fn, args, kwargs)

    return run


def policy_of(contexts: Any) -> Policy:
    """The policy in the contexts that torch's create_selective_checkpoint_contexts makes.

    Raises:
        TypeError: other contexts.
    """
    first, _ = contexts
    if not isinstance(first, _CachingTorchDispatchMode):
        raise TypeError(
            f"checkpoint_wrapper: context_fn must return what torch's create_selective_checkpoint_contexts(policy) returns, got "
            f"{contexts!r}; say what to keep by policy=, and enter other contexts in the module's forward, which runs again"
        )
    return functools.partial(first.policy_fn, SelectiveCheckpointContext(is_recompute=False))


class CheckpointImpl(enum.Enum):
    """The two forms of torch's own checkpoint. Here both are one: `remat` has the limits of neither."""

    REENTRANT = enum.auto()
    NO_REENTRANT = enum.auto()


class CheckpointWrapper(nn.Module):
    """A view of a module, with its attributes, and with a forward pass that keeps less."""

    _plain: type[nn.Module]  # the module's class
    _made_by: tuple[tuple[Callable[..., nn.Module], dict[str, Any]], ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self._plain, self._made_by), self.__getstate__()  # type: ignore[no-untyped-call]


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> nn.Module:
    """torch's checkpoint_wrapper: a module whose intermediate values are computed again in the backward pass.

    What it returns is an instance of the module's class, with the same parameters, buffers, submodules and names, so
    that `state_dict`, `named_parameters`, `named_buffers`, `named_modules`, torch.func.functional_call and `functional`
    are those of the module. Buffers are written once in each step.

    Args:
        module: The module. It is not changed; the result shares all its attributes.
        checkpoint_impl: Has no effect.
        checkpoint_fn: A function of one's own, called as `checkpoint_fn(forward, *args, **kwargs,
            **checkpoint_fn_kwargs)`; by default `remat`.
        **checkpoint_fn_kwargs: Arguments of `remat`: policy, offload, preserve_rng_state; or those of
            torch.utils.checkpoint.checkpoint: preserve_rng_state; context_fn, of torch's
            create_selective_checkpoint_contexts; early_stop; use_reentrant, determinism_check, debug and
            respect_saved_tensors_hooks, which have no effect.

    Returns:
        The module's twin.

    Raises:
        TypeError: no module; raised by Python: unknown arguments; raised by the call: other contexts of context_fn, a
            policy beside context_fn.
        ValueError: a module that is compiled, or one of torch.jit.

    >>> import fjoin
    >>> block = fjoin.checkpoint_wrapper(torch.nn.Linear(2, 2))
    >>> isinstance(block, torch.nn.Linear), list(block.state_dict())
    (True, ['weight', 'bias'])
    """
    options = {"checkpoint_impl": checkpoint_impl, "checkpoint_fn": checkpoint_fn, **checkpoint_fn_kwargs}
    if checkpoint_fn is None:
        run = run_with(checkpoint_fn_kwargs)
    else:
        chosen = functools.partial(checkpoint_fn, **checkpoint_fn_kwargs)

        def run(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            return chosen(fn, *args, **kwargs)

    return _twin(module, run, (checkpoint_wrapper, options))


def offload_wrapper(module: nn.Module) -> nn.Module:
    """torch's offload_wrapper: a module whose activations wait in pinned memory of the host for the backward pass.
    Parameters stay.

    Args:
        module: The module. It is not changed; the result shares all its attributes.

    Returns:
        The module's twin, as `checkpoint_wrapper` returns it.

    Raises:
        TypeError: no module.
        ValueError: raised by the call: activations that are on the CPU already.

    >>> import fjoin
    >>> block = fjoin.offload_wrapper(torch.nn.Linear(2, 2))
    >>> isinstance(block, torch.nn.Linear)
    True
    """
    run = runner_of(policy=checkpoint_policies.everything_saveable, offload="cpu")
    return _twin(module, run, (offload_wrapper, {}))


def _twin(module: nn.Module, run: Runner, made_by: tuple[Any, Any]) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{made_by[0].__name__} takes a module, got a {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule) or getattr(module, "_compiled_call_impl", None) is not None:
        raise ValueError(f"{made_by[0].__name__}: the {type(module).__name__} is compiled; wrap it, then compile it")
    plain: Any = type(module)
    wrapped = issubclass(plain, CheckpointWrapper)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = None if wrapped else vars(self).get("_own_forward")
        return run(own or types.MethodType(plain.forward, self), args, kwargs)

    first, before = (plain._plain, plain._made_by) if wrapped else (plain, ())
    made = {"_plain": first, "_made_by": (*before, made_by), "forward": forward, "__module__": plain.__module__}
    bases = (plain,) if wrapped else (plain, CheckpointWrapper)
    twin: Any = nn.Module.__new__(type(f"Checkpointed{plain.__name__}", bases, made))
    twin.__dict__ = vars(module)
    if "forward" in vars(module):  # set on the module itself
        twin.__dict__ = {name: value for name, value in vars(module).items() if name != "forward"}
        twin.__dict__["_own_forward"] = module.forward
    return twin  # type: ignore[no-any-return]


def _rebuilt(plain: type[nn.Module], made_by: Any) -> nn.Module:
    module = plain.__new__(plain)
    for make, options in made_by:
        module = make(module, **options)
    return module


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
    auto_wrap_policy: Any = None,
) -> None:
    """Wrap submodules of a model, in place; the model itself is not wrapped.

    Args:
        model: The model.
        checkpoint_wrapper_fn: Wraps a module: `checkpoint_wrapper`, `offload_wrapper`, or a partial of them.
        check_fn: Which modules to wrap.
        auto_wrap_policy: A policy of torch.distributed.fsdp.wrap instead of `check_fn`: a function
            `(module, recurse, nonwrapped_numel) -> bool`, or an object such as a ModuleWrapPolicy.

    Same as: torch's function of this name, which does the wrapping.

    >>> import fjoin
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> fjoin.apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    >>> [type(module).__name__ for module in model]
    ['CheckpointedLinear', 'ReLU', 'CheckpointedLinear']
    """
    # A copy of torch's module, in which programs put this function in the place of torch's. It imports FSDP: late.
    spec: Any = importlib.util.find_spec("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    of_torch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(of_torch)
    of_torch.apply_activation_checkpointing(model, checkpoint_wrapper_fn, check_fn, auto_wrap_policy)
