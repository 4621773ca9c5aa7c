"""Which accesses to memory are ordered, among streams that run at the same time: vector clocks, by bytes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

HOST = "host"


class Access(NamedTuple):
    low: int
    high: int
    stream: str
    time: int
    writes: bool
    op: str


class Block:
    """Memory that is in use.

    Attributes:
        stream: In which it was allocated: when it is free, the allocator gives it to the next kernel there.
    """

    def __init__(self, storage: StorageWeakRef, stream: str) -> None:
        self.storage, self.stream, self.accesses = storage, stream, list[Access]()
        self.recorded: set[str] = set()  # streams for which the allocator waits before it gives the memory away


def extent(x: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the byte behind its last."""
    if not x.numel():
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    size = x.element_size()
    return x.storage_offset() * size, (x.storage_offset() + last + 1) * size


class Clocks:
    """The order of what streams and the host do.

    Attributes:
        reports: Accesses of two streams to the same memory that nothing orders, one of which writes.
    """

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, int]] = {}
        self._blocks: dict[int, Block] = {}
        self._free: list[Block] = []
        self.reports: list[str] = []
        self.pinned: dict[int, StorageWeakRef] = {}

    # -- order -----------------------------------------------------------------------------------

    def state(self, stream: str) -> dict[str, int]:
        """All that a stream is ordered behind now, as an event at this place."""
        return dict(self._seen.setdefault(stream, {}))

    def wait(self, stream: str, state: dict[str, int]) -> None:
        """What a stream or the host does from now on is ordered behind an event."""
        own = self._seen.setdefault(stream, {})
        for other, time in state.items():
            own[other] = max(own.get(other, 0), time)

    def _ordered(self, access: Access, stream: str) -> bool:
        return access.stream == stream or self._seen.setdefault(stream, {}).get(access.stream, 0) >= access.time

    # -- accesses --------------------------------------------------------------------------------

    def launch(self, stream: str, op: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """A kernel or a message in a stream."""
        self.wait(stream, self.state(HOST))
        own = self._seen[stream]
        time = own[stream] = own.get(stream, 0) + 1
        self._collect()
        for block in [block for block in self._free if block.stream == stream]:
            self._free.remove(block)
            for old in block.accesses:
                if old.stream not in block.recorded and not self._ordered(old, stream):
                    self._report("free memory is reused by", op, stream, old)
        for tensors, writing in ((reads, False), (writes, True)):
            for x in tensors:
                self._access(x, Access(*extent(x), stream, time, writing, op))

    def _access(self, x: Tensor, new: Access) -> None:
        block = self.allocated(x, new.stream)
        kept = []
        for old in block.accesses:
            apart = old.high <= new.low or new.high <= old.low
            ordered = self._ordered(old, new.stream)
            if not apart and not ordered and (old.writes or new.writes) and old.time and old.stream != new.stream:
                self._report("not ordered:", new.op, new.stream, old)
            within = new.low <= old.low and old.high <= new.high
            if not (within and ordered and (new.writes or old.stream == new.stream and not old.writes)):
                kept.append(old)
        block.accesses = [*kept, new]

    def allocated(self, x: Tensor, stream: str) -> Block:
        """The block of a tensor, which is new where it was not known."""
        storage = x.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None or block.storage.expired():
            self._collect()
            block = self._blocks[storage._cdata] = Block(StorageWeakRef(storage), stream)
        return block

    def record(self, x: Tensor, stream: str) -> None:
        """Tell the allocator that a stream uses this memory."""
        self.allocated(x, stream).recorded.add(stream)

    def host_reads(self, x: Tensor) -> None:
        """The host reads memory of its own, to which a device may still be writing."""
        for old in self.allocated(x, HOST).accesses:
            if old.writes and not self._ordered(old, HOST):
                self._report("not ordered:", "a read", HOST, old)

    def _collect(self) -> None:
        for key, block in list(self._blocks.items()):
            if block.storage.expired():
                del self._blocks[key]
                self._free.append(block)

    def _report(self, how: str, op: str, stream: str, old: Access) -> None:
        did = "write to" if old.writes else "read of"
        self.reports.append(f"{how} {op} in {stream!r}, after the {did} it by {old.op} in {old.stream!r}")
