"""The operations of a step as spans of a timeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...buckets._grad_buffer import GradBuffer
from ...groups.axes._traffic import Traffic, is_watched
from ...transforms._axis_env import Work
from ...transforms.program._ops import Agree, Ends

STEP = "step"  # around the others
_NAMES = {
    "stages": "backward and launches",
    "observe": "wait for gradients",
    "judge": "judge",
    "step": "optimizer",
    "gather": "gather of parameters",
    "keep": "states",
}


def named(
    launch: Callable[[int, GradBuffer], Work | None], traffic: Traffic
) -> Callable[[int, GradBuffer], Work | None]:
    """A function that launches buckets, whose messages have the numbers of these in traces."""

    def run(index: int, out: GradBuffer) -> Work | None:
        with traffic.span(f"bucket {index}"):
            return launch(index, out)

    return run


def spanned(memory: Any, traffic: Traffic) -> Any:
    """The memory, whose operations are spans where somebody watches."""
    return Spanned(memory, traffic) if is_watched() else memory


class Spanned:
    """A memory whose operations are spans."""

    def __init__(self, memory: Any, traffic: Traffic) -> None:
        self._memory, self._traffic = memory, traffic

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._memory, name)

        def run(*args: Any) -> Any:
            op = args[0] if args else None
            title = _NAMES.get(name, name)
            if isinstance(op, Agree):
                title = f"agree: {op.moment}"
            elif isinstance(op, Ends):
                title = f"{op.part.spec.name or 'after'} of {op.on}"
            with self._traffic.span(title):
                return method(*args)

        return run
