"""The codecs' kernels for GPUs, in Triton: bit for bit what native.c and torch's operations give.

Encoded bytes may lie at any address, so numbers of several bytes are put together from single ones. Products are
rounded before they are added (the launcher switches fused instructions off), divisions are IEEE's, and sums whose order
would matter run along rows or are of whole numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["e3m0_decode", "e3m0_encode", "int8_decode", "int8_encode", "topk_choose", "topk_decode", "topk_write"]

# The same numbers as in native.c, which says what they are for.
_FINE = tl.constexpr(2.0**0.25)
_NEXT = tl.constexpr(float.fromhex("0x1.6a09e8p-1"))
_NOTHING = tl.constexpr(2.0**-100)
_LEAST = tl.constexpr(2.0**-64)
_MOST = tl.constexpr(float.fromhex("0x1.fffffep127"))
_LARGEST_SCALE = tl.constexpr(float.fromhex("0x1.020406p121"))
_AWAY = tl.constexpr(2.0**-24)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITE = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_HALF = tl.constexpr(1 << 22)
_POWER = tl.constexpr(-0x800000)
_GROUP = tl.constexpr(16)
_MOST_SENT = tl.constexpr(0x7F7DFFFF)
_NOTHING_EXPONENT = tl.constexpr(27)
_WHOLE_BITS = tl.constexpr(23)
_EVEN = tl.constexpr(1.5 * 2.0**23)  # added to a small number and taken away again, it rounds ties to even


@triton.jit
def _bits(number: tl.tensor) -> tl.tensor:
    return number.to(tl.int32, bitcast=True)


@triton.jit
def _number(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load_words(places: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Read 32 bits at each of some places, a byte at a time."""
    one = tl.load(places, mask=inside, other=0).to(tl.int32)
    two = tl.load(places + 1, mask=inside, other=0).to(tl.int32)
    three = tl.load(places + 2, mask=inside, other=0).to(tl.int32)
    four = tl.load(places + 3, mask=inside, other=0).to(tl.int32)
    return one | (two << 8) | (three << 16) | (four << 24)


@triton.jit
def _store_words(places: tl.tensor, bits: tl.tensor, inside: tl.tensor) -> None:
    """Write 32 bits at each of some places, a byte at a time."""
    for byte in tl.static_range(4):
        tl.store(places + byte, ((bits >> (8 * byte)) & 255).to(tl.uint8), mask=inside)


# ---- int8: some blocks a program, one a row ------------------------------------------------------------------------


@triton.jit
def int8_encode(
    values: tl.tensor,
    data: tl.tensor,
    count: tl.tensor,
    block: tl.tensor,
    blocks: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    places = rows[:, None] * block + columns[None, :]
    inside = (columns[None, :] < block) & (places < count)
    value = tl.load(values + places, mask=inside, other=0.0)
    top = tl.max(_bits(value) & _MAGNITUDE, axis=1)
    finite = top < _INFINITE
    largest = _number(tl.where(finite, top, 0))
    scale = tl.div_rn(largest, 127.0)
    scale = tl.where(scale > _LARGEST_SCALE, _LARGEST_SCALE, scale)
    _store_words(data + rows * 4, tl.where(finite, _bits(scale), _NAN), rows < blocks)
    factor = tl.div_rn(1.0, tl.where(largest < _NOTHING, _NOTHING, largest) * _AWAY) * (127.0 * _AWAY)
    rounded = (tl.where(finite[:, None], value, 0.0) * factor[:, None] + _EVEN) - _EVEN
    tl.store(data + 4 * blocks + places, rounded.to(tl.int8).to(tl.uint8, bitcast=True), mask=inside)


@triton.jit
def int8_decode(
    out: tl.tensor,
    data: tl.tensor,
    weight: tl.tensor,
    count: tl.tensor,
    block: tl.tensor,
    blocks: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    places = rows[:, None] * block + columns[None, :]
    inside = (columns[None, :] < block) & (places < count)
    scale = _number(_load_words(data + rows * 4, rows < blocks))
    if ADD:
        scale = scale * weight
    code = tl.load(data + 4 * blocks + places, mask=inside, other=0).to(tl.int8, bitcast=True)
    value = code.to(tl.float32) * scale[:, None]
    if ADD:
        value = tl.load(out + places, mask=inside, other=0.0) + value
    tl.store(out + places, value, mask=inside)


# ---- E3M0: some whole blocks a program, each a matrix of 16 rows, which are read again from the cache ----------------


@triton.jit
def _nearest_power(number: tl.tensor) -> tl.tensor:
    return _number((_bits(number) + _HALF) & _POWER)


@triton.jit
def _first_scale(ratio: tl.tensor) -> tl.tensor:
    bits = _bits(tl.where(ratio > _LEAST, ratio, _LEAST))
    mantissa = bits & 0x7FFFFF
    above = (mantissa >= 0x1837F1).to(tl.int32) + (mantissa >= 0x3504F4).to(tl.int32)
    quarters = 4 * ((bits >> 23) - 127) + above + (mantissa >= 0x5744FD).to(tl.int32)
    return tl.minimum(tl.maximum(-quarters, 0), 254)


@triton.jit
def _code(scaled: tl.tensor) -> tl.tensor:
    bits = _bits(scaled)
    magnitude = bits & _MAGNITUDE
    exponent = tl.minimum(tl.maximum(((magnitude + _HALF) >> 23) - 120, 1), 7)
    return tl.where(magnitude < 0x3C000000, 0, exponent) | tl.where(bits < 0, 8, 0)


@triton.jit
def _level(code: tl.tensor) -> tl.tensor:
    exponent = code & 7
    return _number(tl.where(exponent > 0, (exponent + 120) << 23, 0) | ((code & 8) << 28))


@triton.jit
def e3m0_encode(
    values: tl.tensor,
    scales: tl.tensor,
    fine: tl.tensor,
    codes: tl.tensor,
    powers: tl.tensor,
    groups: tl.tensor,
    blocks: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.arange(0, WIDTH)[None, :]
    inside = (group < groups) & (block < blocks)[:, None]
    first = values + block[:, None] * groups * _GROUP + group
    top = tl.zeros([ROWS, WIDTH], dtype=tl.int32)
    for row in tl.static_range(_GROUP):
        top = tl.maximum(top, _bits(tl.load(first + row * groups, mask=inside, other=0.0)) & _MAGNITUDE)
    whole = tl.max(top, axis=1)
    finite = whole < _INFINITE
    largest = _number(tl.where(finite, whole, 0))
    scale = largest * _FINE
    scale = tl.where(scale > _MOST, _MOST, scale)
    _store_words(scales + block * 4, tl.where(finite, _bits(scale), _NAN), block < blocks)
    largest = tl.where(largest < _NOTHING, _NOTHING, largest)
    scale = largest * _FINE
    unit = tl.div_rn(1.0, tl.where(scale > _MOST, _MOST, scale) * _AWAY)[:, None]
    finite = finite[:, None]
    chosen = _first_scale(tl.div_rn(_number(tl.where(finite, top, 0)), largest[:, None]))
    power = tl.load(powers + chosen)
    by_first = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    by_next = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for row in tl.static_range(_GROUP):
        scaled = tl.load(first + row * groups, mask=inside, other=0.0) * unit * power
        following = scaled * _FINE
        lost = _nearest_power(scaled) - scaled
        lost_next = _nearest_power(following) - following
        by_first += lost * lost
        by_next += lost_next * lost_next
    chosen += (by_next * _NEXT < by_first).to(tl.int32)
    tl.store(fine + block[:, None] * groups + group, tl.where(finite, chosen, 0).to(tl.uint8), mask=inside)
    power = tl.load(powers + chosen)
    for row in tl.static_range(_GROUP // 2):
        low = _code(tl.load(first + row * groups, mask=inside, other=0.0) * unit * power)
        high = _code(tl.load(first + (row + _GROUP // 2) * groups, mask=inside, other=0.0) * unit * power)
        code = tl.where(finite, low | (high << 4), 0).to(tl.uint8)
        tl.store(codes + (block[:, None] * (_GROUP // 2) + row) * groups + group, code, mask=inside)


@triton.jit
def e3m0_decode(
    out: tl.tensor,
    scales: tl.tensor,
    fine: tl.tensor,
    codes: tl.tensor,
    inverses: tl.tensor,
    weight: tl.tensor,
    groups: tl.tensor,
    blocks: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.arange(0, WIDTH)[None, :]
    inside = (group < groups) & (block < blocks)[:, None]
    first = out + block[:, None] * groups * _GROUP + group
    whole = _number(_load_words(scales + block * 4, block < blocks))
    if ADD:
        whole = whole * weight
    index = tl.load(fine + block[:, None] * groups + group, mask=inside, other=0).to(tl.int32)
    scale = tl.load(inverses + index) * whole[:, None]
    for row in tl.static_range(_GROUP // 2):
        places = codes + (block[:, None] * (_GROUP // 2) + row) * groups + group
        code = tl.load(places, mask=inside, other=0).to(tl.int32)
        for half in tl.static_range(2):
            places = first + (row + half * (_GROUP // 2)) * groups
            value = _level((code >> (4 * half)) & 15) * scale
            if ADD:
                value = tl.load(places, mask=inside, other=0.0) + value
            tl.store(places, value, mask=inside)


# ---- top-k: a chunk a program --------------------------------------------------------------------------------------


@triton.jit
def topk_choose(
    values: tl.tensor, chosen: tl.tensor, places: tl.tensor, width: tl.tensor, kept: tl.tensor, WIDTH: tl.constexpr
) -> None:
    """Write the values of the largest magnitudes and their places, in their order; of equal ones the first."""
    chunk = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    inside = place < width
    value = tl.load(values + chunk * width + place, mask=inside, other=0.0)
    size = tl.where(inside, _bits(value) & _MAGNITUDE, -1)
    last = 0  # the bits of the magnitude that is the last to be kept
    for step in tl.static_range(31):
        tried = last | (1 << (30 - step))
        last = tl.where(tl.sum((size >= tried).to(tl.int32), axis=0) >= kept, tried, last)
    equal = (size == last).to(tl.int32)
    room = kept - tl.sum((size > last).to(tl.int32), axis=0)
    taken = (size > last) | ((equal > 0) & (tl.cumsum(equal, axis=0) <= room))
    at = chunk * kept + tl.cumsum(taken.to(tl.int32), axis=0) - 1
    tl.store(chosen + at, value, mask=taken)
    tl.store(places + at, place.to(tl.int16), mask=taken)


@triton.jit
def _mean(total: tl.tensor, count: tl.tensor) -> tl.tensor:
    return tl.div_rn(total.to(tl.float32), tl.maximum(count, 1).to(tl.float32))


@triton.jit
def _bf16_bits(number: tl.tensor) -> tl.tensor:
    bits = _bits(number)  # of a number that is not negative
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def _scales(number: tl.tensor, inside: tl.tensor, kept: tl.tensor, LEVELS: tl.constexpr) -> tl.tensor:
    """Return low and step of whole numbers."""
    least = tl.min(tl.where(inside, number, _MAGNITUDE), axis=0)
    if LEVELS == 2:
        wide = number.to(tl.int64)
        total = tl.sum(wide, axis=0)
        border = _mean(total, kept)
        low = border
        high = border
        for _ in tl.static_range(2):
            above = inside & (number.to(tl.float32) > border)
            count = tl.sum(above.to(tl.int32), axis=0)
            total_above = tl.sum(tl.where(above, wide, 0), axis=0)
            low = _mean(total - total_above, kept - count)
            high = _mean(total_above, count)
            border = (low + high) * 0.5
    else:
        low = least.to(tl.float32)
        high = tl.max(number, axis=0).to(tl.float32)
    low = tl.where(least > 0, low, 0.0)
    return low, tl.where(high > low, tl.div_rn(high - low, LEVELS - 1.0), 0.0)


@triton.jit
def topk_write(
    chosen: tl.tensor, places: tl.tensor, data: tl.tensor, kept: tl.tensor, BITS: tl.constexpr, KEPT: tl.constexpr
) -> None:
    """Write the bytes of values that were chosen."""
    LEVELS: tl.constexpr = 1 << (BITS - 1)
    EACH: tl.constexpr = 8 // BITS
    chunk = tl.program_id(0).to(tl.int64)
    place_bytes = 3 * ((kept + 1) // 2)
    code_bytes = (kept * BITS + 7) // 8
    start = data + chunk * (place_bytes + code_bytes + 4)
    pair = tl.arange(0, KEPT // 2)
    one = tl.load(places + chunk * kept + 2 * pair, mask=2 * pair < kept, other=0).to(tl.int32)
    two = tl.load(places + chunk * kept + 2 * pair + 1, mask=2 * pair + 1 < kept, other=0).to(tl.int32)
    used = 2 * pair < kept
    tl.store(start + 3 * pair, (one & 255).to(tl.uint8), mask=used)
    tl.store(start + 3 * pair + 1, ((one >> 8) | ((two & 15) << 4)).to(tl.uint8), mask=used)
    tl.store(start + 3 * pair + 2, (two >> 4).to(tl.uint8), mask=used)

    index = tl.arange(0, KEPT)
    inside = index < kept
    value = tl.load(chosen + chunk * kept + index, mask=inside, other=0.0)
    size = _bits(value) & _MAGNITUDE
    finite = tl.max(size, axis=0) < _INFINITE
    size = tl.where(finite, tl.minimum(size, _MOST_SENT), 0)
    exponent = tl.maximum(tl.max(size, axis=0) >> 23, _NOTHING_EXPONENT)
    unit = _number((-exponent + (254 + _WHOLE_BITS)) << 23)
    back = _number((exponent - _WHOLE_BITS) << 23)
    number = (_number(size) * unit).to(tl.int32)
    low, step = _scales(number, inside, kept, LEVELS)
    low_bits = _bf16_bits(low * back)
    step_bits = _bf16_bits(step * back)
    words = tl.where(finite, low_bits | (step_bits << 16), 0x7FC07FC0)
    _store_words(start + place_bytes + code_bytes, words, True)
    low = _number(low_bits << 16) * unit
    step = _number(step_bits << 16) * unit
    inverse = tl.where(step > 0, tl.div_rn(1.0, tl.where(step > 0, step, 1.0)), 0.0)
    level = tl.minimum(tl.maximum((number.to(tl.float32) - low) * inverse, 0.0), LEVELS - 1.0)
    code = ((level + _EVEN) - _EVEN).to(tl.int32) | tl.where(value < 0, LEVELS, 0)
    code = tl.where(inside & finite, code, 0)
    packed = tl.sum(tl.reshape(code, [KEPT // EACH, EACH]) << (BITS * tl.arange(0, EACH))[None, :], axis=1)
    byte = tl.arange(0, KEPT // EACH)
    tl.store(start + place_bytes + byte, packed.to(tl.uint8), mask=byte < code_bytes)


@triton.jit
def topk_decode(
    data: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    width: tl.tensor,
    kept: tl.tensor,
    BITS: tl.constexpr,
    KEPT: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    LEVELS: tl.constexpr = 1 << (BITS - 1)
    chunk = tl.program_id(0).to(tl.int64)
    place_bytes = 3 * ((kept + 1) // 2)
    code_bytes = (kept * BITS + 7) // 8
    start = data + chunk * (place_bytes + code_bytes + 4)
    index = tl.arange(0, KEPT)
    inside = index < kept
    second = index % 2
    byte = start + 3 * (index // 2) + second
    one = tl.load(byte, mask=inside, other=0).to(tl.int32)
    two = tl.load(byte + 1, mask=inside, other=0).to(tl.int32)
    place = tl.where(second > 0, (one >> 4) | (two << 4), one | ((two & 15) << 8))
    inside = inside & (place < width)  # only broken bytes have places outside
    code = tl.load(start + place_bytes + index * BITS // 8, mask=inside, other=0).to(tl.int32)
    code = (code >> (index * BITS % 8)) & (2 * LEVELS - 1)
    words = _load_words(start + place_bytes + code_bytes, True)
    low = _number(words << 16)
    step = _number(words & -65536)
    size = (code & (LEVELS - 1)).to(tl.float32) * step + low
    value = _number(_bits(size) | tl.where(code >= LEVELS, -0x80000000, 0))  # the sign of zeros counts, too
    places = out + chunk * width + place
    if ADD:
        value = tl.load(places, mask=inside, other=0.0) + value * weight
    tl.store(places, value, mask=inside)
