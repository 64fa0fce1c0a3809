"""The word grid: NVFP4 weights laid out once, at load, so that a kernel unpacks them without moving data.

One grid element is one scale group of 16 codes: two 32-bit words, and one scale byte in an array of the same grid, so
that unpacking is elementwise. A tile of the grid is ROWS output columns x GROUPS scale groups, that is 256 of K.

For i in 0..15 a kernel takes code i of every group of a tile, [ROWS, GROUPS] weights, and multiplies them with the
activations of the same k = 16 g + i (`prepare_rows`). Two neighbouring groups are unpacked at once, as the two 16-bit
halves of one register. `Arrangement` says how codes lie in the words.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.models.quant import GROUP, unpack_codes

ROWS = 64  # output columns of a tile
GROUPS = 16  # scale groups of a tile
STEP = GROUP * GROUPS  # of K in a tile

# How codes lie in the words. SHIFTED: bit tricks (Hopper); a code is found by a shift and a mask, or a few.
# BYTES: hardware conversion (Blackwell); a byte holds the code i of two neighbouring groups, the even group low.
# FRAGMENTS: bit tricks, for kernels whose threads hold wgmma's left operand: of a tile, what 64 of K need comes first,
# in it the 4 words of each of 128 threads, and the scales of each four of these. See `_fragment_words`.
SHIFTED, BYTES, FRAGMENTS = "shifted", "bytes", "fragments"

# Bits that hold the code at each of the 4 positions of a word's lower half: (sign, two exponent bits, mantissa bit), of
# the upper half 16 bits on, round the word. In bfloat16 they belong at 15, 8, 7, 6: position 0 lies there, 1 is a left
# shift by 6 away, 2 a rotation by 12, and 3 takes the bits that are left, a left shift by 2 and a right one by 6. No
# four rotations would do.
CODE_BITS = ((15, 8, 7, 6), (9, 2, 1, 0), (3, -4, -5, -6), (13, 14, 5, 4))

# Unsigned scales with 5 exponent bits and bias 10: e4m3 values, subnormals too, map exactly and have no subnormals.
_SCALE_OF_SUBNORMAL = np.array([0, 8, 16, 20, 24, 26, 28, 30], np.uint8)
_SCALE_NAN = np.uint8(19 << 3 | 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GridWeight:
    """A weight [K -> parts x width], or a stack of them with leading axes.

    Attributes:
      words: int32[..., NB, KB, 2, ROWS, GROUPS]; NB = parts * ceil(width / ROWS), KB = ceil(K / STEP). Padding is zero.
      scales: uint8[..., NB, KB, ROWS, GROUPS], the group's scale as an unsigned float with 5 exponent and 3 mantissa
        bits; a group whose scale is zero has zero codes.
      factors: float32[..., NB], the global scale of each block of columns.
      k: static, inputs.
      parts: static, tensors side by side (gate and up); each starts a new block.
      width: static, outputs of a part.
      arrangement: static, SHIFTED, BYTES or FRAGMENTS.
    """

    words: jax.Array
    scales: jax.Array
    factors: jax.Array
    k: int = dataclasses.field(metadata={"static": True})
    parts: int = dataclasses.field(metadata={"static": True})
    width: int = dataclasses.field(metadata={"static": True})
    arrangement: str = dataclasses.field(default=SHIFTED, metadata={"static": True})

    @property
    def lead(self) -> tuple[int, ...]:
        return self.words.shape[:-5]

    @property
    def num_blocks(self) -> int:
        return self.words.shape[-5]

    @property
    def num_steps(self) -> int:
        return self.words.shape[-4]

    @property
    def nbytes(self) -> int:
        return sum(a.size * a.dtype.itemsize for a in (self.words, self.scales, self.factors))


@functools.partial(jax.jit, static_argnames="arrangement")
def make_grid(
    codes: jax.Array, scales: jax.Array, global_scale: jax.Array, *, arrangement: str = SHIFTED
) -> GridWeight:
    """Lays out one weight, or a stack.

    Args:
      codes: uint8[..., K / 2, P, width], two E2M1 codes a byte along K, the even k in the low nibble.
      scales: float8_e4m3fn[..., K / 16, P, width]; negative ones move their sign into the codes, NaN stays NaN.
      global_scale: float32, broadcastable to [..., P].
      arrangement: SHIFTED, BYTES or FRAGMENTS.
    """
    lead = codes.shape[:-3]
    parts, width = codes.shape[-2:]
    k = 2 * codes.shape[-3]
    factor = jnp.broadcast_to(global_scale, (*lead, parts)).astype(jnp.float32)
    flat_codes = codes.reshape(-1, *codes.shape[-3:])
    flat_scales = scales.reshape(-1, *scales.shape[-3:])
    # One matrix at a time: the layout needs several times a matrix in between.
    words, bytes_ = jax.lax.map(lambda pair: _lay_out(*pair, arrangement), (flat_codes, flat_scales))
    blocks = words.shape[1]
    return GridWeight(
        words=words.reshape(*lead, *words.shape[1:]),
        scales=bytes_.reshape(*lead, *bytes_.shape[1:]),
        factors=jnp.repeat(factor, blocks // parts, axis=-1),
        k=k,
        parts=parts,
        width=width,
        arrangement=arrangement,
    )


def _lay_out(codes: jax.Array, scales: jax.Array, arrangement: str) -> tuple[jax.Array, jax.Array]:
    unpacked = unpack_codes(codes, 0)  # [K, P, width]
    k, parts, width = unpacked.shape
    byte = jax.lax.bitcast_convert_type(scales, jnp.uint8)  # [K / 16, P, width]
    grouped = unpacked.reshape(k // GROUP, GROUP, parts, width)
    grouped = grouped ^ jnp.where(byte >= 128, jnp.uint8(8), jnp.uint8(0))[:, None]
    magnitude = byte & jnp.uint8(127)
    grouped = jnp.where(magnitude[:, None] == 0, jnp.uint8(0), grouped)
    subnormal = jnp.asarray(_SCALE_OF_SUBNORMAL)[jnp.minimum(magnitude, 7)]
    unsigned = jnp.where(magnitude < 8, subnormal, magnitude + jnp.uint8(24))
    unsigned = jnp.where(magnitude == 127, _SCALE_NAN, unsigned)
    pad_k, pad_n = -k % STEP, -width % ROWS
    grouped = jnp.pad(grouped, ((0, pad_k // GROUP), (0, 0), (0, 0), (0, pad_n)))
    unsigned = jnp.pad(unsigned, ((0, pad_k // GROUP), (0, 0), (0, pad_n)))
    steps, blocks = (k + pad_k) // STEP, parts * (width + pad_n) // ROWS
    # [KB, G, 16, NB, ROWS] -> [NB, KB, ROWS, G, 16]
    grid = grouped.transpose(2, 3, 0, 1).reshape(blocks, ROWS, steps, GROUPS, GROUP).transpose(0, 2, 1, 3, 4)
    scale_grid = unsigned.transpose(1, 2, 0).reshape(blocks, ROWS, steps, GROUPS).transpose(0, 2, 1, 3)
    if arrangement == FRAGMENTS:
        return _fragment_words(grid), _fragment_scales(scale_grid)
    return _make_words(grid, arrangement), scale_grid


def _put(codes: jax.Array, position: int, half: int) -> jax.Array:
    """Words that hold the codes at a position of a half, by `CODE_BITS`, and nothing else."""
    words = jnp.zeros_like(codes)
    for bit, place in zip((3, 2, 1, 0), CODE_BITS[position], strict=True):
        words |= (codes >> bit & 1) << (place + 16 * half) % 32
    return words


def _get(words: jax.Array, position: int, half: int) -> jax.Array:
    """The codes that `_put` has placed."""
    codes = jnp.zeros_like(words)
    for bit, place in zip((3, 2, 1, 0), CODE_BITS[position], strict=True):
        codes |= (words >> (place + 16 * half) % 32 & 1) << bit
    return codes


# Rows of a tile: warp, half of the warp's 16, lane / 4. Groups: 64 of K, group of these. Codes of a group: half,
# lane % 4, and the half of a register. PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16", matrix A.
_FRAGMENT_ROWS, _FRAGMENT_GROUPS, _FRAGMENT_CODES = (4, 2, 8), (4, 4), (2, 4, 2)


def _fragment_words(grid: jax.Array) -> jax.Array:
    """uint8[NB, KB, ROWS, G, 16] codes -> int32[NB, KB, 2, ROWS, G], in truth [.., 4 of K, 4, 8, 4 (thread), 4 words].

    Word n of a thread has its codes of group n; position 2 q + h of either half of it those of half q of the group and
    half h of the rows, which `CODE_BITS` places.
    """
    nb, kb = grid.shape[:2]
    codes = grid.reshape(nb, kb, *_FRAGMENT_ROWS, *_FRAGMENT_GROUPS, *_FRAGMENT_CODES).astype(jnp.uint32)
    # NB, KB, w, h, g, chunk, n, q, c, side -> NB, KB, chunk, w, g, c, n, q, h, side
    codes = codes.transpose(0, 1, 5, 2, 4, 8, 6, 7, 3, 9).reshape(nb, kb, -1, 4, 2)
    words = jnp.zeros(codes.shape[:-2], jnp.uint32)
    for side in range(2):
        for position in range(4):
            words |= _put(codes[..., position, side], position, side)
    return jax.lax.bitcast_convert_type(words.reshape(nb, kb, 2, ROWS, GROUPS), jnp.int32)


def _fragment_scales(scales: jax.Array) -> jax.Array:
    """uint8[NB, KB, ROWS, G] -> the same shape, in truth [.., 4 of K, 4, 8 (thread / 4), 2 (half), 4 groups]."""
    nb, kb = scales.shape[:2]
    split = scales.reshape(nb, kb, *_FRAGMENT_ROWS, *_FRAGMENT_GROUPS)  # NB, KB, w, h, g, chunk, n
    return split.transpose(0, 1, 5, 2, 4, 3, 6).reshape(scales.shape)


def tile_codes(words: jax.Array, arrangement: str) -> jax.Array:
    """int32 codes [..., ROWS, G, 16] of words [..., 2, ROWS, G]."""
    if arrangement != FRAGMENTS:
        columns = [group_codes(words[..., i // 8, :, :], i, arrangement) for i in range(GROUP)]
        return jnp.stack(columns, axis=-1)
    lead = words.shape[:-3]
    codes = jnp.stack([_get(words, position, side) for position in range(4) for side in range(2)], axis=-1)
    codes = codes.reshape(*lead, 4, 4, 8, 4, 4, 2, 2, 2)  # chunk, w, g, c, n, q, h, side
    axes = len(lead)
    order = (*range(axes), *(axes + i for i in (1, 6, 2, 0, 4, 5, 3, 7)))  # w, h, g, chunk, n, q, c, side
    return codes.transpose(order).reshape(*lead, ROWS, GROUPS, GROUP)


def tile_scales(scales: jax.Array, arrangement: str) -> jax.Array:
    """uint8[..., ROWS, G] by row and group."""
    if arrangement != FRAGMENTS:
        return scales
    lead = scales.shape[:-2]
    split = scales.reshape(*lead, 4, 4, 8, 2, 4)  # chunk, w, g, h, n
    axes = len(lead)
    return split.transpose(*range(axes), *(axes + i for i in (1, 3, 2, 0, 4))).reshape(scales.shape)


def _make_words(grid: jax.Array, arrangement: str) -> jax.Array:
    """uint8[NB, KB, ROWS, G, 16] codes -> int32[NB, KB, 2, ROWS, G]."""
    nb, kb = grid.shape[:2]
    # code i = 8 h + 4 r + position: in word h of the element r of a pair of groups
    codes = grid.reshape(nb, kb, ROWS, GROUPS // 2, 2, 2, 2, 4).astype(jnp.uint32)  # .., pair, half, h, r, position
    words = jnp.zeros((nb, kb, ROWS, GROUPS // 2, 2, 2), jnp.uint32)  # .., pair, h, r
    for half in range(2):
        for position in range(4):
            code = codes[:, :, :, :, half, :, :, position]
            words |= code << (8 * position + 4 * half) if arrangement == BYTES else _put(code, position, half)
    words = words.transpose(0, 1, 4, 2, 3, 5).reshape(nb, kb, 2, ROWS, GROUPS)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def group_codes(words: jax.Array, i: int, arrangement: str) -> jax.Array:
    """int32 codes [..., ROWS, G] of place `i` of every group, from words int32[2 arrays of ..., ROWS, G].

    Plain JAX, for the reference and for kernels under interpret; `words` is the array of word h = i // 8.
    """
    r, position = i // 4 % 2, i % 4
    pair = words.reshape(*words.shape[:-1], GROUPS // 2, 2)[..., r]
    halves = []
    for half in range(2):
        code = pair >> (8 * position + 4 * half) & 15 if arrangement == BYTES else _get(pair, position, half)
        halves.append(code)
    return jnp.stack(halves, axis=-1).reshape(words.shape)


def code_values(codes: jax.Array) -> jax.Array:
    """float32 values of int32 E2M1 codes, by arithmetic."""
    magnitude = codes & 7
    doubled = jnp.where(magnitude < 4, magnitude, jnp.where(magnitude < 6, 2 * magnitude - 4, 4 * magnitude - 16))
    return doubled.astype(jnp.float32) * jnp.where(codes < 8, jnp.float32(0.5), jnp.float32(-0.5))


def scale_values(scales: jax.Array) -> jax.Array:
    """float32 values of the grid's scale bytes."""
    code = scales.astype(jnp.int32)
    # The exponent goes straight into the float: 2^(e - 10) has the biased exponent e + 117.
    value = jax.lax.bitcast_convert_type(((code >> 3) + 117) << 23 | (code & 7) << 20, jnp.float32)
    return jnp.where(code == int(_SCALE_NAN), jnp.float32(jnp.nan), value)


def decode_grid(weight: GridWeight, dtype: jnp.dtype, *, factors: bool = True) -> jax.Array:
    """[..., K, P, width] in `dtype`: the plain weight. Products are made in float32 and rounded once.

    factors: False leaves the global scales out (`part_factors`); codes times scales are exact in bfloat16.
    """
    scales = scale_values(tile_scales(weight.scales, weight.arrangement))
    # [..., NB, KB, ROWS, G, 16]
    values = code_values(tile_codes(weight.words, weight.arrangement)) * scales[..., None]
    if factors:
        values = values * weight.factors[..., None, None, None, None]
    lead, blocks, steps = weight.lead, weight.num_blocks, weight.num_steps
    values = values.astype(dtype).reshape(*lead, weight.parts, -1, steps, ROWS, STEP)
    axes = len(lead)
    order = (*range(axes), axes + 2, axes + 4, axes, axes + 1, axes + 3)  # KB, STEP, P, blocks, ROWS
    plain = values.transpose(order).reshape(*lead, steps * STEP, weight.parts, blocks // weight.parts * ROWS)
    return plain[..., : weight.k, :, : weight.width]


def part_factors(weight: GridWeight) -> jax.Array:
    """float32[..., P]: the global scale of each part."""
    return weight.factors.reshape(*weight.lead, weight.parts, -1)[..., 0]


def prepare_rows(x: jax.Array, steps: int, join: int = 1) -> jax.Array:
    """Activations [M, K] as kernels read them: bfloat16[parts, KB, 16 / join, M, join GROUPS].

    [p, s, n, m, join g + j] is part p of x[m, 256 s + 16 g + join n + j], zero beyond K. bfloat16 has one part. A
    float32 value is the exact sum of three, the largest first, and an unpacked weight is exact in bfloat16: so float32
    rows lose nothing but the order of a float32 sum.
    """
    rows, k = x.shape
    x = jnp.pad(x, ((0, 0), (0, steps * STEP - k)))
    parts = jnp.stack(split_float32(x)) if x.dtype == jnp.float32 else x[None]
    parts = parts.reshape(-1, rows, steps, GROUPS, GROUP // join, join).transpose(0, 2, 4, 1, 3, 5)
    return parts.reshape(-1, steps, GROUP // join, rows, GROUPS * join)


def num_parts(dtype: jnp.dtype) -> int:
    return 3 if dtype == jnp.float32 else 1


def split_float32(x: jax.Array) -> list[jax.Array]:
    """Three bfloat16 arrays whose sum is x: exactly, but for what is below the subnormals of bfloat16.

    Above 3.38e38 the first one overflows.
    """
    parts = []
    for _ in range(3):
        # reduce_precision: XLA may drop a conversion to bfloat16 and back as excess precision.
        part = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts
