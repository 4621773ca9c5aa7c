"""Who owns which element: buckets, and the pieces of them that ranks own."""

from ._buckets import (
    Bucket as Bucket,
    Span as Span,
    bucket_sizes as bucket_sizes,
    make_layout as make_layout,
    record_bucket as record_bucket,
    views as views,
)
from ._pieces import (
    Pieces as Pieces,
    bind_pieces as bind_pieces,
    cut as cut,
    labels as labels,
    merged as merged,
    pieces_here as pieces_here,
)
