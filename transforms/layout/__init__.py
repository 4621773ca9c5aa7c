"""Who owns which element: buckets, and the pieces of them that ranks own.

Files, from the ground up:
_buckets   which leaf is where in which bucket; which bucket's message carries the record
_pieces    which rank owns which part of a bucket
"""

from ._buckets import (
    Bucket as Bucket,
    SlotRange as SlotRange,
    bucket_sizes as bucket_sizes,
    make_layout as make_layout,
    record_bucket as record_bucket,
    views as views,
)
from ._pieces import (
    LocalPieces as LocalPieces,
    Pieces as Pieces,
    Slice as Slice,
    bind_pieces as bind_pieces,
    cut as cut,
    labels as labels,
    local_pieces as local_pieces,
    merged as merged,
    owners as owners,
    pieces_here as pieces_here,
)
