"""Packets that announce the parts of a message to other ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ._exchange import Exchange
from ._memory import HostMemory
from ._packets import DROPPED, INLINE, INLINE_BYTES, PART, Head, Peer


def announce(exchange: Exchange, peers: Mapping[int, Peer], memory: HostMemory) -> None:
    """Announce this rank's parts of a message to the ranks that they are for, and send small ones at once."""
    drops = [memory.dropped.popleft() for _ in range(len(memory.dropped))]
    place: tuple[int, int, int] | None = None
    for rank, (start, stop) in exchange.given.items():
        peer, part = peers[rank], exchange.source[start:stop]
        for region in peer.knows.intersection(drops):
            peer.knows.discard(region)
            peer.send(Head(DROPPED, region=region))
        head = exchange.key[0], exchange.fingerprint, exchange.key[1]
        nbytes = part.numel() * part.element_size()
        if nbytes <= INLINE_BYTES and exchange.inline:
            data = part.resolve_conj().resolve_neg().view(torch.uint8).numpy() if nbytes else b""
            peer.send(Head(INLINE, *head, nbytes=nbytes), data)
            continue
        if place is None:
            place = exchange.place(memory)
        region, size, first = place
        peer.knows.add(region)
        first += start * part.element_size()
        peer.send(Head(PART, *head, region, size, first, nbytes))
        exchange.untaken.add(rank)
