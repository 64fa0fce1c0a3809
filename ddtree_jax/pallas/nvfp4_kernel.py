"""The inner body of every W4A16 kernel: one tile of the word grid times a few rows of activations."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ddtree_jax.models.quant import GROUP
from ddtree_jax.pallas.backend import Platform, dot, inline_asm
from ddtree_jax.pallas.nvfp4_grid import BYTES, CODE_BITS, FRAGMENTS, SHIFTED, code_values, group_codes, scale_values

# Scales decode to value * 2^119, codes to value * 2^-126 (SHIFTED, FRAGMENTS: their bits, in place, as bfloat16) or
# value * 2^-112 (BYTES: the bits of a float16, moved to where bfloat16 has them). The product is exact in bfloat16 (6
# significant bits) and neither overflows nor is subnormal.
_RESTORE = {SHIFTED: 2.0**7, FRAGMENTS: 2.0**7, BYTES: 2.0**-7}


def require_arrangement(platform: Platform, arrangement: str) -> None:
    """NotImplementedError for codes laid out for wgmma, or for hardware that converts them where it cannot."""
    if arrangement == FRAGMENTS:
        raise NotImplementedError("weights laid out as fragments of wgmma")
    if arrangement == BYTES and not (platform.converts_fp4 or platform.interpret):
        raise NotImplementedError(f"weights laid out for hardware conversion of FP4; {platform.generation} has none")


def restore(platform: Platform, arrangement: str) -> float:
    """What an accumulated product must be multiplied with, besides the weight's own factor."""
    return 1.0 if platform.interpret else _RESTORE[arrangement]


def scale_pairs(scales: jax.Array, platform: Platform) -> jax.Array:
    """Scale bytes uint8[ROWS, G] as the bfloat16 factors that `weights` takes."""
    if platform.interpret:
        return scale_values(scales).astype(jnp.bfloat16)
    # Bytes to bits 4..11 of the halves, then the exponent offset.
    asm = """
    {
        .reg .b32 t;
        prmt.b32 t, $1, 0, 0x4140;
        shl.b32 t, t, 4;
        add.u32 $0, t, 0x76007600;
    }
    """
    return inline_asm(asm, scales, constraints="=r,r", pack=2, dtype=jnp.bfloat16)


def weights(words: jax.Array, scales: jax.Array, i: int, platform: Platform, arrangement: str) -> jax.Array:
    """bfloat16[ROWS, G]: place `i` of every group, times its scale, both exact.

    words: int32[ROWS, G], word i // 8 of the groups; scales: from `scale_pairs`.
    """
    if platform.interpret:
        return (code_values(group_codes(words, i, arrangement)) * scales.astype(jnp.float32)).astype(jnp.bfloat16)
    register = f"${1 + i // 4 % 2}"
    body = _converted(register, i % 4) if arrangement == BYTES else shifted(register, i % 4)
    asm = f"""
    {{
        .reg .b32 a, b;
        {body}
        mul.rn.bf16x2 $0, a, $3;
    }}
    """
    # A register of the words holds codes of both groups of the pair, so each result needs but one of the two.
    return inline_asm(asm, words, scales, constraints="=r,r,r,r", pack=2, dtype=jnp.bfloat16)


def shifted(register: str, position: int) -> str:
    """PTX that leaves the codes of both groups in `a`, in the place of bfloat16's sign and top magnitude bits."""
    assert CODE_BITS == ((15, 8, 7, 6), (9, 2, 1, 0), (3, -4, -5, -6), (13, 14, 5, 4))
    move = ("mov.b32 a, {0};", "shl.b32 a, {0}, 6;", "shf.l.wrap.b32 a, {0}, {0}, 12;", "shl.b32 a, {0}, 2;")[position]
    move = move.format(register)
    if position < 3:
        return f"{move}\nand.b32 a, a, 0x81C081C0;"
    return f"""
        {move}
        and.b32 a, a, 0x80C080C0;
        shr.u32 b, {register}, 6;
        lop3.b32 a, b, 0x01000100, a, 0xEA;
    """


def _converted(register: str, position: int) -> str:
    """PTX that converts the codes of both groups, byte `position`, by hardware to float16, and moves their bits."""
    return f"""
        .reg .b8 y0, y1, y2, y3;
        mov.b32 {{y0, y1, y2, y3}}, {register};
        cvt.rn.f16x2.e2m1x2 a, y{position};
        shr.u32 b, a, 3;
        and.b32 b, b, 0x0FFF0FFF;
        lop3.b32 a, a, 0x80008000, b, 0xEA;
    """


def accumulate(
    total: jax.Array,
    words: tuple[jax.Array, jax.Array],
    scales: jax.Array,
    x_tile: Callable[[int, int], jax.Array],
    *,
    parts: int,
    weights_first: bool,
    platform: Platform,
    arrangement: str,
    join: int = 1,
) -> jax.Array:
    """Adds one tile's product to `total`.

    Args:
      total: float32[M, ROWS], or [ROWS, M] with `weights_first`.
      words: the two int32[ROWS, G] of the tile.
      scales: uint8[ROWS, G].
      x_tile: (part, n) -> bfloat16[M, join G], the activations of the places join n.. of every group (`prepare_rows`).
      parts: of the activations, whose products are added.
      weights_first: the weights are the left operand of the product.
      join: places that go into one product, 1, 2 or 4.
    """
    factors = scale_pairs(scales, platform)
    # Tensor cores cut off the low bits of a running sum: for float32 rows a tile has a sum of its own.
    own_sum = jnp.zeros_like(total) if parts > 1 else total
    for n in range(GROUP // join):
        own = [weights(words[i // 8], factors, i, platform, arrangement) for i in range(n * join, (n + 1) * join)]
        w = _interleave(own).reshape(own[0].shape[0], -1)
        for part in range(parts):
            x = x_tile(part, n)
            own_sum += dot(w, x, trans_b=True) if weights_first else dot(x, w, trans_b=True)
    return total + own_sum if parts > 1 else own_sum


def _interleave(tiles: list[jax.Array]) -> jax.Array:
    """[ROWS, G] tiles -> [ROWS, G, 2, ...] whose last axes, taken as one, count the tiles in order."""
    if len(tiles) == 1:
        return tiles[0]
    halves = [_interleave(tiles[start::2]) for start in range(2)]
    return jnp.concatenate([half[..., None] for half in halves], axis=-1)
