"""A ZeroRedundancyOptimizer in a Join, and its whole state on one rank."""

from __future__ import annotations

import json
import math
import threading
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
import torch.distributed.algorithms.join as torch_join
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from ..agreement import read_now
from ..groups import Communicator, GroupAxis, mesh_from_group, plain
from ..shared_memory import flat_view
from ._zero_shard import Gradients, Shard, own_gradients


class NoState(dict[Any, Any]):
    """The state of parameters that no rank has as a whole."""

    def __missing__(self, key: Any) -> NoReturn:
        raise RuntimeError(
            "a ZeroRedundancyOptimizer has no whole state of a parameter, only slices of it on each rank; call "
            "consolidate_state_dict(to=...) on all ranks, then state_dict() on that rank"
        )


class Owned(NamedTuple):
    """One rank's part of the state of a parameter."""

    number: int  # of the parameter
    start: int  # its slice of the flat parameter
    stop: int
    state: dict[str, Any]  # name -> value; tensors are of the slice, of the whole leaf, or 0-d
    sliced: bool = True  # whether tensors of the slice are flat


def numbers_of(p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter; of one without dims, whose slice is a vector of one element, with values without dims."""
    if p.dim():
        return state
    return {name: v.reshape(()) if isinstance(v, Tensor) and v.numel() == 1 else v for name, v in state.items()}


def gather_states(
    mesh: Communicator, to: int, owned: Iterable[Owned], shapes: Sequence[torch.Size], device: torch.device
) -> dict[int, dict[str, Any]] | None:
    """The states of all parameters by their number, on rank `to`; None on the other ranks.

    Args:
        owned: This rank's parts.
        shapes: The shapes of the parameters.

    Raises:
        TypeError: on all ranks: some rank has a state that does not consist of tensors, numbers, strings, None, and lists,
            tuples and dicts of these.
    """
    rows: list[Any] = []
    parts: list[Tensor] = []
    bad = ""
    for number, start, stop, own, sliced in owned:
        try:
            rows.append([number, start, stop, _described(own, device, parts), sliced])
        except Exception as error:  # the other ranks wait for this one's part
            bad = str(error)
    head = torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8).to(device)
    body = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *parts])
    axis: GroupAxis = mesh.axes["data"]
    sizes = read_now(mesh, axis.run("all_gather", torch.tensor([len(head), len(body), bool(bad)], device=device), None))
    if refusing := [rank for rank, (*_, refuses) in enumerate(sizes) if refuses]:
        raise TypeError(
            "consolidate_state_dict: the state of an optimizer must consist of tensors, numbers and strings, in lists, tuples and "
            f"dicts; it does not on ranks "
            f"{refusing}{f', here {bad}' if bad else ''}"
        )
    here = axis.rank == to
    sent, all_sizes = torch.cat([head, body]), [head + body for head, body, _ in sizes]
    give = [len(sent) if r == to else 0 for r in range(axis.size)]
    take = all_sizes if here else [0] * axis.size
    received = axis.run("all_to_all_single", sent, (tuple(give), tuple(take)))
    if not here:
        return None
    found: dict[int, list[Owned]] = {}
    for (n, *_), data in zip(sizes, received.split(all_sizes), strict=True):
        at = n
        for number, start, stop, named, sliced in json.loads(bytes(read_now(mesh, data[:n]))):
            state, at = _rebuilt(named, data, at)
            found.setdefault(number, []).append(Owned(number, start, stop, state, sliced))
    return {number: _joined(some, shapes[number]) for number, some in sorted(found.items())}


def _described(value: Any, device: torch.device, parts: list[Tensor], where: str = "state") -> Any:
    """A value for JSON, as one kind and its content; the bytes of its tensors are appended to `parts`."""
    if isinstance(value, Tensor):
        raw = plain(value.detach().to(device))
        parts.append(flat_view(raw).view(torch.uint8))
        return [str(raw.dtype).removeprefix("torch."), list(raw.shape)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["", value]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_described(one, device, parts, f"{where}[{i}]") for i, one in enumerate(value)]]
    if isinstance(value, dict) and all(isinstance(key, (int, str)) for key in value):
        return ["dict", [[key, _described(one, device, parts, f"{where}[{key!r}]")] for key, one in value.items()]]
    raise TypeError(f"{where} is a {type(value).__name__}")


def _rebuilt(described: Any, data: Tensor, at: int) -> tuple[Any, int]:
    """What `_described` described, and the place in `data` behind its bytes."""
    kind, content = described
    if kind in ("list", "tuple", "dict"):
        found = []
        for one in content:
            key, one = one if kind == "dict" else (None, one)
            value, at = _rebuilt(one, data, at)
            found.append((key, value) if kind == "dict" else value)
        return {"list": list, "tuple": tuple, "dict": dict}[kind](found), at
    if not kind:
        return content, at
    dtype = getattr(torch, kind)
    end = at + math.prod(content) * dtype.itemsize
    return data[at:end].clone().view(dtype).reshape(content), end


def _joined(parts: list[Owned], shape: torch.Size) -> dict[str, Any]:
    """The state of a whole parameter, from those of its slices."""
    parts = sorted(parts, key=lambda part: part.start)
    first = parts[0].state
    if not parts[0].sliced:
        return first
    return {
        name: torch.cat([part.state[name] for part in parts]).reshape(shape)
        if isinstance(value, Tensor) and value.dim()
        else value
        for name, value in first.items()
    }


class StepsInAJoin(torch_join.Joinable):
    """The part of a ZeroRedundancyOptimizer that a Join of torch uses.

    Attributes:
        process_group: The ranks.
        run: A module's hook, which steps in the module's backward pass; or None.
    """

    process_group: Any
    run: Any
    param_groups: list[dict[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        self._uneven: Communicator | None = None  # for the messages of a Join
        self._watch: Any = None  # of the forward passes in a Join
        self._notified = False  # whether a Join has been notified of this iteration

    @abstractmethod
    def shadow_step(self) -> None:
        """The step of a rank that is out of input."""

    def _in_a_join(self) -> Communicator | None:
        """The mesh for a step in a Join; None outside of it."""
        return self._uneven if self._join_config.enable else None

    def _notify(self) -> None:
        """Notify a Join that this rank has input, once in an iteration."""
        if not self._notified:
            torch_join.Join.notify_join_context(self)
            self._notified = True

    def _before_forward(self, module: Any, args: Any) -> None:
        """Where this is a Join's first joinable: notify it before the messages of a module's forward pass."""
        if isinstance(module, DistributedDataParallel) and torch.is_grad_enabled() and self._join_config.enable:
            self._notify()

    def join_hook(self, **kwargs: Any) -> torch_join.JoinHook:
        """The hook of torch's Join: on a rank without input it steps with the gradients of the others.

        The first call makes a process group, so that the hook's messages are independent of the module's.
        """
        if self._uneven is None and self.run is None:
            # A second group: the module's messages and these are in no fixed order.
            ranks = dist.get_process_group_ranks(self.process_group)
            self._uneven = mesh_from_group(dist.new_group(ranks, use_local_synchronization=True))
        if self._watch is not None:  # of a Join that an exception has ended
            self._watch.remove()
        before_forward = weakref.WeakMethod(self._before_forward)
        self._watch = register_module_forward_pre_hook(
            lambda module, args: None if (own := before_forward()) is None else own(module, args)
        )
        return ZeroHook(self, self._watch)

    @property
    def join_device(self) -> torch.device:
        """The device of a Join's own messages."""
        return cast(torch.device, self.param_groups[0]["params"][0].device)

    @property
    def join_process_group(self) -> Any:
        """The process group."""
        return self.process_group


class ZeroHook(torch_join.JoinHook):
    """The work of a rank that is out of input.

    A main hook only begins a step, in a thread: the gradients are those of a pass of the module, whose own main hook may
    come after this one. The next main hook, or the post hook, waits for it.
    """

    def __init__(self, zero: StepsInAJoin, watch: Any) -> None:
        self._zero, self._watch = zero, watch
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def main_hook(self) -> None:
        self._finish()
        if self._zero.run is None:  # else the shadow pass of the module steps
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._watch.remove()
        self._finish()

    def _run(self) -> None:
        try:
            self._zero.shadow_step()
        except BaseException as error:
            self._error = error

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def gradients(mesh: Communicator, shards: Sequence[Shard], live: bool) -> list[Gradients]:
    """The gradients by group and path: those of this rank, or on a rank without input its slices of another's.

    DistributedDataParallel leaves no gradients on a rank without input. The lowest of the other ranks sends it
    those of its slices.
    """
    axis: Any = mesh.axes["data"]
    device = shards[0].pieces.buckets[0].device if shards[0].pieces.buckets else torch.device("cpu")
    bits = torch.zeros(axis.size, device=device)
    bits[axis.rank] = float(live)
    with_input = read_now(mesh, axis.run("psum", bits, None))
    own = own_gradients(shards)
    if all(with_input):
        return own
    sender = with_input.index(1.0)
    sends = axis.rank == sender
    has = [[float(sends and grad is not None) for grad in of.values()] for of in own]
    counts = [len(of) for of in has]
    given = axis.run("psum", torch.tensor(sum(has, []), device=device), None).split(counts)
    found = []
    for shard, of, mask in zip(shards, own, given, strict=True):
        present = dict(zip(shard.params, read_now(mesh, mask), strict=True))
        parts: Gradients = {}
        for k in range(len(shard.pieces.buckets)):
            parts.update(_receive(axis, shard, k, of, sender, with_input))
        found.append(of if live else {path: part if present[path] else None for path, part in parts.items()})
    return found


def _receive(
    axis: GroupAxis, shard: Shard, k: int, grads: Gradients, sender: int, with_input: list[float]
) -> dict[str, Tensor]:
    """The slices of one bucket's gradients on a rank without input; on the others empty slices."""
    pieces, bucket, sizes = shard.pieces, shard.pieces.buckets[k], shard.pieces.sizes(k)
    give, take = [0] * axis.size, [0] * axis.size
    flat = torch.empty(0, dtype=bucket.dtype, device=bucket.device)
    if axis.rank == sender:
        give = [0 if with_input[r] else sizes[r] for r in range(axis.size)]
        leaves = {p: torch.zeros_like(shard.params[p]) if grads[p] is None else grads[p] for p in bucket.paths}
        whole = pieces.pack(k, leaves)  # type: ignore[arg-type]
        flat = torch.cat([part for part, n in zip(whole.split(list(sizes)), give, strict=True) if n] or [flat])
    if not with_input[axis.rank]:
        take[sender] = sizes[axis.rank]
    received = axis.run("all_to_all_single", flat, (tuple(give), tuple(take)))
    return {} if with_input[axis.rank] else pieces.leaves_own(k, received)
