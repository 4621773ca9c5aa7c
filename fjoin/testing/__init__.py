"""The laws of the public API, to check custom transforms, optimizers, codecs and lossy means.

    fjoin.testing.check_codec(lambda: my_codec(bits=3))

Each law is a function whose argument makes the object, so a test can run the laws one by one: `TRANSFORM_LAWS`,
`OPTIMIZER_LAWS`, `CODEC_LAWS`, `FEEDBACK_LAWS`, `AVERAGE_LAWS`. A law that is broken raises AssertionError.
"""

from ._averages import AVERAGE_LAWS as AVERAGE_LAWS, FEEDBACK_LAWS as FEEDBACK_LAWS
from ._check import (
    check_average as check_average,
    check_codec as check_codec,
    check_feedback as check_feedback,
    check_optimizer as check_optimizer,
    check_transform as check_transform,
)
from ._codecs import CODEC_LAWS as CODEC_LAWS
from ._optimizers import OPTIMIZER_LAWS as OPTIMIZER_LAWS
from ._transforms import TRANSFORM_LAWS as TRANSFORM_LAWS
