"""A stage on tensors without data, in any step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...transform._call import Call
from ...transform._transform import Transform
from ...tree._tree import Tree


def run_stage(part: Transform, values: Tree, params: dict[str, Tensor], state: Any, call: Call) -> Any:
    """Call a stage in the step of the call.

    Raises:
        TypeError: it reads a tensor's value.
    """
    try:
        return part.run(dict(values), _at(state, call.step or 0), params, call)
    except (RuntimeError, NotImplementedError) as error:
        if not any(text in str(error) for text in _READS):
            raise
        raise TypeError(
            f"{part!r} reads a tensor's value ({error}), so its messages are not known before it runs; decide by "
            f"host integers in the state, or with torch.where"
        ) from None


# Parts of torch's errors for tensors without data.
_READS = ("meta tensor", "Meta tensor")


def _at(state: Any, step: int) -> Any:
    """The state with its host counters `step` set to this step; of windows of several calls, before their last call."""
    if hasattr(state, "before_the_end"):
        return state.before_the_end(_at(state.inner, step))
    if hasattr(state, "_fields"):
        parts = zip(state._fields, state, strict=True)
        return type(state)(*(step if name == "step" and type(v) is int else _at(v, step) for name, v in parts))
    return type(state)(_at(part, step) for part in state) if type(state) in (tuple, list) else state
