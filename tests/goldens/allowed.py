"""The rows that were recorded again in this release, and why. All others stay as they are, to the bit."""

from __future__ import annotations

# Rows whose messages may be fewer than was recorded.
MAY_CHANGE: dict[str, str] = {}

# Of all rows: the names of states are fewer, since a mean keeps nothing.
# Of the rows whose hook is no plain reduction: the sum of the weights is a message of its own, and no words ride in others.

_FEEDBACK = "A residual is sent whole, by a rank without input too. It was sent in proportion to the rank's weight."
_CODES = "A rank encodes its share of the mean, where it encoded weight * gradient, so codes are rounded elsewhere."

# Rows whose values differ by more than rounding.
VALUES_AGAIN: dict[str, str] = {
    **dict.fromkeys(
        (
            "accumulate 2",
            "batched_power_sgd 2",
            "chain 5",
            "error_feedback 0",
            "error_feedback 2",
            "other: power_sgd",
            "outer_step 2",
            "plan: post-local SGD, encoded",
            "power_sgd 3",
            "power_sgd 4",
        ),
        _FEEDBACK,
    ),
    **dict.fromkeys(
        (
            "compress 1",
            "compress 3",
            "compress 4",
            "hierarchical_mean 2",
            "hierarchical_mean 3",
            "hierarchical_mean 4",
            "hierarchical_mean 5",
            "other: zero, int8 both ways",
            "plan: encoded",
            "plan: in fewer bits",
        ),
        _CODES,
    ),
}
# Rows whose last bits differ.
BITS_AGAIN: dict[str, str] = dict.fromkeys(
    (
        "batched_power_sgd 0",
        "chain 3",
        "chain 4",
        "compress 10",
        "compress 11",
        "compress 2",
        "compress 6",
        "compress 7",
        "compress 9",
        "other: first whole, then int8",
        "other: float16",
        "other: float16, zero",
        "other: loss scale, int8",
        "other: partition by kinds",
        "other: skip, int8",
        "other: sums, int8",
        "plan: DiLoCo",
        "plan: first means, then local steps",
        "plan: local SGD",
        "plan: local steps",
        "plan: moving average",
        "power_sgd 0",
        "power_sgd 6",
        "switch_after 2",
    ),
    "A share is multiplied before a sum, or a sum divided behind it, where it was the reverse.",
)

# Files of text: a pipeline's spec bears the names of its factories and of their arguments.
NAMES = "compress for cast and quantized_mean; identity for noop; every and average_parameters; a reduction in place of axis and wire"
PHASES = "The table of `explain` has no phases, no rows of parts, no balance of matrices; a clip has no mode."
TEXTS_AGAIN: dict[str, tuple[str, ...]] = {"plans.json": (NAMES, PHASES), "explained.json": (NAMES, PHASES)}
