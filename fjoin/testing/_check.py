"""All laws of one kind at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import transforms as tx
from ._codecs import CODEC_LAWS
from ._feedback import FEEDBACK_LAWS
from ._optimizers import OPTIMIZER_LAWS
from ._transforms import TRANSFORM_LAWS


def check_transform(make: Callable[[], tx.Transform]) -> None:
    """Put a transform under all laws, on simulated ranks over the axis "data".

    They are: pure; what its scope says holds; called bucket by bucket as on the whole; in a chain as alone; a rank of weight
    0 is not heard, whatever it holds, of a reduction in later steps neither; a mean or a sum (`Transform.reduction`) is the
    identity on one rank and does not mind the order of ranks; what loses something does not remember a step that is not
    finite; it goes on from a file to the bit; the vmap engine gives the same; on another device no message is made on the
    host, and the host waits for no value or copy; repr, equality, JSON (but of what is written by hand) and fingerprint agree.

    Args:
        make: Makes the transform, the same one each time; its parameters are float64, of the paths "layer.weight",
            "layer.bias", "scale" and "none", which is empty.

    Raises:
        AssertionError: a law is broken; the text begins with its name.

    >>> import fjoin
    >>> from fjoin import transforms as tx
    >>> fjoin.testing.check_transform(lambda: tx.mean("data"))
    """
    _check(make, TRANSFORM_LAWS)


def check_optimizer(make: Callable[[], tx.Optimizer]) -> None:
    """Put an optimizer under all laws.

    They are: step_param is pure; step_param_ does the same in place, divides by grad_scale and stops at found_inf; a tree's
    step is that of its leaves; a flat buffer's step is that of its parts; it goes on from a file to the bit; step_param stays
    on the parameter's device; repr, equality, JSON and fingerprint agree.

    Raises:
        AssertionError: a law is broken; the text begins with its name.

    >>> import fjoin
    >>> from fjoin import transforms as tx
    >>> fjoin.testing.check_optimizer(lambda: tx.sgd(0.1, momentum=0.9))
    """
    _check(make, OPTIMIZER_LAWS)


def check_codec(make: Callable[[], tx.Codec]) -> None:
    """Put a codec under all laws.

    They are: pure; as wide as it says; near what was encoded, and zeros stay zeros; nothing overflows that float32 holds; what
    is not finite stays so; rows do not depend on each other; elementwise, if it says so; it stays on the device of what it is
    given; repr, equality, JSON and fingerprint agree.

    Raises:
        AssertionError: a law is broken; the text begins with its name.

    >>> import fjoin
    >>> from fjoin import transforms as tx
    >>> fjoin.testing.check_codec(tx.int8)
    """
    _check(make, CODEC_LAWS)


def check_feedback(make: Callable[[], tx.Transform]) -> None:
    """Put a mean that loses something under the laws of error feedback, on three simulated ranks over the axis "data".

    They are: what came out and what is still owed is what went in, whichever ranks have input, one, some or none; a step
    that is not finite is told to all ranks, and forgotten.

    Args:
        make: Makes the mean, for example `quantized_mean`, with nothing before or behind it.

    Raises:
        AssertionError: a law is broken; the text begins with its name.

    >>> import fjoin
    >>> from fjoin import transforms as tx
    >>> fjoin.testing.check_feedback(lambda: tx.quantized_mean("data", tx.int8()))
    """
    _check(make, FEEDBACK_LAWS)


def _check(make: Callable[[], Any], laws: Sequence[Callable[[Any], None]]) -> None:
    if not __debug__:
        raise RuntimeError("the laws are assertions, which python -O leaves out")
    for law in laws:
        try:
            law(make)
        except AssertionError as error:
            raise AssertionError(f"{law.__name__}: {error}") from error
