"""Arrays to encoded slices and back: digests, differences, encodings. numpy and zstandard; torch and numba unneeded.

    change.py     what changed in one box: index, old bits, new bits;  diff.py finds it
    encode.py     changes ──▶ frames and payloads of a part, the smallest encoding per slice by measured size
    decode.py     frames and payloads ──▶ changes, proved against the reader's own old bits before anything is written
    digest.py     the additive digest of arrays, boxes and changes;  geometry.py says where a box lies in its tensor
    encodings/    one file per encoding behind one small registry
    kernels.py    compiled twins of the hot loops, used where numba is installed;  lanes.py: 64 elements as one mask

Elements are unsigned integers of their own width throughout, never floats: -0.0 differs from 0.0 and a NaN equals
itself (see `bits.py`). The numpy code is the specification; what is compiled is tested to be equal to it.
"""

from torch_delta.codec.change import Change
from torch_delta.codec.decode import decode_frame
from torch_delta.codec.digest import digest_array, digest_box, digest_delta, digest_run
from torch_delta.codec.encode import EncodedPart, encode_changes

__all__ = [
    "Change",
    "EncodedPart",
    "decode_frame",
    "digest_array",
    "digest_box",
    "digest_delta",
    "digest_run",
    "encode_changes",
]
