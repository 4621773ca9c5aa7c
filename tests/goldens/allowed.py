"""The rows that were recorded again in this release, and why. All others stay as they are, to the bit.

Values and bits of parameters stay in all rows.
"""

from __future__ import annotations

# Rows whose messages may be fewer than was recorded.
MAY_CHANGE: dict[str, str] = {}

# On the paths of steps and of pure pipelines.
MESSAGES_AGAIN: dict[str, str] = {
    "plan: streaming": "With a delay the message leaves in the step that uses it.",
    "outer_step 1": "With a delay the message leaves in the step that uses it.",
    **dict.fromkeys(
        ("power_sgd 2", "batched_power_sgd 2", "one_bit_adam 0", "other: power_sgd"),
        "The state holds the number that ranks compare, which is made of the pipeline's text: warmup_steps for start and warmup.",
    ),
    "plan: post-local SGD, encoded": "The number that ranks compare is made of the pipeline's text, which has new names.",
}

# Files of text: a pipeline's spec bears the names of its factories and of their arguments.
NAMES = "compress for cast and quantized_mean; identity for noop; every and average_parameters; a reduction in place of axis and wire"
PHASES = "The table of `explain` has no phases, no rows of parts, no balance of matrices; a clip has no mode."
TEXTS_AGAIN: dict[str, tuple[str, ...]] = {"plans.json": (NAMES, PHASES), "explained.json": (NAMES, PHASES)}
