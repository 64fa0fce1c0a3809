"""Small operations that show what the compile check sees: a good kernel, and each thing that must not pass.

Given to it by `--ops`. Each operation has the one implementation `kernel`.
"""

import os

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import dot, inline_asm, triton_call
from ddtree_jax.pallas.cases.base import Case
from ddtree_jax.pallas.cases.registry import Expected
from ddtree_jax.pallas.dispatch import Op

BF16, F32 = jnp.bfloat16, jnp.float32


def product(x, w, *, platform, block=64, stages=2):
    """x [M, K] @ w [K, N], blocks of `block` of M and N, all of K at once in steps of `block`."""
    (m, k), n = x.shape, w.shape[1]
    if n % block:
        raise NotImplementedError(f"N = {n} is no multiple of {block}")

    def body(x_ref, w_ref, out_ref):
        row, column = pl.program_id(0), pl.program_id(1)

        def step(i, total):
            left = x_ref[pl.ds(row * block, block), pl.ds(i * block, block)]
            return total + dot(left, w_ref[pl.ds(i * block, block), pl.ds(column * block, block)])

        zero = jnp.zeros((block, block), F32)
        out = jax.lax.fori_loop(0, k // block, step, zero)
        out_ref[pl.ds(row * block, block), pl.ds(column * block, block)] = out

    shape = jax.ShapeDtypeStruct((m, n), F32)
    call = triton_call(
        body,
        name=f"control_product_{m}_{n}",
        platform=platform,
        grid=(m // block, n // block),
        out_shape=shape,
        num_stages=stages,
    )
    return call(x, w)


def large_tiles(x, w, *, platform):
    """The same with 3 stages of 128 x 128: 196 KB of shared memory, twice what an RTX PRO 6000 has."""
    return product(x, w, platform=platform, block=128, stages=3)


def converter(codes, *, platform):
    """Two E2M1 codes to two float16 by the instruction that only Blackwell has."""
    asm = "{ .reg .b8 byte; cvt.u8.u32 byte, $1; cvt.rn.f16x2.e2m1x2 $0, byte; }"

    def body(codes_ref, out_ref):
        out_ref[...] = inline_asm(asm, codes_ref[...], constraints="=r,r", pack=1, dtype=jnp.int32)

    shape = jax.ShapeDtypeStruct(codes.shape, jnp.int32)
    return triton_call(body, name="control_converter", platform=platform, grid=(1,), out_shape=shape)(codes)


def plain(x, *, platform):
    del platform
    return jnp.tanh(x)


def hostile(x, *, platform):
    """Dies where it stands, as a compiler that crashes does."""
    del x, platform
    os._exit(134)


def op(name, run):
    return Op(name, {"kernel": run, "reference": lambda *a, platform: a[0]}, {})


def arrays(*specs):
    return lambda key: tuple(jax.random.bits(key, shape, jnp.uint8).astype(dtype) for shape, dtype in specs)


def products(m, k, n):
    return arrays(((m, k), BF16), ((k, n), BF16))


OPS = {
    name: op(name, run)
    for name, run in {
        "product": product,
        "wide_product": product,
        "large_tiles": large_tiles,
        "converter": converter,
        "plain": plain,
        "plain_on_purpose": plain,
        "missing_instruction": product,
        "crash": hostile,
    }.items()
}
CASES = (
    Case("product", "64 rows", products(64, 256, 128), {}, 0, 0),
    Case("product", "128 rows: other arrays, the same tiles", products(128, 512, 256), {}, 0, 0),
    Case("product", "tiles of 32", products(64, 256, 128), {"block": 32}, 0, 0),
    Case("product", "not served", products(64, 256, 96), {}, 0, 0),
    Case("wide_product", "64 rows", products(64, 256, 128), {}, 0, 0),
    Case("large_tiles", "128 rows", products(128, 1024, 256), {}, 0, 0),
    Case("converter", "1024 codes", arrays(((1024,), jnp.int32)), {}, 0, 0),
    Case("plain", "64 rows", arrays(((64, 64), F32)), {}, 0, 0),
    Case("plain_on_purpose", "64 rows", arrays(((64, 64), F32)), {}, 0, 0),
    Case("missing_instruction", "64 rows", products(64, 256, 128), {}, 0, 0),
    Case("crash", "always", arrays(((64, 64), F32)), {}, 0, 0),
)
EXPECTED = {
    ("wide_product", "kernel"): Expected(
        code={"h200": ("wgmma.mma_async",), "b200": ("tcgen05.mma",), "rtx_pro_6000": ("mma.sync",)}
    ),
    ("converter", "kernel"): Expected(code={"b200": ("cvt.rn.f16x2.e2m1x2",)}),
    ("plain_on_purpose", "kernel"): Expected(kernel=False),
    ("missing_instruction", "kernel"): Expected(code={"h200": ("no.such.instruction",)}),
}
