"""The store after its host has ended: every call raises torch's error for it, so that typed errors follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from fjoin.groups._failures import Store, is_backend_error


class Ended:
    """A store whose host has ended; it counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def add(self, key: str, amount: int) -> int:
        self.calls += 1
        raise dist.DistNetworkError("Connection reset by peer")

    def set(self, key: str, text: str) -> None:
        self.add(key, 1)


def test_each_call_of_a_broken_store_raises_the_error_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: Any = Ended()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: dist.HashStore())
    store = Store()
    store._store = ended
    for call in (lambda: store.add(1.0, "a"), lambda: store.set(1.0, "a", "b"), lambda: store.get(1.0, "a")):
        with pytest.raises(dist.DistNetworkError, match="Connection reset by peer") as caught:
            call()
        assert is_backend_error(caught.value)
    assert ended.calls == 1  # each attempt would make torch print a warning
