"""Checkpoints of runs as files: safetensors, a manifest that covers every byte, a commit by rename.

runs     Checkpoints  save  load
tools    verify  export; `python -m fjoin.checkpoint show` prints what a step holds
"""

from ._checkpoints import Checkpoints as Checkpoints, load as load, save as save
from ._tools import export as export, verify as verify
