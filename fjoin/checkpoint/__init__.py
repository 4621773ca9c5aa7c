"""Checkpoints of runs as files: safetensors, a manifest that covers every byte, a commit by rename.

runs     Checkpoints  save  load
tools    verify  export; `python -m fjoin.checkpoint show` prints what a step holds

Files, from the ground up:
_values        names, slices, and objects as JSON with tensors
_files         tensors in files, with checksums
_sharded_item  the handle of a module under fully_shard
_sources       what is saved: a step, a pipeline, modules and optimizers, the position of a loop
_manifest      what a step holds, and its commit
_leaves        a step that is read: every part is checked before its first value is returned
_folder        the folder of a run; `Folder.commit` is the rename that makes a step final
_load          chooses a step that verifies, and restores it
_save          which rank writes what; rank 0 commits
_tools         show, verify, export; `__main__` is their command line
_checkpoints   `Checkpoints`, `save`, `load`
"""

from ._checkpoints import Checkpoints as Checkpoints, load as load, save as save
from ._tools import export as export, verify as verify
