"""torch's activation checkpointing of modules, over `transforms.remat`."""
