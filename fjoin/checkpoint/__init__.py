"""Checkpoints as files: safetensors, a manifest that covers every byte, a commit by rename; in `runs` and `saves` those of ranks."""

from ._commits import read_step as read_step
from ._files import FileEntry as FileEntry
from ._folder import Folder as Folder
from ._leaves import Leaves as Leaves
from ._manifest import Manifest as Manifest
from ._newest import Newest as Newest
from ._newest import newest_verified as newest_verified
from ._parts import Leaf as Leaf
from ._parts import Part as Part
from ._safetensors import TensorFile as TensorFile
from ._safetensors import write_file as write_file
from ._tools import export as export
from ._tools import show as show
from ._tools import verify as verify
