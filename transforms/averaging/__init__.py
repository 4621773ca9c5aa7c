"""Averages of parameters: local SGD, DiLoCo, moving averages."""

from ._average import average_parameters as average_parameters, average_state as average_state
from ._diloco import diloco as diloco, outer_step as outer_step
from ._ema import ema as ema, ema_params as ema_params
from ._local_sgd import local_sgd as local_sgd, post_local_sgd as post_local_sgd
