"""DiLoCo: an outer optimizer on the mean change of the ranks' parameters."""

from __future__ import annotations

from collections.abc import Sequence

from .._check import AxisName, whole_number
from ..codecs._codec import Codec
from ..combinators._fragments import in_fragments
from ..combinators._partition import partition
from ..combinators._patterns import Patterns, check_which
from ..optimizers._sgd import sgd
from ..pipelines._fuse import fuse
from ..pipelines._pipeline import Pipeline
from ..reductions._mean import noop
from ..spec._spec import factory
from ..step_param._optimizer import Optimizer
from ..transform._transform import Transform
from ..transform._weights import Over
from ._outer import outer_step
from ._state import StatePolicy, on_state_of
from ._window import reduction


@factory
def diloco(
    inner: Optimizer,
    axis: AxisName,
    every: int,
    outer: Optimizer | None = None,
    *,
    wire: Codec | Transform | None = None,
    over: Over = "weight",
    fragments: int | Sequence[Patterns] = 1,
    delay: int = 0,
    mix: float = 0.0,
    state: StatePolicy = "keep",
    hook: Transform | None = None,
) -> Pipeline:
    """Each rank trains alone; once in `every` steps an outer optimizer steps on the mean change of the parameters.

    With several fragments, the parameters are split into groups whose messages begin at different steps, spread evenly
    over the period. With a delay, a change is averaged and used `delay` steps later.

    Args:
        inner: The optimizer of each rank.
        axis: The axis, or a tuple of axes, of the ranks.
        every: The period in steps.
        outer: The outer optimizer; None: sgd(0.7, momentum=0.9, nesterov=True).
        wire: The codec of the changes, with error feedback; or a reduction of its own. None: full precision.
        over: The weights of the ranks; see `average_parameters`.
        fragments: The number of groups of parameters, at most `every`; or glob patterns for paths, one for each group,
            which together match all parameters.
        delay: Steps between a change and the message that averages it, below `every`.
        mix: The share of a rank's own parameters that remains when a message is used; see `outer_step`.
        state, hook: As for `local_sgd`.

    Returns:
        A `Pipeline`: `fuse(noop(), inner, after=outer_step(mean(axis), outer, every))`, and so on.

    Raises:
        ValueError: more fragments than steps in a period, or two with one pattern; a wire that does not reduce over
            `axis`; an argument out of range. At `init`: more fragments than parameters.
        TypeError: an argument of the wrong kind.

    Source: Douillard et al., DiLoCo, arXiv:2311.08105; fragments, delay and mix: Streaming DiLoCo, arXiv:2501.18512.
        With outer=sgd(lr, momentum=m) it is SlowMo: Wang et al., arXiv:1910.00643, algorithm 1, for an inner learning
        rate that does not change.

    >>> from fjoin import transforms as tx
    >>> tx.diloco(tx.adamw(1e-3), "data", every=50).after
    outer_step(mean('data'), sgd(lr=0.7, momentum=0.9, nesterov=True), steps=50)
    """
    whole_number("diloco: every", every, 1)
    outer = sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    send = reduction("diloco", axis, wire)
    patterns = None if isinstance(fragments, int) else _patterns(fragments)
    count = whole_number("diloco: fragments", fragments if patterns is None else len(patterns), 1)
    if count > every:
        raise ValueError(f"diloco: {count} fragments need a period of as many steps, got every={every}")
    parts = [outer_step(send, outer, every, (i + 1) * every // count - 1, delay, mix, over) for i in range(count)]
    if patterns is not None:
        after = partition(dict(zip(patterns, parts, strict=True)))
    elif count > 1:
        after = in_fragments(*parts)
    else:
        after = outer_step(send, outer, every, None, delay, mix, over)
    on_state = on_state_of("diloco", state, axis, every, None, over)
    return fuse(noop() if hook is None else hook, inner, after, on_state)


def _patterns(fragments: Sequence[Patterns]) -> list[Patterns]:
    if not isinstance(fragments, (list, tuple)):
        one = f"; for one group write [{fragments!r}]" if isinstance(fragments, str) else ""
        raise TypeError(
            f"diloco: fragments must be a whole number, or a list of glob patterns for paths, got {fragments!r}{one}"
        )
    for pattern in fragments:
        check_which("diloco: a fragment", pattern, functions=False)
    found = [tuple(pattern) if isinstance(pattern, list) else pattern for pattern in fragments]
    if twice := [pattern for pattern in dict.fromkeys(found) if found.count(pattern) > 1]:
        raise ValueError(f"diloco: fragments has {twice} more than once; the first match of a path wins")
    return found
