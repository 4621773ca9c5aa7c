"""Checks of all laws of one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import transforms as tx
from . import _averages as averages, _codecs as codecs, _optimizers as optimizers, _transforms as transforms
from ._compare import is_data
from ._devices import encodes_on_its_device, stays_on_its_device, steps_on_its_device

LAWS: dict[str, list[Callable[..., None]]] = {
    "transform": [
        transforms.is_pure, transforms.keeps_to_its_needs, transforms.goes_bucket_by_bucket, transforms.chains,
        transforms.ignores_weight_zero, transforms.is_itself_alone, transforms.forgets_the_order_of_ranks,
        transforms.forgets_what_is_not_finite, transforms.resumes, stays_on_its_device, is_data,
    ],
    "optimizer": [
        optimizers.step_param_is_pure, optimizers.in_place_agrees, optimizers.found_inf_stops_it,
        optimizers.tree_step_agrees, optimizers.flat_is_leaves, optimizers.resumes, steps_on_its_device, is_data,
    ],
    "codec": [
        codecs.encodes_purely, codecs.says_its_width, codecs.stays_near, codecs.serves_large_and_small,
        codecs.tells_nonfinite, codecs.reads_rows_alone, codecs.keeps_to_elements, encodes_on_its_device, is_data,
    ],
    "feedback": [averages.pays_what_it_owes, averages.forgets_what_is_not_finite],
    "average": [
        averages.makes_ranks_equal, averages.gives_the_average_to_ranks_without_input,
        averages.keeps_parameters_without_input,
    ],
}  # fmt: skip


def check_transform(make: Callable[[], tx.Transform]) -> None:
    """Check all laws of transforms, on simulated ranks over the axis "data".

    - It is pure.
    - Its `needs` hold.
    - Calls bucket by bucket equal one call on the whole tree.
    - In a chain it gives the same results as alone.
    - The values of a rank of weight 0 do not affect the other ranks; with a reduction, not in later steps either.
    - With `Transform.facts.reduces`: on one rank a mean is the identity, and a sum is the gradient times the weight.
      Neither depends on the order of ranks.
    - A lossy transform does not remember a step that is not finite.
    - Saved to a file and loaded, its state gives the same results to the bit.
    - On another device no message is made on the host, and the host waits for no value or copy.
    - repr, equality, spec (except of handwritten transforms) and fingerprint agree.

    Args:
        make: Makes the transform, an equal one each time. The parameters are float64, with the paths "layer.weight",
            "layer.bias", "scale" and "none", which is empty.

    Raises:
        AssertionError: a law is broken; the text begins with its name.

    >>> import fjoin
    >>> from fjoin import transforms as tx
    >>> fjoin.testing.check_transform(lambda: tx.mean("data"))
    """
    _check("transform", make)


def check_optimizer(make: Callable[[], tx.Optimizer]) -> None:
    """Check all laws of optimizers.

    - step_param is pure.
    - step_param_ does the same in place, divides by grad_scale, and changes nothing where found_inf is 1.
    - The step of a tree is the step of each leaf.
    - The step of a flat buffer is the step of its parts, for elementwise optimizers.
    - Saved to a file and loaded, its state gives the same results to the bit.
    - step_param stays on the parameter's device.
    - repr, equality, spec and fingerprint agree.

    Raises:
        AssertionError: a law is broken; the text begins with its name.

    >>> import fjoin
    >>> from fjoin import transforms as tx
    >>> fjoin.testing.check_optimizer(lambda: tx.sgd(0.1, momentum=0.9))
    """
    _check("optimizer", make)


def check_codec(make: Callable[[], tx.Codec]) -> None:
    """Check all laws of codecs.

    - It is pure.
    - Its codes have the width that `width` returns.
    - Decoded values are near the encoded ones, and zeros stay zeros.
    - Float32 values do not overflow.
    - Values that are not finite stay so.
    - Rows do not depend on each other.
    - With `elementwise`, elements do not depend on each other.
    - It stays on the device of its input.
    - repr, equality, spec and fingerprint agree.

    Raises:
        AssertionError: a law is broken; the text begins with its name.

    >>> import fjoin
    >>> from fjoin import transforms as tx
    >>> fjoin.testing.check_codec(tx.int8)
    """
    _check("codec", make)


def check_feedback(make: Callable[[], tx.Transform]) -> None:
    """Check the laws of error feedback for a lossy mean, on three simulated ranks over the axis "data".

    - The results plus the residuals equal the inputs, whether all ranks have input, some, one or none.
    - A step that is not finite on one rank gives a result that is not finite on the others, and does not enter the
      residuals.

    Args:
        make: Makes the mean, for example `compress(codec, mean(axis))`, with no other transform before or after it.

    Raises:
        AssertionError: a law is broken; the text begins with its name.

    >>> import fjoin
    >>> from fjoin import transforms as tx
    >>> fjoin.testing.check_feedback(lambda: tx.compress(tx.int8(), tx.mean("data")))
    """
    _check("feedback", make)


def check_average(make: Callable[[], tx.Transform]) -> None:
    """Check the laws of an average of parameters, for `fuse(..., after=...)`, on three simulated ranks over the axis
    "data".

    - After a call each parameter is unchanged on all ranks, or equal on all ranks to the bit. Each changes at some
      time.
    - The parameters of a rank of weight 0 do not affect the other ranks.
    - While no rank has weight, nothing changes.

    Args:
        make: Makes the transform, with a period of at most 4 calls and the weights of windows.

    Raises:
        AssertionError: a law is broken; the text begins with its name.

    >>> import fjoin
    >>> from fjoin import transforms as tx
    >>> fjoin.testing.check_average(lambda: tx.every(2, tx.average_parameters("data")))
    """
    _check("average", make)


def _check(kind: str, make: Callable[[], Any]) -> None:
    if not __debug__:
        raise RuntimeError("the laws are assertions, which python -O leaves out")
    for law in LAWS[kind]:
        try:
            law(make)
        except AssertionError as error:
            raise AssertionError(f"{law.__name__}: {error}") from error
