"""What counts as a failure of which rank: processes that have ended, texts of errors, a store without its host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

import fjoin
from fjoin.groups import Traffic
from fjoin.groups._failures import Failures
from fjoin.shared_memory import PeerGone


class Values(dict[str, Any]):
    """A store in this process."""

    def set(self, seconds: float, key: str, value: Any) -> None:
        self[key] = value

    def add(self, seconds: float, key: str) -> int:
        self[key] = super().get(key, 0) + 1
        return int(self[key])

    def get(self, seconds: float, key: str) -> Any:  # type: ignore[override]
        return super().get(key)

    def get_all(self, seconds: float, keys: list[str]) -> list[Any]:
        return [self[key] for key in keys]


def failures(rank: int, ranks: list[int], store: Any) -> Failures:
    return Failures(store, "mesh", rank, ranks, Traffic())


def test_the_first_report_stays() -> None:
    store = Values()
    for rank in (1, 0):
        failures(rank, [0, 1, 2], store).report(ValueError(f"of rank {rank}"), 3)
    reported = failures(2, [0, 1, 2], store).reported()
    assert isinstance(reported, fjoin.PeerLost) and reported.rank == 1 and "ValueError: of rank 1" in str(reported)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")
def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    def gone(change: Callable[[list[Any]], list[Any]]) -> set[int]:
        store = Values()
        found = failures(0, [0, 1], store)
        store["mesh/process/1"] = change(store["mesh/process/0"])
        return found.gone()

    assert gone(lambda own: own) == set() and gone(lambda own: [*own[:2], "1"]) == {1}
    assert gone(lambda own: [own[0], 2**22 + 1, "1"]) == {1}
    # Of another host, and of a process that did not see itself in /proc, nothing is known.
    assert gone(lambda own: ["elsewhere", 2**22 + 1, "1"]) == gone(lambda own: [own[0], 2**22 + 1, None]) == set()


def test_error_does_not_name_a_rank_that_lost_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a mesh of two axes rank 2 sees rank 0 close its connections, since rank 0 has lost rank 1."""
    found = failures(2, [10, 11, 12, 13], Values())
    for gone, blamed in (({1}, 1), ({0, 1}, None), (set(), 0), ({0}, 0)):
        monkeypatch.setattr(found, "gone", lambda gone=gone: gone)
        cause = found.root_cause(PeerGone(10), 3)
        assert isinstance(cause, fjoin.PeerLost) and (cause.rank, cause.step) == (blamed, 3), str(cause)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1", "PeerLost"),
        ("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation", "CollectiveTimeout"),
        ("Application timeout caused pair closure", "CollectiveTimeout"),  # the messages behind the one that waited
        ("DataLoader timed out after 5 seconds", "RuntimeError"),
        ("the connection pool of my loader is empty", "RuntimeError"),
        ("websocket handshake refused", "RuntimeError"),
        ("Lock wait timeout exceeded", "RuntimeError"),
        ("timed out waiting for the data server", "RuntimeError"),
    ],
)
def test_errors_that_count_as_a_lost_peer(text: str, kind: str) -> None:
    """An error of user code with a similar text does not count."""
    assert type(failures(0, [0], Values()).root_cause(RuntimeError(text), 0)).__name__ == kind
