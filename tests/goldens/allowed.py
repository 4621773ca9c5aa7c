"""The rows whose number of messages may change when the step has one record, and why."""

from __future__ import annotations

MAY_CHANGE: dict[str, str] = {}
