"""The forms of floats in messages.

Files, from the ground up:
_codec    `Codec`; floats as rows of codes, and their random bits
_blocks   a scale for each block: int8, int4, uint8, fp8
_signs    few values: signs, and multiples of a norm
_sparse   some of the elements
"""

from ._blocks import fp8 as fp8, int4 as int4, int8 as int8, uint8 as uint8
from ._codec import (
    Codec as Codec,
    Noise as Noise,
    bfloat16 as bfloat16,
    bfp16 as bfp16,
    check_codec as check_codec,
    decode_pieces as decode_pieces,
    encode_pieces as encode_pieces,
    encode_rows as encode_rows,
    float16 as float16,
    float32 as float32,
    key_of as key_of,
    places_of as places_of,
    read as read,
    refuse_derivative as refuse_derivative,
)
from ._signs import qsgd as qsgd, sign as sign
from ._sparse import top_k as top_k
