"""What only Blackwell compiles: the converter inside a Pallas kernel. Given to the compile check by `--ops`.

The products of codes with codes are not here: they are in the package's own table, with `cases.nvfp4_w4a4_matmul.CODE`.
"""

import jax
import jax.numpy as jnp

from ddtree_jax.pallas.backend import triton_call
from ddtree_jax.pallas.cases import registry
from ddtree_jax.pallas.cases.base import Case
from ddtree_jax.pallas.dispatch import Op
from ddtree_jax.pallas.fp4_convert import convert_pair


def convert(words, *, platform, dtype):
    """All four bytes of int32 [L] -> int32 [4, L]."""

    def body(words_ref, out_ref):
        for byte in range(4):
            out_ref[byte] = convert_pair(words_ref[...], byte, dtype=dtype)

    shape = jax.ShapeDtypeStruct((4, *words.shape), jnp.int32)
    return triton_call(body, name="fp4_convert", platform=platform, grid=(1,), out_shape=shape)(words)


def words(key):
    return (jax.random.bits(key, (1024,), jnp.uint32).astype(jnp.int32),)


OPS = {"fp4_convert": Op("fp4_convert", {"kernel": convert, "reference": lambda w, *, platform, dtype: w}, {})}
CASES = (
    Case("fp4_convert", "float16", words, {"dtype": jnp.float16}, 0, 0),
    Case("fp4_convert", "bfloat16", words, {"dtype": jnp.bfloat16}, 0, 0),
)
_CODE = ("cvt.rn.f16x2.e2m1x2",)
EXPECTED = {("fp4_convert", "kernel"): registry.Expected(code={"b200": _CODE, "rtx_pro_6000": _CODE})}
