"""The `_join_config` of a joinable, which torch's notifications read."""

from __future__ import annotations

from collections.abc import Callable

from ..transforms._axis_env import Work


class JoinConfig:
    """The `_join_config` of a joinable while it is inside a Join.

    torch's own `notify_join_context` reads these fields before it communicates; it reads `is_first_joinable`
    when one of torch's joinables notifies. This read triggers our notification, and its value False makes
    torch do nothing else.
    """

    enable = False
    throw_on_early_termination = False

    def __init__(self, notify: Callable[[], Work | None]) -> None:
        self.notify = notify

    @property
    def is_first_joinable(self) -> bool:
        self.notify()
        return False


def silent() -> None:
    """The notification of a joinable that is not the first."""
