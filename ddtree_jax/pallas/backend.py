"""The only module that touches Pallas' Triton backend: which GPU this is, and how a kernel is launched on it.

Pallas' Triton backend is deprecated since jax 0.11.0 and is the one that runs on Hopper and both Blackwell kinds alike;
pyproject.toml caps jax below the version that may drop it, and jax-triton would replace it here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton

HOPPER, BLACKWELL, BLACKWELL_RTX, OTHER_GPU, CPU = "hopper", "blackwell", "blackwell_rtx", "other_gpu", "cpu"
GENERATIONS = (HOPPER, BLACKWELL, BLACKWELL_RTX, OTHER_GPU, CPU)


@dataclasses.dataclass(frozen=True)
class Platform:
    """What a kernel is compiled for. Static and hashable.

    Attributes:
      generation: one of GENERATIONS.
      cores: streaming multiprocessors.
      shared_memory: bytes a block may have.
      interpret: run kernels on the CPU, operation by operation; for tests. `generation` says which source they take.
    """

    generation: str
    cores: int = 0
    shared_memory: int = 0
    interpret: bool = False

    @property
    def has_kernels(self) -> bool:
        return self.generation in (HOPPER, BLACKWELL, BLACKWELL_RTX)

    @property
    def converts_fp4(self) -> bool:
        """Whether the hardware turns E2M1 codes into 16-bit floats (`cvt.rn.f16x2.e2m1x2`)."""
        return self.generation in (BLACKWELL, BLACKWELL_RTX) and not self.interpret


H200 = Platform(HOPPER, 132, 232448)
B200 = Platform(BLACKWELL, 148, 232448)
RTX_PRO_6000 = Platform(BLACKWELL_RTX, 188, 101376)
HOST = Platform(CPU)
INTERPRETED = dataclasses.replace(H200, interpret=True)


def current_platform() -> Platform:
    """The platform of the first device that JAX runs on."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return HOST
    capability = str(getattr(device, "compute_capability", "0.0"))
    generation = {"9": HOPPER, "10": BLACKWELL, "12": BLACKWELL_RTX}.get(capability.split(".")[0], OTHER_GPU)
    known = {HOPPER: H200, BLACKWELL: B200, BLACKWELL_RTX: RTX_PRO_6000}.get(generation, Platform(OTHER_GPU))
    return dataclasses.replace(known, cores=int(getattr(device, "core_count", known.cores)))


def require_kernels(platform: Platform) -> None:
    """NotImplementedError where the kernels of this package do not run."""
    if not platform.has_kernels:
        found = "a CPU" if platform.generation == CPU else "another GPU"
        raise NotImplementedError(f"needs a GPU of compute capability 9.0, 10.0 or 12.0; this is {found}")


def require_wgmma(platform: Platform) -> None:
    """NotImplementedError where a kernel of Mosaic GPU for Hopper cannot run."""
    if platform.generation != HOPPER:
        raise NotImplementedError(f"needs wgmma (compute capability 9.0), got {platform.generation}")
    try:
        import jax.experimental.pallas.mosaic_gpu  # noqa: F401
    except ImportError as error:
        raise NotImplementedError(f"Mosaic GPU cannot be imported: {error}") from None


def mosaic_interpreter(platform: Platform, given: Any = None) -> Any:
    """What `plgpu.kernel(interpret=)` takes: None on a GPU, else the parameters that are given, or the default ones."""
    if not platform.interpret or given is not None:
        return given if platform.interpret else None
    # Where kernels are built only: it costs an import of a second that other platforms need not pay.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()


def largest_divisor(n: int, most: int) -> int:
    """Of n, at most `most`: how many programs can share n steps evenly."""
    return max(d for d in range(1, most + 1) if n % d == 0)


def triton_call(
    kernel: Callable[..., None],
    *,
    name: str,
    platform: Platform,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int = 4,
    num_stages: int = 3,
    in_specs: Sequence[pl.BlockSpec] | None = None,
    out_specs: Any = None,
    aliases: dict[int, int] | None = None,
) -> Callable[..., Any]:
    """`pl.pallas_call` on the Triton backend; every kernel goes through here.

    Args:
      kernel: the body; refs of the operands, then of the results. Without specs a ref is the whole array.
      name: of the custom call in the compiled program.
      platform: what to compile for. Raises NotImplementedError where no kernel runs.
      grid, out_shape, num_warps, num_stages, in_specs, out_specs: as for `pl.pallas_call` and Triton.
      aliases: operand -> result that takes its place in memory.
    """
    require_kernels(platform)
    specs = {} if in_specs is None else {"in_specs": in_specs}
    specs |= {} if out_specs is None else {"out_specs": out_specs}
    params = pallas_triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)
    call = pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        interpret=platform.interpret,
        compiler_params=None if platform.interpret else params,
        **specs,
    )

    def checked(*operands: jax.Array) -> Any:
        for operand in operands:
            # The lowering counts elements in 32 bits up to 2^32 bytes, so arrays of bytes overflow between the two.
            if 2**31 <= operand.size <= 2**32 // operand.dtype.itemsize and operand.dtype.itemsize == 1:
                raise NotImplementedError(f"{operand.dtype}{list(operand.shape)}: offsets from 2^31 to 2^32 overflow")
        return call(*operands)

    return checked


def load(ref: Any, *, mask: jax.Array | None = None, other: Any = None) -> jax.Array:
    """Masked load of `ref` or of a view `ref.at[...]`; `other` fills what the mask leaves out."""
    return pallas_triton.load(ref, mask=mask, other=other)


def store(ref: Any, value: jax.Array, *, mask: jax.Array | None = None) -> None:
    pallas_triton.store(ref, value, mask=mask)


def barrier(platform: Platform) -> None:
    """What a program stored before, all of it may load behind; nothing is said of other programs."""
    if not platform.interpret:
        pallas_triton.debug_barrier()


def dot(a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
    """a @ b (or a @ b^T) in float32; float32 operands multiply at full precision, no TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (1 if trans_b else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def inline_asm(asm: str, *args: jax.Array, constraints: str, pack: int, dtype: Any) -> jax.Array:
    """One elementwise PTX instruction sequence with one result; several results are broken in jax 0.11.2."""
    shape = jax.ShapeDtypeStruct(args[0].shape, jnp.dtype(dtype))
    out = pallas_triton.elementwise_inline_asm(
        asm, args=list(args), constraints=constraints, pack=pack, result_shape_dtypes=[shape]
    )
    return out[0] if isinstance(out, (list, tuple)) else out
