"""Binding the axes of a mesh for training loops of one's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .._errors import CollectiveTimeout, DesyncError, PeerLost, TransportError
from ..transforms._axis_env import bind_in_backward
from ..transforms._call_env import bound_call
from ._mesh import Mesh, check_mesh


@contextlib.contextmanager
def bind(mesh: Mesh) -> Iterator[None]:
    """Bind the axes of a mesh within a with block, in this thread and its backward passes: for training loops of your own.

    Args:
        mesh: A mesh made by `fjoin.mesh`.

    Raises:
        TypeError: `mesh` is no Mesh.
        PeerLost, CollectiveTimeout: a collective in the block fails. At the end of the block the mesh is taken down.
        DesyncError, TransportError: likewise, so that other ranks do not wait for this one.

    >>> from fjoin import transforms as tx
    >>> with fjoin.bind(fjoin.mesh({"data": -1})):
    ...     tx.psum(torch.tensor(2.0), "data")
    tensor(2.)
    """
    check_mesh("bind", mesh)
    try:
        with bind_in_backward(mesh.axes, bound_call()):
            yield
    except RuntimeError as error:
        failures = (PeerLost, CollectiveTimeout, DesyncError, TransportError)
        if isinstance(error, failures) or mesh.is_backend_error(error):
            mesh.raise_root_cause(error, None)
        raise
