"""`train_step`: its passes, its state, its loop over uneven inputs; its numbers and its timeline while it trains."""

from ._join import NO_BATCH as NO_BATCH, JoinedLoader as JoinedLoader
from ._loss import weigh as weigh
from ._metrics import Metrics as Metrics
from ._passes import unscale as unscale
from ._signals import OnSignal as OnSignal
from ._state import TrainState as TrainState, check_state as check_state, load_into as load_into, loaded as loaded
from ._train_step import TrainStep as TrainStep, train_step as train_step
from ._watch import show as show, trace as trace
