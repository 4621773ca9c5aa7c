"""`elastic`."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from .._errors import CollectiveTimeout, PeerLost, described
from ..groups import is_backend_error
from ..transforms.base import checks
from ._members import Members, NewGeneration
from ._membership import Membership, RunStore

T = TypeVar("T")
_LOG = logging.getLogger("fjoin")


def elastic(
    train: Callable[[Members], T],
    *,
    ranks: int,
    at_least: int = 1,
    store: str | None = None,
    timeout_s: float = 60.0,
    transport: str = "auto",
    ordered: bool = False,
) -> T | None:
    """Train on ranks that come and go: the others finish the step of a rank that dies, and a new one takes its place.

    Each process calls it. It calls `train(members)` once in each generation, which is a fixed set of ranks; the next
    generation continues from the newest state of any member. The same samples of a step are then shared by other ranks,
    and no rescaling is done, so a step on fewer ranks is the step of one process on the same batch.

    Start the store in a process of its own, and each rank by its own launcher, which starts it again if it dies; see
    docs/elastic.md.

    Args:
        train: Makes the step and the loop of a generation, see the example; the same function on all ranks.
        ranks: The number of ranks that the run waits for at its start, and never exceeds; further ones wait.
        at_least: The number of ranks with which it goes on, and with which it starts after `timeout_s`.
        store: host:port of a torch TCPStore that no rank holds; by default the environment variable FJOIN_STORE.
        timeout_s: Seconds after which a message fails, and for which members that live are waited for.
        transport, ordered: As for `mesh`.

    Returns:
        What `train` has returned in the generation that completed the training; None in a process that came later.

    Raises:
        PeerLost: the store is lost; fewer than `at_least` ranks are left; the training function of another rank has
            raised.
        ValueError: an argument that cannot be used, or torch.distributed is initialised already.
        Exception: whatever `train` raises; the run ends on all ranks.

    >>> import torch.distributed as dist
    >>> from fjoin import transforms as tx
    >>> pipeline, data = tx.fuse(tx.mean("data"), tx.sgd(0.5)), torch.arange(8.0)
    >>> def train(members):
    ...     step = fjoin.train_step(lambda p, x: (p["w"] * x).mean(), pipeline, mesh=members.mesh, weight=len)
    ...     state = members.resume(step, {"w": torch.zeros(())})
    ...     sampler = fjoin.Shuffled(len(data), 4, mesh=members.mesh)
    ...     for batch in members.join(step, torch.utils.data.DataLoader(data, batch_sampler=sampler), epochs=3):
    ...         state, metrics = step(state, batch)
    ...     return state
    >>> store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # in a run: in its own process
    >>> state = fjoin.elastic(train, ranks=1, store=f"127.0.0.1:{store.port}")
    >>> state.step, state.params["w"]
    (6, tensor(-10.5000))

    Source: the function of the ranks is the face of Horovod's elastic training.
    """
    checks.whole_number("ranks", ranks, 1)
    checks.whole_number("at_least", at_least, 1)
    if at_least > ranks:
        raise ValueError(f"at_least must be at most ranks, got at_least={at_least} and ranks={ranks}")
    address = store or os.environ.get("FJOIN_STORE", "")
    if not address:
        raise ValueError("elastic needs the store at which ranks meet: set FJOIN_STORE=host:port, or pass store=")
    if dist.is_initialized():
        raise ValueError("elastic makes the process groups of each generation itself; call it before fjoin.mesh")
    stores = RunStore.at(address, timeout_s), RunStore.at(address, timeout_s)
    membership = Membership(*stores, ranks, at_least, timeout_s)
    members = Members(membership, timeout_s, {"timeout_s": timeout_s, "transport": transport, "ordered": ordered})
    failure: BaseException | None = None
    result: T | None = None
    try:
        while membership.form():
            failure = None
            try:
                members.begin()
                result = train(members)
                members.finish()
                membership.end_run("")  # all ranks have met, so the training is complete
                return result
            except NewGeneration:
                pass
            except Exception as error:
                if not isinstance(error, (PeerLost, CollectiveTimeout)) and not is_backend_error(error):
                    membership.end_run(
                        f"the run at the store {address} has ended, since the training function of a rank has failed: "
                        f"{described(error)}. Another run needs a new store"
                    )
                    raise
                _LOG.warning("generation %d has ended: %s", members.generation, described(error))
                failure = error
                freed: BaseException | None = error
                while freed is not None:  # frames hold messages, and these the connections, which others wait for
                    traceback.clear_frames(freed.__traceback__)
                    freed.__traceback__, freed = None, freed.__cause__ or freed.__context__
            members.end(failure)
        if membership.generation == 0:
            _LOG.warning(
                "the run at the store %s was complete before this process came; another needs a new store", address
            )
        return result
    except BaseException as error:
        failure = error
        raise
    finally:
        members.close()
        members.end(failure)
        del failure
