"""Distributed data-parallel training as pure functions, and the small shell that runs them.

train_step  TrainState  Metrics     the step, on uneven inputs
functional                          a module as a pure function
mesh  bind                          ranks and their axes
transforms                          the pure part: `from fjoin import transforms as tx`
"""

from . import transforms as transforms
from ._errors import CollectiveTimeout as CollectiveTimeout
from ._errors import DesyncError as DesyncError
from ._errors import DonatedState as DonatedState
from ._errors import EarlyTermination as EarlyTermination
from ._errors import FjoinError as FjoinError
from ._errors import JoinError as JoinError
from ._errors import NoBatch as NoBatch
from ._errors import NonFinite as NonFinite
from ._errors import PeerLost as PeerLost
from ._errors import TornState as TornState
from ._functional import Apply as Apply
from ._functional import functional as functional
from ._join import NO_BATCH as NO_BATCH
from ._mesh import Mesh as Mesh
from ._mesh import bind as bind
from ._mesh import mesh as mesh
from ._metrics import Metrics as Metrics
from ._state import TrainState as TrainState
from ._step import TrainStep as TrainStep
from ._step import train_step as train_step
