"""E2M1 codes to 16-bit floats with Blackwell's own converter, for the inside of a Pallas-Triton kernel.

`cvt.rn.f16x2.e2m1x2 d, b` turns the byte `b` (two codes) into a 32-bit register of two float16: the low nibble in the
low half. Its source is a `.b8` register, and Triton hands over nothing narrower than 16 bits, so the sequence splits
the 32-bit argument into four `.b8` registers and converts one of them; ptxas makes that one instruction
(`F2FP.F16.E2M1.UNPACK_B`). What was found by compiling, without a GPU that could run it:

- It needs PTX ISA 8.6 and a target sm_100a, sm_100f, sm_120a or sm_120f; plain sm_100, plain sm_120 and sm_90a reject
  it ("Feature 'cvt.f16x2.e2m1x2' not supported on .target ..."), which makes sm_90a a negative control.
- Argument and result must be signless 32-bit integers (int32); uint32 does not parse. `pack` is 1.
- `cvt.rn.bf16x2.e2m1x2` exists but needs PTX ISA 9.2: jax 0.11.2 writes an older one whatever the compilers, jax
  0.12.0.1 a new enough one with CUDA 13.5's. bfloat16 therefore goes by float16: the exponent of all nonzero codes is
  normal in both, so a shift by 3 and a multiply by 2**112, both exact, take one to the other.

Compiles, never run.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ddtree_jax.pallas.backend import inline_asm

_SPLIT = ".reg .b8 b0, b1, b2, b3; mov.b32 {b0, b1, b2, b3}, $1; "
# bfloat16: the last multiply is by 2**112, the difference of the two exponent biases.
_SEQUENCES = {
    jnp.dtype(jnp.float16): "{ " + _SPLIT + "cvt.rn.f16x2.e2m1x2 $0, b%d; }",
    jnp.dtype(jnp.bfloat16): "{ .reg .b32 h, m, k; "
    + _SPLIT
    + "cvt.rn.f16x2.e2m1x2 h, b%d; shr.u32 m, h, 3; and.b32 m, m, 0x0fff0fff; and.b32 h, h, 0x80008000; "
    + "or.b32 m, m, h; mov.b32 k, 0x77807780; mul.rn.bf16x2 $0, m, k; }",
}
_ONE_HALF = {jnp.dtype(jnp.float16): 0x3800, jnp.dtype(jnp.bfloat16): 0x3F00}  # bits of 0.5
_MANTISSA_SHIFT = {jnp.dtype(jnp.float16): 9, jnp.dtype(jnp.bfloat16): 6}  # of the one mantissa bit


def convert_pair(words: jax.Array, byte: int, *, dtype: Any = jnp.float16) -> jax.Array:
    """Two codes of each word as two 16-bit floats, by the hardware; in a kernel for sm_100a or sm_120a only.

    Args:
      words: int32 [...], four bytes of two codes each; byte 0 is the least significant.
      byte: static, 0..3, which of them.
      dtype: float16 (one instruction) or bfloat16 (six).

    Returns:
      int32 [...]: bits of the value of the low nibble in the low half, of the high nibble in the high half. Exact.
      Raises `ValueError`. Neither interpret mode nor other GPUs can run it: `convert_pair_bits` is the same function.
    """
    kind = _checked(words, byte, dtype)
    return inline_asm(_SEQUENCES[kind] % byte, words, constraints="=r,r", pack=1, dtype=jnp.int32)


def convert_pair_bits(words: jax.Array, byte: int, *, dtype: Any = jnp.float16) -> jax.Array:
    """`convert_pair` by integer arithmetic, bit for bit: for every platform, and what the hardware is held to."""
    kind = _checked(words, byte, dtype)
    codes = (words >> (8 * byte)) & 0xFF
    return _bits(codes & 15, kind) | (_bits(codes >> 4, kind) << 16)


def _bits(codes: jax.Array, kind: Any) -> jax.Array:
    magnitude = codes & 7
    # Code 1 is E2M1's subnormal: its mantissa bit belongs to 0.75 in a wider float, so it is set apart.
    normal = (magnitude << _MANTISSA_SHIFT[kind]) + _ONE_HALF[kind]
    small = magnitude * _ONE_HALF[kind]
    return jnp.where(magnitude < 2, small, normal) | ((codes & 8) << 12)


def _checked(words: jax.Array, byte: int, dtype: Any) -> Any:
    kind = jnp.dtype(dtype)
    if words.dtype != jnp.int32:
        raise ValueError(f"words: got {words.dtype}, expected int32")
    if byte not in (0, 1, 2, 3):
        raise ValueError(f"byte: got {byte}, expected 0, 1, 2 or 3")
    if kind not in _SEQUENCES:
        raise ValueError(f"dtype: got {kind}, expected float16 or bfloat16")
    return kind
