"""The law of devices: what runs on a CPU runs on a GPU too, as far as that can be told without one.

Tensors without data, on a device of their own, meet the same checks there as on any other that is not the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode

from .. import transforms as tx
from ..transforms._bucketwise import restrict
from ..transforms.axes._env import bind_axes
from ._compare import params_like
from ._ranks import axes_for

_ELSEWHERE = torch.device("meta")


def stays_on_its_device(make: Callable[[], tx.Transform]) -> None:
    """What it sends and returns lies where the gradients lie, in buckets too, and no value of theirs is read."""
    if not make().vmappable:  # it may look at values, which waits for the device
        return
    names = axes_for(make)
    with _fake(), bind_axes({name: _Elsewhere(n) for name, n in names.items()}):
        whole = params_like()
        for paths in (tuple(whole), *((path,) for path in whole)):
            part, params = make(), _elsewhere(whole)
            state = restrict(part.init(params), params, paths)
            some = {path: params[path] for path in paths}
            for weight in (2.0, None, 0.0, torch.ones(()), torch.ones((), device=_ELSEWHERE)):
                with NoWaiting():
                    out, state = part.update(_elsewhere(some), state, some, weight=weight, lane={"x": 1.0})
                assert all(leaf.device == _ELSEWHERE for leaf in optree.tree_leaves(out)), (
                    "gradients came back on the host"
                )


def encodes_on_its_device(make: Callable[[], tx.Codec]) -> None:
    """Codes lie where the floats lie, and floats where the codes lie, and no value of theirs is read."""
    codec = make()
    with _fake():
        for n in (0, 1, 300):
            x = torch.empty(2, n, device=_ELSEWHERE)
            noise = []
            if codec.noisy:
                places, key = (torch.empty(size, dtype=torch.int32, device=_ELSEWHERE) for size in (x.shape, ()))
                noise = [tx.Noise(places, key, key)]
            with NoWaiting():
                codes = codec.encode(x, *noise)
                floats = codec.decode(codes, n)
            assert codes.device == _ELSEWHERE, "codes were made on the host"
            assert floats.device == _ELSEWHERE, "floats were made on the host"


def steps_on_its_device(make: Callable[[], tx.Optimizer]) -> None:
    """Parameters and states lie where the parameters lay, but for counters of no dimension; no value of theirs is read."""
    with _fake():
        part, param = make().at("layer.weight"), _elsewhere(params_like()["layer.weight"])
        state = part.init_param(param)
        for _ in range(3):
            with NoWaiting():
                param, state = part.step_param(param, _elsewhere(param), state)
            both: Any = (param, state)
            for leaf in optree.tree_leaves(both):
                on_host = isinstance(leaf, Tensor) and leaf.dim() and leaf.device != _ELSEWHERE
                assert not on_host, "a parameter or its state came back on the host"


def _elsewhere(tree: Any) -> Any:
    return optree.tree_map(lambda leaf: torch.empty_like(leaf, device=_ELSEWHERE), tree)


class NoWaiting(TorchFunctionMode):
    """Raises where values of the host would be copied to the other device, and the copy waited for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        there = isinstance(out, Tensor) and out.device == _ELSEWHERE
        if func in _COPIES and there and not kwargs.get("non_blocking"):
            assert not any(isinstance(x, Tensor) and x.device.type == "cpu" for x in args), (
                f"it waits for a copy: {func}"
            )
        if func in _MAKERS and there:
            assert isinstance(args[0], Tensor), f"it waits for a copy: {func} of {args[0]!r}; use torch.full"
        return out


_COPIES = {torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.type_as, torch.where, torch.Tensor.where}
_MAKERS = {torch.tensor, torch.as_tensor}


@contextlib.contextmanager
def _fake() -> Iterator[None]:
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise AssertionError(f"it reads a tensor's value, which waits for the device: {error}") from error
    except RuntimeError as error:  # torch has no class of its own for tensors on two devices
        if "same device" not in str(error):
            raise
        raise AssertionError(f"it mixes devices: {error}") from error


class _Elsewhere:
    """An axis of ranks with tensors on the other device, and nothing but shapes."""

    token: Tensor | None = None

    def __init__(self, size: int) -> None:
        self.size = size

    def index(self) -> Tensor:
        return torch.tensor(0)

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        assert x.device == _ELSEWHERE, f"a message was made on the host: {op} of {tuple(x.shape)}"
        if op == "all_to_all_single":
            return x.new_empty(sum(arg[1]), *x.shape[1:])
        if op == "all_gather":
            return x.new_empty(self.size, *x.shape)
        return x.new_empty(x.shape[1:]) if op == "psum_scatter" else torch.empty_like(x)

    def joint(self, axes: tuple[str, ...]) -> None:
        return None
