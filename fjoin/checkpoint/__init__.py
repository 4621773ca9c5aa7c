"""Checkpoints as files: safetensors, a manifest that covers every byte, a commit by rename; in `runs` and `saves` those of ranks."""

from ._files import FileEntry as FileEntry
from ._folder import Folder as Folder
from ._leaves import Leaves as Leaves, Newest as Newest, newest_verified as newest_verified
from ._manifest import Manifest as Manifest, read_step as read_step
from ._safetensors import Leaf as Leaf, Part as Part, TensorFile as TensorFile, write_file as write_file
from ._tools import export as export, show as show, verify as verify
