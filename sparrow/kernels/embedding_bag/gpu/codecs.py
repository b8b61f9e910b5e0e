"""Rows of every format as fp32 lanes, and back. `kernels/formats` defines them and
`numerics/rounding` the noise.
"""

import triton
import triton.language as tl


@triton.jit
def row_at(address, rows, ROW_BYTES: tl.constexpr, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers [ROWS, 1] to rows that lie together from `address` on, which is a multiple of ALIGN
    bytes.
    """
    SHARED: tl.constexpr = (ROW_BYTES & -ROW_BYTES) if (ROW_BYTES & -ROW_BYTES) < ALIGN else ALIGN
    return tl.multiple_of((address + rows * ROW_BYTES).to(tl.pointer_type(TYPE)), SHARED)[:, None]


@triton.jit
def vectors_at(address, rows, stride, ALIGN: tl.constexpr):
    """Pointers [ROWS, 1] to vectors of fp32 that are `stride` bytes apart; ALIGN divides address
    and stride.
    """
    return tl.multiple_of((address + rows * stride).to(tl.pointer_type(tl.float32)), ALIGN)[:, None]


@triton.jit
def number_at(address, rows, TYPE: tl.constexpr):
    """Pointers [ROWS] to numbers that lie together from `address` on."""
    return address.to(tl.pointer_type(TYPE)) + rows


# -- noise -----------------------------------------------------------------------------------------


@triton.jit
def _splitmix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def noise(key, FIELD: tl.constexpr, rows, n, columns):
    """u, uint32 [ROWS, columns], of rows [ROWS] and columns [1, columns] of the whole component."""
    mixed = _splitmix64(
        rows.to(tl.uint64) + _splitmix64((n * 16 + FIELD).to(tl.uint64) ^ key.to(tl.uint64))
    )[:, None]
    h = columns.to(tl.uint32) * 0x9E3779B9 + mixed.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = h ^ (mixed >> 32).to(tl.uint32)
    h = (h ^ (h >> 15)) * 0x735A2D97
    return h ^ (h >> 15)


# -- rounding --------------------------------------------------------------------------------------


@triton.jit
def _round_stochastic(x, u):
    """x >= 0 rounded to a whole number stochastically; 0 for NaN."""
    below = tl.floor(x)
    part = ((x - below) * 2147483648.0).to(tl.uint32)
    return tl.where(x == x, below + ((u >> 1) < part).to(tl.float32), 0.0)


@triton.jit
def _nearest(x):
    """0 <= x <= 255 rounded to a whole number, ties to even: there are no fractions above 1.5 *
    2^23.
    """
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _with_sign(size, x):
    bits = size.to(tl.uint32, bitcast=True) | (x.to(tl.uint32, bitcast=True) & 0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _is_finite(size):
    return size < float("inf")


@triton.jit
def to_fp16(x, u, STOCHASTIC: tl.constexpr):
    """float16."""
    if not STOCHASTIC:
        return x.to(tl.float16)
    size = tl.abs(x)
    size = tl.where(_is_finite(size), tl.minimum(size, 65504.0), size)
    dropped = ((size.to(tl.uint32, bitcast=True) + (u >> 19)) & 0xFFFFE000).to(
        tl.float32, bitcast=True
    )
    small = (
        _round_stochastic(tl.where(size < 6.103515625e-05, size, 0.0) * 16777216.0, u)
        * 5.9604644775390625e-08
    )
    rounded = tl.where(size < 6.103515625e-05, small, tl.where(_is_finite(size), dropped, size))
    return _with_sign(rounded, x).to(tl.float16)


@triton.jit
def to_bf16(x, u, STOCHASTIC: tl.constexpr):
    """bfloat16, as its bits, uint16."""
    bits = x.to(tl.uint32, bitcast=True)
    if STOCHASTIC:
        size = tl.abs(x)
        most = tl.minimum(size, 3.3895313892515355e38).to(tl.uint32, bitcast=True)
        raised = tl.where(_is_finite(size), most + (u >> 16), bits)
        cut = ((raised & 0x7FFF0000) | (bits & 0x80000000)) >> 16
    else:
        cut = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, cut, 0x7FC0).to(tl.uint16)


@triton.jit
def _from_bf16(bits):
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


# -- bytes -----------------------------------------------------------------------------------------


@triton.jit
def _load_bits(bytes_at, valid, BYTES: tl.constexpr, WORD: tl.constexpr, ALIGN: tl.constexpr):
    """An unsigned number of so many bytes, at a place that is a multiple of ALIGN."""
    if ALIGN >= BYTES:
        return tl.load(bytes_at.to(tl.pointer_type(WORD)), mask=valid, other=0)
    bits = tl.load(bytes_at, mask=valid, other=0).to(tl.uint32)
    for i in tl.static_range(1, BYTES):
        bits |= tl.load(bytes_at + i, mask=valid, other=0).to(tl.uint32) << (8 * i)
    return bits.to(WORD)


@triton.jit
def _store_bits(
    bytes_at, bits, valid, BYTES: tl.constexpr, WORD: tl.constexpr, ALIGN: tl.constexpr
):
    if ALIGN >= BYTES:
        tl.store(bytes_at.to(tl.pointer_type(WORD)), bits, mask=valid)
    else:
        for i in tl.static_range(BYTES):
            tl.store(bytes_at + i, ((bits.to(tl.uint32) >> (8 * i)) & 255).to(tl.uint8), mask=valid)


@triton.jit
def _ends(x, inside):
    """The least and the greatest number of each row [ROWS, 1]; NaN where a row has one."""
    bad = tl.max((inside & (x != x)).to(tl.int32), 1)[:, None] > 0
    low = tl.min(tl.where(inside, x, float("inf")), 1)[:, None] + 0.0  # no -0
    high = tl.max(tl.where(inside, x, float("-inf")), 1)[:, None] + 0.0
    return tl.where(bad, float("nan"), low), tl.where(bad, float("nan"), high)


@triton.jit
def _bounded(x, MOST: tl.constexpr):
    """x in [0, MOST]; 0 for NaN."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, 0.0), MOST), 0.0)


# -- int8 and int4 ---------------------------------------------------------------------------------


@triton.jit
def _encode_int8(x, u, inside, STOCHASTIC: tl.constexpr):
    """Codes [ROWS, BLOCK_D], scale and bias [ROWS, 1]."""
    low, high = _ends(x, inside)
    scale = tl.math.div_rn(high - low, 255.0)
    if STOCHASTIC:
        codes = _round_stochastic(
            _bounded(tl.math.div_rn(x - low, tl.where(scale > 0, scale, 1.0)), 255.0), u
        )
    else:
        codes = _nearest(_bounded((x - low) * tl.math.div_rn(255.0, high - low + 1e-8), 255.0))
    return codes, scale, low


@triton.jit
def _bits16(x):
    return x.to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def _from_bits16(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _below(x):
    """The largest float16 that is not above x."""
    near = x.to(tl.float16)
    lower = tl.where(near > 0, _bits16(near) - 1, tl.where(near == 0, -0x7FFF, _bits16(near) + 1))
    return tl.where(near.to(tl.float32) > x, _from_bits16(lower), near)


@triton.jit
def _encode_int4(x, u, inside, STOCHASTIC: tl.constexpr):
    """Codes [ROWS, BLOCK_D], scale and bias [ROWS, 1] in float16."""
    low, high = _ends(x, inside)
    bias = _below(low) if STOCHASTIC else low.to(tl.float16)
    begin = bias.to(tl.float32)
    scale = tl.math.div_rn(tl.where(high == begin, 15.0, high - begin), 15.0).to(tl.float16)
    if STOCHASTIC:
        for _ in tl.static_range(2):
            cut = begin + 15.0 * scale.to(tl.float32) < high
            scale = tl.where(cut, _from_bits16(_bits16(scale) + 1), scale)
        codes = _round_stochastic(
            _bounded(tl.math.div_rn(x - begin, scale.to(tl.float32)), 15.0), u
        )
    else:
        scale = tl.where(scale == 0, 1.0, scale.to(tl.float32)).to(tl.float16)
        codes = _nearest(_bounded((x - begin) * tl.math.div_rn(1.0, scale.to(tl.float32)), 15.0))
    return codes, scale, bias


@triton.jit
def _load_codes(address, rows, valid, FORMAT: tl.constexpr, OF: tl.constexpr):
    """Values of rows of codes."""
    lanes = tl.arange(0, OF.BLOCK_D)[None, :]
    mask = valid[:, None] & (lanes < OF.D)
    if FORMAT == "int8":
        at = row_at(address, rows, OF.D + 8, tl.uint8, OF.ALIGN)
        codes = tl.load(at + lanes, mask=mask, other=0)
        WORDS: tl.constexpr = 4 if OF.ALIGN >= 4 and OF.D % 4 == 0 else 1
        scale = _load_bits(at + OF.D, valid[:, None], 4, tl.uint32, WORDS).to(
            tl.float32, bitcast=True
        )
        bias = _load_bits(at + OF.D + 4, valid[:, None], 4, tl.uint32, WORDS).to(
            tl.float32, bitcast=True
        )
    else:
        PAIRS: tl.constexpr = (OF.D + 1) // 2
        at = row_at(address, rows, PAIRS + 4, tl.uint8, OF.ALIGN)
        codes = (tl.load(at + lanes // 2, mask=mask, other=0) >> (lanes % 2 * 4).to(tl.uint8)) & 15
        HALVES: tl.constexpr = 2 if OF.ALIGN >= 2 and PAIRS % 2 == 0 else 1
        scale = (
            _load_bits(at + PAIRS, valid[:, None], 2, tl.uint16, HALVES)
            .to(tl.float16, bitcast=True)
            .to(tl.float32)
        )
        bias = (
            _load_bits(at + PAIRS + 2, valid[:, None], 2, tl.uint16, HALVES)
            .to(tl.float16, bitcast=True)
            .to(tl.float32)
        )
    return tl.where(mask, codes.to(tl.float32) * scale + bias, 0.0)


@triton.jit
def _store_codes(
    address, rows, valid, x, u, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr, OF: tl.constexpr
):
    lanes = tl.arange(0, OF.BLOCK_D)[None, :]
    inside = lanes < OF.D
    if FORMAT == "int8":
        codes, scale, bias = _encode_int8(x, u, inside, STOCHASTIC)
        at = row_at(address, rows, OF.D + 8, tl.uint8, OF.ALIGN)
        tl.store(at + lanes, codes.to(tl.uint8), mask=valid[:, None] & inside)
        WORDS: tl.constexpr = 4 if OF.ALIGN >= 4 and OF.D % 4 == 0 else 1
        _store_bits(
            at + OF.D, scale.to(tl.uint32, bitcast=True), valid[:, None], 4, tl.uint32, WORDS
        )
        _store_bits(
            at + OF.D + 4, bias.to(tl.uint32, bitcast=True), valid[:, None], 4, tl.uint32, WORDS
        )
    else:
        PAIRS: tl.constexpr = (OF.D + 1) // 2
        codes, scale, bias = _encode_int4(x, u, inside, STOCHASTIC)
        at = row_at(address, rows, PAIRS + 4, tl.uint8, OF.ALIGN)
        codes = tl.where(inside, codes, 0.0).to(tl.uint8)
        if OF.BLOCK_D > 1:
            low, high = tl.split(tl.reshape(codes, [codes.shape[0], OF.BLOCK_D // 2, 2]))
            pairs = low | (high << 4)
            place = tl.arange(0, OF.BLOCK_D // 2)[None, :]
            tl.store(at + place, pairs, mask=valid[:, None] & (place < PAIRS))
        else:
            tl.store(at, codes, mask=valid[:, None])
        HALVES: tl.constexpr = 2 if OF.ALIGN >= 2 and PAIRS % 2 == 0 else 1
        _store_bits(
            at + PAIRS, scale.to(tl.uint16, bitcast=True), valid[:, None], 2, tl.uint16, HALVES
        )
        _store_bits(
            at + PAIRS + 2, bias.to(tl.uint16, bitcast=True), valid[:, None], 2, tl.uint16, HALVES
        )


# -- OCP's MX formats: codes, and a byte of scale for each block of 32 columns ---------------------


@triton.jit
def _power(byte):
    """2^(byte - 127), fp32: subnormal for 0, NaN for 255."""
    has_bit = (byte == 0) | (byte == 255)
    return ((byte << 23) | (has_bit.to(tl.int32) << 22)).to(tl.float32, bitcast=True)


@triton.jit
def _numbers(codes, MX: tl.constexpr):
    """What codes say, but for the scale."""
    if MX.is_complement:
        return ((codes << 24) >> 24).to(tl.float32) * (1 / (1 << (MX.bias + MX.mantissa - 1)))
    size = codes & ((1 << (MX.bits - 1)) - 1)
    exponent = size >> MX.mantissa
    steps = (size & ((1 << MX.mantissa) - 1)) | ((exponent > 0).to(tl.int32) << MX.mantissa)
    number = steps.to(tl.float32) * _power(tl.maximum(exponent, 1) + (127 - MX.bias - MX.mantissa))
    return (number.to(tl.int32, bitcast=True) | ((codes >> (MX.bits - 1)) << 31)).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _load_mx(address, rows, valid, MX: tl.constexpr, OF: tl.constexpr):
    """Values of rows in an MX format."""
    lanes = tl.arange(0, OF.BLOCK_D)[None, :]
    mask = valid[:, None] & (lanes < OF.D)
    BYTES: tl.constexpr = (OF.D * MX.bits + 7) // 8
    at = row_at(address, rows, BYTES + (OF.D + 31) // 32, tl.uint8, OF.ALIGN)
    byte, skip = lanes * MX.bits // 8, lanes * MX.bits % 8
    codes = tl.load(at + byte, mask=mask, other=0).to(tl.int32) >> skip
    if MX.bits == 6:  # the bits above may be in the next byte
        codes |= tl.load(at + byte + 1, mask=mask & (skip > 2), other=0).to(tl.int32) << (8 - skip)
    scale = _power(tl.load(at + BYTES + lanes // 32, mask=mask, other=0).to(tl.int32))
    return tl.where(mask, _numbers(codes & ((1 << MX.bits) - 1), MX) * scale, 0.0)


@triton.jit
def _encode_mx(x, u, STOCHASTIC: tl.constexpr, MX: tl.constexpr):
    """Codes [ROWS, BLOCK_D] and the bytes of scales [ROWS, blocks], int32. x: 0 in columns that are
    not there.
    """
    WIDTH: tl.constexpr = 32 if x.shape[1] > 32 else x.shape[1]
    # under a larger exponent, numbers would be infinite
    TOP: tl.constexpr = 127 + MX.bias - (MX.most >> MX.mantissa)
    blocks = tl.reshape(
        x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, [x.shape[0], x.shape[1] // WIDTH, WIDTH]
    )
    most = tl.max(blocks, 2)  # of bits: NaN is above infinity, and that above all numbers
    exponent = tl.minimum(tl.maximum((most >> 23) - (254 - TOP), -127), TOP)
    if MX.is_ceil:
        is_cut = most.to(tl.float32, bitcast=True) > MX.largest * _power(exponent + 127)
        exponent = tl.minimum(exponent + is_cut.to(tl.int32), TOP)
    scales = tl.where(most < 0x7F800000, exponent + 127, 255)
    spread = tl.reshape(tl.broadcast_to(scales[:, :, None], blocks.shape), x.shape)
    y = tl.where(spread == 255, 0.0, x * _power(254 - spread))
    bits = y.to(tl.int32, bitcast=True)
    LEAST: tl.constexpr = 128 - MX.bias  # the exponent of numbers that have all bits of mantissa
    place = tl.maximum((bits >> 23) & 255, LEAST)
    steps = tl.abs(y) * _power(254 + MX.mantissa - place)
    rounded = _round_stochastic(steps, u) if STOCHASTIC else _nearest(steps)
    codes = tl.minimum(((place - LEAST) << MX.mantissa) + rounded.to(tl.int32), MX.most)
    if MX.is_complement:
        codes = tl.where(bits < 0, -codes, codes) & 255
    else:
        codes |= (bits < 0).to(tl.int32) << (MX.bits - 1)
    return codes, scales


@triton.jit
def _store_mx(
    address, rows, valid, x, u, MX: tl.constexpr, STOCHASTIC: tl.constexpr, OF: tl.constexpr
):
    lanes = tl.arange(0, OF.BLOCK_D)[None, :]
    codes, scales = _encode_mx(tl.where(lanes < OF.D, x, 0.0), u, STOCHASTIC, MX)
    BYTES: tl.constexpr = (OF.D * MX.bits + 7) // 8
    BLOCKS: tl.constexpr = (OF.D + 31) // 32
    at = row_at(address, rows, BYTES + BLOCKS, tl.uint8, OF.ALIGN)
    if MX.bits == 8:
        tl.store(at + lanes, codes.to(tl.uint8), mask=valid[:, None] & (lanes < OF.D))
    else:  # four codes are whole bytes together
        FOUR: tl.constexpr = 4 if OF.BLOCK_D > 4 else OF.BLOCK_D
        SPAN: tl.constexpr = (FOUR * MX.bits + 7) // 8
        shifted = tl.reshape(codes, [codes.shape[0], OF.BLOCK_D // FOUR, FOUR]) << (
            tl.arange(0, FOUR) * MX.bits
        )
        words = tl.sum(shifted, 2)
        place = tl.arange(0, OF.BLOCK_D // FOUR)[None, :] * SPAN
        for i in tl.static_range(SPAN):
            byte = ((words >> (8 * i)) & 255).to(tl.uint8)
            tl.store(at + place + i, byte, mask=valid[:, None] & (place + i < BYTES))
    block = tl.arange(0, scales.shape[1])[None, :]
    tl.store(at + BYTES + block, scales.to(tl.uint8), mask=valid[:, None] & (block < BLOCKS))


# -- every format ----------------------------------------------------------------------------------


@triton.jit
def load_row(at, rows, valid, FORMAT: tl.constexpr, EXACT: tl.constexpr, OF: tl.constexpr):
    """Values of rows, float32 [ROWS, BLOCK_D], 0 where there is none.

    at: the addresses of the two fields of the payload, for all rows or [ROWS]. rows: int64 [ROWS].
    valid: which of them are read. EXACT: as a rule begins with them, not as a lookup reads them.
    """
    lanes = tl.arange(0, OF.BLOCK_D)[None, :]
    mask = valid[:, None] & (lanes < OF.D)
    if FORMAT == "fp32":
        values = tl.load(
            row_at(at[0], rows, OF.D * 4, tl.float32, OF.ALIGN) + lanes, mask=mask, other=0.0
        )
    elif FORMAT == "fp16":
        values = tl.load(
            row_at(at[0], rows, OF.D * 2, tl.float16, OF.ALIGN) + lanes, mask=mask, other=0.0
        ).to(tl.float32)
    elif FORMAT == "bf16" or (FORMAT == "split_bf16" and not EXACT):
        values = _from_bf16(
            tl.load(row_at(at[0], rows, OF.D * 2, tl.uint16, OF.ALIGN) + lanes, mask=mask, other=0)
        )
    elif FORMAT == "split_bf16":
        above = tl.load(
            row_at(at[0], rows, OF.D * 2, tl.uint16, OF.ALIGN) + lanes, mask=mask, other=0
        ).to(tl.uint32)
        below = tl.load(
            row_at(at[1], rows, OF.D * 2, tl.uint16, OF.ALIGN) + lanes, mask=mask, other=0
        ).to(tl.uint32)
        values = ((above << 16) | below).to(tl.float32, bitcast=True)
    elif FORMAT == "mx":
        values = _load_mx(at[0], rows, valid, OF.mx, OF)
    else:
        values = _load_codes(at[0], rows, valid, FORMAT, OF)
    return values


@triton.jit
def store_row(
    at, rows, valid, x, u, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr, OF: tl.constexpr
):
    """Write values x [ROWS, BLOCK_D], rounded with u if STOCHASTIC. The rest is as for
    `load_row`.
    """
    lanes = tl.arange(0, OF.BLOCK_D)[None, :]
    mask = valid[:, None] & (lanes < OF.D)
    if FORMAT == "fp32":
        tl.store(row_at(at[0], rows, OF.D * 4, tl.float32, OF.ALIGN) + lanes, x, mask=mask)
    elif FORMAT == "fp16":
        tl.store(
            row_at(at[0], rows, OF.D * 2, tl.float16, OF.ALIGN) + lanes,
            to_fp16(x, u, STOCHASTIC),
            mask=mask,
        )
    elif FORMAT == "bf16":
        tl.store(
            row_at(at[0], rows, OF.D * 2, tl.uint16, OF.ALIGN) + lanes,
            to_bf16(x, u, STOCHASTIC),
            mask=mask,
        )
    elif FORMAT == "split_bf16":
        bits = x.to(tl.uint32, bitcast=True)
        tl.store(
            row_at(at[0], rows, OF.D * 2, tl.uint16, OF.ALIGN) + lanes,
            (bits >> 16).to(tl.uint16),
            mask=mask,
        )
        tl.store(
            row_at(at[1], rows, OF.D * 2, tl.uint16, OF.ALIGN) + lanes,
            (bits & 0xFFFF).to(tl.uint16),
            mask=mask,
        )
    elif FORMAT == "mx":
        _store_mx(at[0], rows, valid, x, u, OF.mx, STOCHASTIC, OF)
    else:
        _store_codes(at[0], rows, valid, x, u, FORMAT, STOCHASTIC, OF)


@triton.jit
def load_state(address, rows, valid, KIND: tl.constexpr, OF: tl.constexpr):
    """A field of a rule's state, float32 [ROWS, BLOCK_D], or [ROWS, 1] for a number a row or no
    field at all.
    """
    if KIND == "":
        return tl.zeros([rows.shape[0], 1], tl.float32)
    elif KIND == "fp32 row":
        return load_row((address, address), rows, valid, "fp32", True, OF)
    elif KIND == "bf16 row":
        return load_row((address, address), rows, valid, "bf16", True, OF)
    elif KIND == "fp32 number":
        return tl.load(number_at(address, rows, tl.float32), mask=valid, other=0.0)[:, None]
    else:
        return _from_bf16(tl.load(number_at(address, rows, tl.uint16), mask=valid, other=0))[
            :, None
        ]


@triton.jit
def store_state(address, rows, valid, x, u, KIND: tl.constexpr, OF: tl.constexpr):
    """Write a field of a rule's state; bf16 is rounded stochastically with u."""
    if KIND == "fp32 row":
        store_row((address, address), rows, valid, x, u, "fp32", False, OF)
    elif KIND == "bf16 row":
        store_row((address, address), rows, valid, x, u, "bf16", True, OF)
    elif KIND == "fp32 number":
        tl.store(number_at(address, rows, tl.float32)[:, None], x, mask=valid[:, None])
    elif KIND == "bf16 number":
        tl.store(
            number_at(address, rows, tl.uint16)[:, None], to_bf16(x, u, True), mask=valid[:, None]
        )
