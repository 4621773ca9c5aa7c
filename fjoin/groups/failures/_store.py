"""The rendezvous store, with a time limit on every wait for its answer.

The client of a TCPStore has no limit of its own: where the store's host is stopped or cut off it waits forever.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
# Calls with a longer limit also wait for the answer to an earlier call.
_PATIENT_S = 1.0
# Threads of calls that have not returned, and how long the end of the program waits for each.
_LEFT: list[tuple[threading.Thread, float]] = []


class Unanswered(RuntimeError):
    """A call did not return within its limit."""


def within(seconds: float, call: Callable[[], T], last_s: float = 5.0) -> T:
    """The result of `call()`, which runs in a thread of its own.

    Args:
        last_s: How long the end of the program waits for a call that has not returned.

    Raises:
        Unanswered: it has not returned within `seconds`. Its thread keeps running; the end of the program waits for it,
            since a thread that returns from C++ while the interpreter ends would abort the process.
    """
    answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((True, call()))
        except BaseException as error:
            answer.put((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        fine, value = answer.get(timeout=max(seconds, 0.0))
    except queue.Empty:
        if not _LEFT:
            atexit.register(_await_left)
        _LEFT.append((thread, last_s))
        raise Unanswered(f"no answer within {seconds:g} s") from None
    if not fine:
        try:
            raise value
        finally:  # a frame that refers to its own exception is freed only by the garbage collector
            del value
    return value  # type: ignore[no-any-return]


def _await_left() -> None:
    start = time.monotonic()
    for thread, last_s in _LEFT:
        thread.join(max(0.0, start + last_s - time.monotonic()))


class Store:
    """The default store of torch.distributed, with keys of fjoin's own.

    The first argument of each call is the time limit for the answer, in seconds. While an earlier call is unanswered,
    calls with a limit of at most 1 s fail at once; after a broken connection all calls fail.

    Raises:
        Unanswered: no answer in time.
        RuntimeError: torch's errors, such as a refused connection; DistNetworkError after a broken one.
    """

    def __init__(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._store: Any = dist.distributed_c10d.PrefixStore("fjoin", store)
        self._unanswered: threading.Event | None = None
        self._broken: str = ""

    def set(self, seconds: float, key: str, text: str) -> None:
        self._ask(seconds, lambda: self._store.set(key, text))

    def get(self, seconds: float, key: str) -> str | None:
        """The text under a key; None where the key is not set yet."""
        found = self._ask(seconds, lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else found.decode()

    def get_all(self, seconds: float, keys: list[str]) -> list[str] | None:
        """The texts under some keys, in one request where the store can; None where one of them is missing."""

        def get() -> list[bytes] | None:
            if not self._store.check(keys):
                return None
            return self._store.multi_get(keys) if self._store.has_extended_api() else list(map(self._store.get, keys))  # type: ignore[no-any-return]

        found = self._ask(seconds, get)
        return None if found is None else [text.decode() for text in found]

    def add(self, seconds: float, key: str) -> int:
        """Increment a key by one; returns the new value."""
        return int(self._ask(seconds, lambda: self._store.add(key, 1)))

    def _ask(self, seconds: float, call: Callable[[], Any]) -> Any:
        if self._broken:  # each attempt would make torch print a warning
            raise dist.DistNetworkError(self._broken)
        if self._unanswered is not None and not self._unanswered.wait(seconds if seconds > _PATIENT_S else 0.0):
            raise Unanswered("the store has not answered an earlier call")
        answered = self._unanswered = threading.Event()

        def asked() -> Any:
            try:
                return call()
            finally:
                answered.set()

        try:
            return within(seconds, asked)
        except dist.DistNetworkError as error:
            self._broken = f"the connection to the host of the rendezvous store has ended: {error}"
            raise
