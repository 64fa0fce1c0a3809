"""`nvfp4_w4a4_matmul` by Triton's `tl.dot_scaled`, bound with jax-triton. Compiles, never run.

Pallas' Triton backend has no block-scaled product; Triton has. What triton 3.9 makes of it (read in the PTX):
`mma.sync.m16n8k64 ... kind::mxf4nvf4.block_scale.scale_vec::4X` on sm_120a, for 16 rows and more on either side, and
`tcgen05.mma ... kind::mxf4nvf4.block_scale.block16` on sm_100a, but only where the left operand has 128 rows; below,
it decodes to bfloat16. So there the weights are the left operand and the tokens the right one.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ddtree_jax.models.quant import GROUP
from ddtree_jax.pallas.backend import BLACKWELL, BLACKWELL_RTX, Platform
from ddtree_jax.pallas.fp4_activations import quantise_activations
from ddtree_jax.pallas.nvfp4_w4a4_matmul import (
    Sizes,
    check_arguments,
    split_steps,
    unswizzle_scales,
    whole_scale,
)

MAX_ROWS = 256
_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes in rows of x, rows of w and columns of both; parts of K; Triton's warps and stages."""

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int

    @property
    def shared_memory(self) -> int:
        """Bytes of the operands' stages: what Triton needs is near it, a little more on tcgen05."""
        return self.num_stages * (self.block_m + self.block_n) * (self.block_k // 2 + self.block_k // GROUP)


def choose_tiles(sizes: Sizes, platform: Platform) -> Tiles:
    """Tiles of a call. By reasoning, not by measurement: no GPU has run them.

    Raises NotImplementedError for a platform or sizes that have none.
    """
    if platform.generation not in (BLACKWELL, BLACKWELL_RTX):
        raise NotImplementedError(f"needs Blackwell (compute capability 10.0 or 12.0), got {platform.generation}")
    if platform.interpret:
        raise NotImplementedError("a Triton kernel cannot be interpreted")
    if not 1 <= sizes.m <= MAX_ROWS:
        raise NotImplementedError(f"serves 1..{MAX_ROWS} rows, got {sizes.m}")
    block_k = next((size for size in (256, 128, 64) if sizes.k and sizes.k % size == 0), None)
    if block_k is None:
        raise NotImplementedError(f"K must be a multiple of 64, got {sizes.k}")
    block_n = 128 if platform.generation == BLACKWELL else 64
    if not sizes.n or sizes.n % block_n:
        raise NotImplementedError(f"N must be a multiple of {block_n} on {platform.generation}, got {sizes.n}")
    block_m = min(128, max(16, 1 << (sizes.m - 1).bit_length()))
    warps = 8 if block_m == 128 else 4
    programs = sizes.n // block_n * -(-sizes.m // block_m)
    split = split_steps(sizes.k // block_k, programs, 2 * platform.cores)
    stages = 4
    tiles = Tiles(block_m, block_n, block_k, split, warps, stages)
    while tiles.shared_memory > platform.shared_memory // 2 and tiles.num_stages > 2:  # two programs on each
        tiles = dataclasses.replace(tiles, num_stages=tiles.num_stages - 1)
    return tiles


def nvfp4_w4a4_matmul_triton(
    x: Any,
    codes: Any,
    scales: Any,
    global_scale: Any,
    input_scale: Any,
    *,
    out_dtype: Any = jnp.bfloat16,
    platform: Platform,
    tiles: Tiles | None = None,
) -> jax.Array:
    """As `nvfp4_w4a4_matmul_reference`, for 1..256 rows on sm_100a (N a multiple of 128) and sm_120a (of 64).

    The sums are float32 in the order of the tensor cores. Scales are read in the checkpoint's layout; prepared ones
    are put back to it in each call. `tiles` is for measurements. Raises NotImplementedError for other platforms,
    shapes and dtypes, and where triton or jax-triton is not installed.
    """
    sizes = check_arguments(x, codes, scales, global_scale, input_scale)
    chosen = choose_tiles(sizes, platform)
    tiles = chosen if tiles is None else tiles
    if jnp.dtype(out_dtype) not in _DTYPES:
        raise NotImplementedError(f"out_dtype: got {out_dtype}, serves bfloat16, float16 and float32")
    call, kernel = _load()
    if sizes.swizzled:
        scales = unswizzle_scales(scales, sizes.n, sizes.k // GROUP)
    rows = -(-sizes.m // tiles.block_m) * tiles.block_m
    x_codes, x_scales = quantise_activations(jnp.pad(x, ((0, rows - sizes.m), (0, 0))), input_scale)
    factor = whole_scale(global_scale, input_scale)
    whole = tiles.split_k == 1
    out = call(
        x_codes,
        x_scales,
        codes,
        scales,
        factor.reshape(1),
        kernel=kernel,
        out=jax.ShapeDtypeStruct(
            (rows, sizes.n) if whole else (tiles.split_k, rows, sizes.n), out_dtype if whole else jnp.float32
        ),
        grid=(sizes.n // tiles.block_n, rows // tiles.block_m, tiles.split_k),
        name="nvfp4_w4a4_matmul_triton",
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        rows=rows,
        N=sizes.n,
        K=sizes.k,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        SPLIT_K=tiles.split_k,
        WEIGHTS_FIRST=platform.generation == BLACKWELL,
    )
    if not whole:
        out = (out.sum(axis=0) * factor).astype(out_dtype)
    return out[: sizes.m]


def _load() -> tuple[Callable[..., Any], Any]:
    """(jax-triton's call with the output's type as `out`, the kernel). NotImplementedError where they are missing."""
    try:
        jax_triton = importlib.import_module("jax_triton")
        triton = importlib.import_module("triton")
    except ImportError as error:
        raise NotImplementedError(
            f"needs jax-triton and triton: pip install 'jax-triton>=0.4.1' 'triton>=3.9' ({error})"
        ) from error
    required = (3, 7) if _version(jax_triton) >= (0, 4) else (3, 6)
    if _version(triton) < required:
        raise NotImplementedError(
            f"jax-triton {jax_triton.__version__} needs triton >= {required[0]}.{required[1]} here, "
            f"found {triton.__version__}: pip install 'triton>=3.9'"
        )
    if jax.__version_info__[:2] >= (0, 12) and (0, 4) <= _version(jax_triton) <= (0, 4, 1):
        # Its rule for dead code takes two arguments and is given three: a TypeError in the middle of a jit.
        raise NotImplementedError(f"jax-triton {jax_triton.__version__} fails with jax {jax.__version__}; use jax 0.11")
    # The name of the argument changed between jax-triton 0.3 and 0.4.
    names = inspect.signature(jax_triton.triton_call).parameters
    out_name = "out_type" if "out_type" in names else "out_shape"

    def call(*args: Any, out: Any, name: str, **kwargs: Any) -> Any:
        with jax.named_scope(name):  # its own `name` does not reach the compiled program
            return jax_triton.triton_call(*args, name=name, **{out_name: out}, **kwargs)

    return call, importlib.import_module("ddtree_jax.pallas.triton_fp4_kernel").w4a4_kernel


def _version(module: Any) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 4, 1) of "0.4.1", (3, 9, 0) of "3.9.0+git"."""
    return tuple(int(part) for part in re.match(r"[\d.]*\d", str(module.__version__))[0].split("."))
