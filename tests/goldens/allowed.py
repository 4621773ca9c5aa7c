"""The rows whose number of messages may change when the step becomes one program, and why.

In all other rows the scalars of a step ride in a message that is sent anyway, or have one of their own already, in
every phase, and with a weight as without one. Their messages stay as they are.
"""

from __future__ import annotations

_PHASE = (
    "The messages of a hook with phases are decided once for all steps today: its counts have a message of their own "
    "even in a phase whose reduction carries them. A program of each phase may leave that message out; it adds none."
)

MAY_CHANGE: dict[str, str] = {
    "switch_after 1": _PHASE,  # nothing, then a mean
    "switch_after 2": _PHASE,  # a function, then an encoded mean
    "every 0": _PHASE,
    "chain 5": _PHASE,  # every second step an encoded mean
    "plan: now and then": _PHASE,
    "plan: first means, then local steps": _PHASE,
}
