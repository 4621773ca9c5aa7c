"""The communicators of an accelerator's groups exist before the first step, and the wait for them has a limit."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.groups import _connect as _rendezvous
from fjoin.transforms.base import devices
from tests.groups.test_device_waits import Later
from tests.traffic import watched

AXES: dict[str, int] = {"node": 2, "local": 1}


def make_a_mesh(queries: float) -> Any:
    """What a mesh sends where gloo passes for the backend of an accelerator, and how it ends."""
    with (
        mock.patch.object(_rendezvous, "speaks", lambda group, kind: True),
        mock.patch.object(devices, "current", lambda: torch.device("cpu")),
        mock.patch.object(devices, "here", lambda device: Later(queries)),
        watched() as sent,
    ):
        try:
            mesh = fjoin.mesh(AXES, timeout_s=1.5)
        except fjoin.CollectiveTimeout as error:
            return str(error)
        found = len(sent)
        with fjoin.bind(mesh):
            tx.psum(torch.ones(1), "node")
        return found


def test_each_group_has_sent_a_message_before_a_mesh_is_there(pool: Any) -> None:
    assert pool.run(2, make_a_mesh, 2) == [len(AXES) + 1] * 2  # and that of all ranks


def test_a_communicator_that_is_never_made_is_a_time_out(pool: Any) -> None:
    for text in pool.run(2, make_a_mesh, float("inf")):
        assert "not all ranks have made their communicators within 1.5 s" in text


@pytest.mark.parametrize("kind", [None, "cuda"])
def test_groups_of_the_host_send_nothing(pool: Any, kind: str | None) -> None:
    assert pool.run(2, messages_of_a_mesh, kind) == [0, 0]


def messages_of_a_mesh(kind: str | None) -> int:
    with mock.patch.object(devices, "kind", lambda: kind), watched() as sent:
        fjoin.mesh(AXES)
    return len(sent)
