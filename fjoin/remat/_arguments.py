"""The arguments of torch.utils.checkpoint.checkpoint, as those of `remat`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, _CachingTorchDispatchMode

from ..transforms.remat._remat import Runner, runner_of
from ..transforms.remat.values._policy import Keep, Policy

_NAMES = ("policy", "offload", "preserve_rng", "early_stop")
_KEPT = {
    CheckpointPolicy.MUST_SAVE: Keep.SAVE,
    CheckpointPolicy.PREFER_SAVE: Keep.SAVE,
    CheckpointPolicy.MUST_RECOMPUTE: Keep.RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: Keep.RECOMPUTE,
    **{getattr(CheckpointPolicy, name): Keep.OFFLOAD for name in dir(CheckpointPolicy) if name.endswith("CPU_OFFLOAD")},
}
# torch's arguments that say how to run again: the values that mean what happens here, and what to do instead of others.
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_reentrant": ((True, False, None), "both forms are one here: leave it out"),
    "determinism_check": (("default", "none"), "a second run is compared with the first in any case: leave it out"),
    "respect_saved_tensors_hooks": (
        (True, None),
        "torch.autograd.graph.saved_tensors_hooks around the module get what a policy keeps, in any case: leave it out",
    ),
    "debug": (
        (False,),
        "the error of a second run that differs names the first tensor that does: leave it out, or run in "
        "torch.autograd.detect_anomaly()",
    ),
}


def run_with(given: dict[str, Any]) -> Runner:
    """What calls a module's forward as these arguments say.

    Raises:
        TypeError: an unknown name; a context_fn that is no function.
        ValueError: a value of one of torch's arguments that has no equivalent.
    """
    options = dict(given)
    for name, (values, instead) in _FIXED.items():
        if name in options and not any(options[name] is value or options[name] == value for value in values):
            raise ValueError(
                f"checkpoint_wrapper: {name} must be {' or '.join(map(repr, values))}, got {options[name]!r}; {instead}"
            )
        options.pop(name, None)
    if "preserve_rng_state" in options:
        if "preserve_rng" in options:
            raise TypeError(
                "checkpoint_wrapper: preserve_rng and preserve_rng_state are one argument; give one of them"
            )
        options["preserve_rng"] = options.pop("preserve_rng_state")
    context_fn = options.pop("context_fn", None)
    for name in options:
        if name not in _NAMES:
            raise TypeError(
                f"checkpoint_wrapper takes {', '.join(_NAMES)}, or a checkpoint_fn, or torch's preserve_rng_state, context_fn, "
                f"{', '.join(_FIXED)}, got {name!r}"
            )
    if context_fn is None:
        return runner_of(**options)
    if not callable(context_fn):
        raise TypeError(f"checkpoint_wrapper: context_fn must be a function, got {context_fn!r}")
    if options.get("policy") is not None:
        raise ValueError("checkpoint_wrapper: context_fn and policy both say what to keep; give one of them")

    def run(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Made for each call, as torch does: a policy may count.
        return runner_of(**{**options, "policy": policy_of(context_fn())})(fn, args, kwargs)

    return run


def policy_of(contexts: Any) -> Policy:
    """The policy in the contexts that torch's create_selective_checkpoint_contexts makes.

    Raises:
        TypeError: other contexts.
    """
    first = contexts[0] if isinstance(contexts, tuple) and len(contexts) == 2 else None
    if not isinstance(first, _CachingTorchDispatchMode):
        raise TypeError(
            f"checkpoint_wrapper: context_fn must return what torch's create_selective_checkpoint_contexts(policy) returns, got "
            f"{contexts!r}; say what to keep by policy=, and enter other contexts in the module's forward, which runs again"
        )
    of_torch, context = first.policy_fn, SelectiveCheckpointContext(is_recompute=False)

    def policy(op: Any, *args: Any, **kwargs: Any) -> Keep:
        found = of_torch(context, op, *args, **kwargs)
        if isinstance(found, bool):
            return Keep.SAVE if found else Keep.RECOMPUTE
        return _KEPT[found]

    return policy
