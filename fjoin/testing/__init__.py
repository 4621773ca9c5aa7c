"""The laws of the public API, to check custom transforms, optimizers, codecs, averages and lossy means.

    fjoin.testing.check_codec(lambda: my_codec(bits=3))

Each law is a function whose argument makes the object. `LAWS["codec"]` lists those that `check_codec` runs, so a test
can run them one by one; the other kinds are "transform", "optimizer", "feedback" and "average". A law that is broken
raises AssertionError.
"""

from ._check import (
    LAWS as LAWS,
    check_average as check_average,
    check_codec as check_codec,
    check_feedback as check_feedback,
    check_optimizer as check_optimizer,
    check_transform as check_transform,
)
