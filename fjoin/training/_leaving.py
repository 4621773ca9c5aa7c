"""Whether a loop is left by its own code, by break or return, or by an exception."""

from __future__ import annotations

import dis
import inspect
import sys

# The instructions by which a for loop that is left drops its iterator; an exception drops it at the one that has raised.
_DROPS = {dis.opmap[name] for name in ("POP_TOP", "POP_ITER") if name in dis.opmap}


def left_by_code() -> bool:
    """Whether the loop over the generator that calls this is being left by break or return.

    Generators between the loop and this one, such as those of a progress bar, are closed by the loop's end too.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] in _DROPS
