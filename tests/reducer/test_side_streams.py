"""Two streams in turn: what waits for what, on streams that write down their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fjoin.step._interleave import SideStreams
from fjoin.transforms.base import devices

HOST = torch.device("cpu")


class Stream:
    """Writes down what it runs and waits for."""

    current: Stream

    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append((self.name, f"waits for {other.name}"))

    def wait_event(self, event: str) -> None:
        self._log.append((self.name, f"waits for {event}"))

    def __enter__(self) -> None:
        self._before, Stream.current = Stream.current, self

    def __exit__(self, *error: object) -> None:
        Stream.current = self._before


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    log: list[tuple[str, str]] = []
    names = iter("AB")
    Stream.current = Stream("main", log)
    monkeypatch.setattr(devices, "new_stream", lambda device: Stream(next(names), log))
    monkeypatch.setattr(devices, "current_stream", lambda device: Stream.current)
    monkeypatch.setattr(devices, "here", lambda device: log[-1][1])
    return log


def test_functions_run_in_turn_behind_the_caller_and_the_first(log: Any) -> None:
    side = SideStreams(HOST)
    for _ in range(2):  # steps
        log.clear()
        side.begin()
        ends = [side.start(lambda i=i: log.append((Stream.current.name, f"bucket {i}"))) for i in range(3)]  # type: ignore[misc]
        runs = [[what for name, what in log if name == stream] for stream in "AB"]
        first = runs[0] if runs[0][1] == "bucket 0" else runs[1]
        second = runs[1] if first is runs[0] else runs[0]
        wait = "waits for main"
        assert first == [wait, "bucket 0", wait, "waits for bucket 0", "bucket 2"]
        assert second == [wait, "waits for bucket 0", "bucket 1"]
        log.clear()
        for end in ends:
            end.wait()
        assert log == [("main", f"waits for bucket {i}") for i in range(3)]
