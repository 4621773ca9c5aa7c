"""The law of devices: code that runs on a CPU also runs on a GPU, as far as a machine without one can check.

Tensors without data ("meta") stand for the GPU's: their values cannot be read, and torch refuses to mix them with
others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import transforms as tx
from ..transforms.axes import bind_axes
from ..transforms.base import Needs, trees
from ..transforms.pipelines import CountingAxis
from ._compare import axes_for, params_like

_ELSEWHERE = torch.device("meta")


def stays_on_its_device(make: Callable[[], tx.Transform]) -> None:
    """Messages and results are on the gradients' device, in buckets too, and the host waits for no value or copy."""
    names, whole = axes_for(make), params_like()
    buckets = [] if Needs.TREE in make().needs else [(path,) for path in whole]
    with _without_data(), bind_axes({name: _Elsewhere(name, n, [], names) for name, n in names.items()}):
        for paths in (tuple(whole), *buckets):
            part, params = make(), _elsewhere(whole)
            state = trees.restrict(part.init(params), params, paths)
            some = {path: params[path] for path in paths}
            elsewhere = torch.ones((), device=_ELSEWHERE)
            weights = (1.0, 2.0, None, 0.0, torch.ones(()), elsewhere) if len(paths) == len(whole) else (1.0, elsewhere)
            for call, weight in enumerate(weights):
                with _watched(call):
                    out, state = part.update(_elsewhere(some), state, some, weight=weight)
                stayed = all(leaf.device == _ELSEWHERE for leaf in optree.tree_leaves(out))
                assert stayed, "gradients came back on the host"


def encodes_on_its_device(make: Callable[[], tx.Codec]) -> None:
    """Codes are on the floats' device, decoded floats on the codes' device, and the host waits for no value or copy."""
    codec = make()
    with _without_data():
        for call, n in enumerate((300, 300, 1, 0)):
            x = torch.empty(2, n, device=_ELSEWHERE)
            noise = []
            if codec.stochastic:
                places, key = (torch.empty(size, dtype=torch.int32, device=_ELSEWHERE) for size in (x.shape, ()))
                noise = [tx.Noise(places, key, key)]
            with _watched(call):
                codes = codec.encode(x, *noise)
                floats = codec.decode(codes, n)
            assert codes.device == _ELSEWHERE, "codes were made on the host"
            assert floats.device == _ELSEWHERE, "floats were made on the host"


def steps_on_its_device(make: Callable[[], tx.Optimizer]) -> None:
    """New parameters and states, except 0-d counters, are on the parameters' device; the host does not wait."""
    with _without_data():
        part, param = make().at("layer.weight"), _elsewhere(params_like()["layer.weight"])
        state = part.init_param(param)
        for call in range(3):
            with _watched(call):
                param, state = part.step_param(param, _elsewhere(param), state)
            both: Any = (param, state)
            for leaf in optree.tree_leaves(both):
                on_host = isinstance(leaf, Tensor) and leaf.dim() and leaf.device != _ELSEWHERE
                assert not on_host, "a parameter or its state came back on the host"


def _elsewhere(tree: Any) -> Any:
    return optree.tree_map(lambda leaf: torch.empty_like(leaf, device=_ELSEWHERE), tree)


class NoWaiting(TorchFunctionMode):
    """Raises where tensors of the host and of the other device are mixed, or the host would wait for a copy between
    them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given: Any = (args, kwargs)
        tensors = [x for x in optree.tree_leaves(given) if isinstance(x, Tensor)]
        host = [x for x in tensors if x.device.type == "cpu"]
        name, made = getattr(func, "__name__", ""), isinstance(out, Tensor) and out.device == _ELSEWHERE
        if name in _COPIES:
            waits = made and host and not (kwargs.get("non_blocking") or any(x is True for x in args[1:]))
            assert not waits, f"the host waits for a copy: {name}; pass non_blocking=True"
        elif name in _MAKERS:
            copies = made and not any(x.device == _ELSEWHERE for x in tensors if name != "new_tensor")
            assert not copies, f"the host waits for a copy: {name}; use torch.full, or .to(device, non_blocking=True)"
        elif len(host) < len(tensors):
            # torch accepts a 0-d host tensor as a number, but not as the condition of `where`, and not in stack or cat.
            mixed = any(x.dim() for x in host) or (host and (name in _JOINS or name == "where" and host[0] is args[0]))
            assert not mixed, f"it mixes devices: {name}"
        return out


def _watched(call: int) -> contextlib.AbstractContextManager[Any]:
    """A watch from the second call on: the first call may set up cached values."""
    return NoWaiting() if call else contextlib.nullcontext()


_COPIES = {"to", "copy_", "type_as"}
_MAKERS = {"tensor", "as_tensor", "asarray", "new_tensor"}
_JOINS = {"stack", "cat", "concat", "hstack", "vstack"}


@contextlib.contextmanager
def _without_data() -> Iterator[None]:
    try:
        with torch.no_grad():
            yield
    except RuntimeError as error:  # torch has no error class for these
        text = str(error)
        if "same device" in text or "expected device" in text:
            raise AssertionError(f"it mixes devices: {text}") from error
        if "meta tensor" in text:
            raise AssertionError(f"it reads a tensor's value, which waits for the device: {text}") from error
        if "not an accelerator" in text:
            raise AssertionError(f"no generator draws tensors without data ({text})") from error
        raise


class _Elsewhere(CountingAxis):
    """An axis that refuses messages on the host."""

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        assert x.device == _ELSEWHERE, f"a message was made on the host: {op} of {tuple(x.shape)}"
        return super().run(op, x, arg)
