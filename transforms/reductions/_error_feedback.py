"""Error feedback: the encoding error of one step is sent in the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..base import (
    Call,
    Compression,
    Inner,
    Needs,
    RankWeight,
    Shares,
    State,
    Summed,
    Transform,
    Tree,
    check_transform,
    factory,
    named_leaves,
    nonzero_or_one,
    readable_without_sync,
    to_device,
    zeros_at_least_f32,
)

T = TypeVar("T")
Once: TypeAlias = Callable[[str, Callable[[], Any]], Any]


def at_once(name: str, make: Callable[[], Any]) -> Any:
    return make()


class ResidualMemory:
    """The residuals of one call. An encoded reduction reads them with `residuals` and writes the new ones with `keep`.

    It holds the residuals of the paths in `error`. Other paths have none, such as those of a mean that only a codec
    around the whole transform encodes.

    Residuals are in units of weight * gradient and are divided as these sums are, so they are scaled when the divisor
    changes. A rank does not know the divisor when it sends. The residual sent in one step is scaled by
    min(1, w / residual_weight), since a small batch with a small divisor would amplify the residual of large ones. The
    difference stays in the residual.

    Attributes:
        flush: Whether a rank of weight 0 sends its residual.
        per_rank: Whether each rank must keep the error of its own message, and report its message as the others decode
            it.
        new: Path -> residual after the call.
        last: Path -> (residual_weight, divisor of the residual), (1, 2), float64; 0 before the first call. Empty if
            residuals are not scaled.
        coded: Where `per_rank`: path -> this rank's message as the other ranks decode it.
    """

    def __init__(
        self, error: Mapping[str, Tensor], flush: bool, last: Mapping[str, Tensor] | None = None, per_rank: bool = False
    ) -> None:
        self._error, self.flush, self.per_rank = error, flush, per_rank
        self.new: dict[str, Tensor] = {}
        self.last = dict(last or {})
        self.coded: dict[str, Tensor] = {}

    def __contains__(self, path: str) -> bool:
        return path in self._error

    def residuals(self, of: Mapping[str, Tensor], share: RankWeight, once: Once = at_once) -> list[Tensor]:
        """The residuals to send in this call, in the order of the leaves; zeros for leaves without one.

        Args:
            once: Makes a value once for all buckets; see `Rider.once`.
        """
        rows, table = self._rows(of)
        factors = _made("sent part", table, lambda: _scalars(_sent_part(table, share)) if rows else [], once)
        found = []
        for path, leaf in of.items():
            error = self._error[path] if path in self._error else torch.zeros_like(leaf, dtype=torch.float32)
            if error.shape != leaf.shape:
                raise ValueError(
                    f"the residual of {path!r} in the state has shape {tuple(error.shape)}, but the gradient {tuple(leaf.shape)}; it "
                    f"is the state of other parameters: start from init(params)"
                )
            found.append(_times(error, factors[rows[path]]) if path in rows else error)
        return found

    def keep(
        self,
        paths: Iterable[str],
        residuals: Iterable[Tensor],
        share: RankWeight,
        divisor: Tensor,
        once: Once = at_once,
    ) -> None:
        """Store the new residuals. Raises ValueError if a path has a new residual already.

        Args:
            residuals: The remainder of gradient plus sent residual after this call's messages.
            divisor: The divisor of the sums of this call, 0-d.
            once: As for `residuals`.
        """

        def change() -> tuple[list[Any], tuple[Tensor, ...]]:
            if not rows:
                return [], ()
            unsent, new = _change(table, share, divisor, self.flush)
            return _scalars(unsent), new.split(1)

        values = {path: value for path, value in zip(paths, residuals, strict=True) if path in self._error}
        rows, table = self._rows(values)
        # Also without rows: the first bucket may have none, and others some.
        unsent_of, last = _made("change", table, change, once)
        for path, value in values.items():
            if path in self.new:
                raise ValueError(
                    f"the gradient at {path!r} is encoded twice inside one error feedback, which has one memory; write "
                    f"chain(error_feedback(a), error_feedback(b))"
                )
            self.new[path] = value
            if path in rows:
                row = rows[path]
                self.new[path] = _plus(value, self._error[path], unsent_of[row])
                self.last[path] = last[row]

    def _rows(self, paths: Iterable[str]) -> tuple[dict[str, int], Tensor]:
        """Path -> row, and the tensors in `last` of these paths, each one once, (rows, 2)."""
        rows: dict[str, int] = {}
        distinct: dict[int, tuple[int, Tensor]] = {}
        for path in paths:
            if path in self._error and path in self.last:
                last = self.last[path]
                rows[path] = distinct.setdefault(id(last), (len(distinct), last))[0]
        found = [last for _, last in distinct.values()]
        return rows, found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0)


def _made(name: str, table: Tensor, make: Callable[[], T], once: Once) -> T:
    """What `make` makes of a table; once for all buckets that share the table with the first one."""
    first, made = once(name, lambda: (table, make()))
    return made if first is table else make()


def init_last(tree: Tree) -> dict[str, Tensor]:
    """`ResidualMemory.last` before the first call."""
    found: dict[torch.device, Tensor] = {}
    return {
        path: found.setdefault(leaf.device, torch.zeros(1, 2, dtype=torch.float64, device=leaf.device))
        for path, leaf in named_leaves(tree).items()
    }


def _sent_part(last: Tensor, share: RankWeight) -> Tensor:
    """The parts of the residuals that are sent, (rows,), in [0, 1]."""
    factor, worth = to_device(last.device, share.factor), last[:, 0]
    return torch.where((factor > 0) & (worth > 0), (factor / nonzero_or_one(worth)).clamp(max=1.0), 1.0)


def _change(last: Tensor, share: RankWeight, divisor: Tensor, flush: bool) -> tuple[Tensor, Tensor]:
    """The update of `last` in one call.

    Returns:
        The ratio new divisor / old divisor minus the sent part, which is the factor of the old residual in the new one,
        (rows,); and the new `last`, (rows, 2).
    """
    factor, now = to_device(last.device, share.factor), to_device(last.device, divisor, last.dtype)
    (worth, before), counts = last.unbind(1), torch.isfinite(now) & (now > 0)
    growth = torch.where(counts & (before > 0), now / nonzero_or_one(before), 1.0)
    unsent = growth - _sent_part(last, share)
    # A rank without input keeps its residual; the residual's weight is scaled to the new divisor.
    new = torch.where((factor > 0) | flush, torch.maximum(unsent.abs() * worth, factor), growth * worth)
    return unsent, torch.where(counts, torch.stack([new, now.expand_as(new)], 1), last)


def _scalars(x: Tensor) -> list[Any]:
    """Numbers where the host can read without waiting, 0-d tensors otherwise."""
    return x.tolist() if readable_without_sync(x) else list(x.unbind(0))


def _times(x: Tensor, factor: float | Tensor) -> Tensor:
    return x if isinstance(factor, float) and factor == 1.0 else x * factor


def _plus(x: Tensor, y: Tensor, factor: float | Tensor) -> Tensor:
    """x + factor y."""
    return x if isinstance(factor, float) and factor == 0.0 else x + factor * y


WithoutInput: TypeAlias = Literal["freeze", "flush"]


class ErrorState(NamedTuple):
    inner: State
    error: Summed[dict[str, Tensor]]  # path -> residual, not sent yet, in units of weight * gradient, at least float32
    # path -> (weight of the residual, its divisor), (1, 2), float64; 0 before the first call
    last: Shares[dict[str, Tensor]]


@factory
def error_feedback(hook: Transform, without_input: WithoutInput = "freeze") -> Transform:
    """Adds to each message the residual of this rank's earlier messages.

        u <- w g + e,  u' = u as the others decode it,  e <- u - u'

    On three and more ranks the mean is encoded again for its way back; the rank that summed it keeps that error. So
    nothing is lost forever: over all steps, the sum of the hook's results, plus the sum of the ranks' residuals divided
    by the last divisor, equals the sum of all means, rounded to float32 where something is encoded.

    Residuals are in units of weight * gradient and are scaled when the divisor of these sums changes. The residual sent
    in one step is scaled by min(1, w / residual_weight), with residual_weight from `last`, so a small batch does not
    amplify the residual of large ones. If too little of it was sent, or too much because other ranks have ended, the
    difference stays in the residual.

    A step in which no rank has input, or whose result is not finite, uses up no residual (`power_sgd` decides this for
    each matrix, `hierarchical_mean` for each rank's part). Residuals stay bounded only if the error of a codec is
    smaller than its input, as for casts, `int8`, `sign`, `top_k` and `power_sgd`. `qsgd` with few levels is unbiased,
    but its error may be larger.

    Args:
        hook: A hook that encodes or projects over one axis: `compress`, `power_sgd`, alone or
            in `partition`, or in a `chain` with stages that send nothing.
        without_input: The residual of a rank of weight 0: "freeze" keeps it until the rank has input again; "flush"
            sends all of it, whatever the weights of the other ranks, so that they get the rest of the rank's gradients.

    Returns:
        A `Transform` with state `ErrorState(inner, error, last)`; `error` and `last` differ between ranks.

    Raises:
        TypeError: nothing is encoded in `hook`.
        ValueError: `without_input` is none of the two; at `update`: encoded over several axes at once, or twice.

    Source: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes
        SignSGD, arXiv:1901.09847; the second error: Tang et al., DoubleSqueeze, arXiv:1905.05957.

    >>> from fjoin import transforms as tx
    >>> hook = error_feedback(tx.compress(tx.int8(), tx.mean("data")))
    >>> def one_rank(g):
    ...     state, sums = hook.init(g), 0.0
    ...     for _ in range(100):
    ...         mean, state = hook.update(g, state)
    ...         sums = sums + mean
    ...     return sums
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor([127.0, 0.3]), torch.tensor([127.0, 0.1])])[0]
    tensor([12700.,    20.])
    """
    encoded, inner = check_lossy(hook, without_input, "error_feedback").encoded, Inner(hook)

    def init(params: Tree) -> ErrorState:
        errors = zero_errors(hook, params)
        return ErrorState(hook.init(params), errors, init_last(errors))

    def update(grads: Tree, state: ErrorState, params: Tree, call: Call) -> tuple[Tree, ErrorState]:
        memory = ResidualMemory(state.error, without_input == "flush", state.last)
        out, new = inner.run(grads, state, params, call.inside(memory=memory))
        return out, ErrorState(new, {**state.error, **memory.new}, memory.last)

    # Chunk ownership, and so the second residual, depends on the bucket layout.
    needs = Needs.LAYOUT if encoded else Needs.NOTHING
    return Transform(
        init, update, needs, inner.reduction(same=True), Compression(None, encoded), takes=("donated",), wraps="whole"
    )


def zero_errors(hook: Transform, params: Tree) -> dict[str, Tensor]:
    lost = set(hook.compression.paths(params)) if hook.compression and hook.compression.paths else set()
    return {path: zero for path, zero in zeros_at_least_f32(params).items() if path in lost}


def check_lossy(hook: Transform, without_input: Any, name: str) -> Compression:
    check_transform(hook, f"{name}: hook")
    if hook.compression is None or hook.compression.paths is None:
        raise TypeError(
            f"nothing in {hook!r} is {'lost' if hook.compression else 'encoded'}, so there is no error to feed back; write "
            f"{name}(compress(codec, mean(axis)))"
        )
    check_without_input(without_input)
    return hook.compression


def check_without_input(given: Any) -> None:
    if given not in ("freeze", "flush"):
        raise ValueError(f"without_input must be 'freeze' or 'flush', got {given!r}")
