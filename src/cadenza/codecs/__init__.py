"""HOW values are written on the wire: codecs that turn differences into bytes and back.

| codec | bytes of fp32's | what is lost |
| --- | ---: | --- |
| `fp32()` | 1 | nothing |
| `bf16()`, `fp16()` | 0.5 | digits of every value |
| `int8()` | 0.254 | at most 1/254 of the largest magnitude in a block of 256 |
| `e3m0()` | 0.143 | at most a third of a value, or 1/90 of the largest magnitude among its sixteen |
| `topk()` | 0.009 | all but the largest 2 %, and most digits of those |
| `dct()` | 0.012 | all but the largest 0.8 % of a matrix's frequencies |

`error_feedback(codec)` makes up in later rounds for what a codec lost in this one; `auto()` chooses among several. A
new codec is one more file with a frozen dataclass that fulfils `Codec`, and one more line in
tests/contract/test_codecs.py.
"""

from cadenza.codecs.auto import ChoosingCodec, auto
from cadenza.codecs.base import Codec, CombiningCodec, ShapedCodec
from cadenza.codecs.dct import dct
from cadenza.codecs.exponents import e3m0
from cadenza.codecs.feedback import error_feedback
from cadenza.codecs.floats import bf16, fp16, fp32
from cadenza.codecs.integers import int8
from cadenza.codecs.sparse import topk

__all__ = [
    "ChoosingCodec",
    "Codec",
    "CombiningCodec",
    "ShapedCodec",
    "auto",
    "bf16",
    "dct",
    "e3m0",
    "error_feedback",
    "fp16",
    "fp32",
    "int8",
    "topk",
]
