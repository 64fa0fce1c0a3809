"""Linear layers whose kernels may stay packed as NVFP4, as a checkpoint holds them or laid out for GPU kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ddtree_jax.models.kernel_specs import heads_specs, product_specs
from ddtree_jax.models.layers import einsum, truncated_init
from ddtree_jax.models.quant import E2M1_VALUES, GROUP, dequantise
from ddtree_jax.pallas.choice import KernelChoice, Specs
from ddtree_jax.pallas.nvfp4_grid import GridWeight


class PackedKernel(nnx.Module):
    """An NVFP4 kernel at 4.5 bits a weight; `codes`, `scales` and `global_scale` are its three parameters.

    For a kernel of shape [..., in, ...]: codes uint8[..., in / 2, ...], two E2M1 codes a byte along the contracted
    axis, the even index in the low nibble; scales float8_e4m3fn[..., in / 16, ...]; global_scale float32 with the rank
    of the kernel, size 1 along every axis but those in which tensors of the checkpoint lie side by side (gate and up,
    experts), because each of those has its own.
    """

    def __init__(self, shape: Sequence[int], *, axis: int, separate: Sequence[int], rngs: nnx.Rngs, std: float):
        if shape[axis] % GROUP:
            raise ValueError(f"shape: got {tuple(shape)}; axis {axis} must be a multiple of {GROUP} to be packed")

        def divided(by: int) -> tuple[int, ...]:
            return tuple(size // by if i == axis else size for i, size in enumerate(shape))

        random = jax.random.randint(rngs.params(), divided(2), 0, 256, jnp.int32)
        self.codes = nnx.Param(random.astype(jnp.uint8))
        self.scales = nnx.Param(jnp.ones(divided(GROUP), jnp.float8_e4m3fn))
        spread = math.sqrt(sum(value * value for value in E2M1_VALUES) / len(E2M1_VALUES))
        ones = tuple(size if i in separate else 1 for i, size in enumerate(shape))
        self.global_scale = nnx.Param(jnp.full(ones, std / spread, jnp.float32))
        self.axis = axis


class WholeParam(nnx.Param):
    """A parameter of stacked layers that a loop over them must not slice: what reads it takes the layer's index."""


class LayerIndex(nnx.Variable):
    """int32[R], the index of each stacked layer. `split_stack` takes it out, for `merge_layer` to put the loop's in."""


def split_stack(stack: Any, whole: Any = WholeParam) -> tuple[Any, Any, Any, Any]:
    """(graphdef, what stays whole, layer indices, what a loop over layers slices) of stacked layers.

    whole: an nnx filter, of what must not be sliced.
    """
    return nnx.split(stack, whole, LayerIndex, ...)


def merge_layer(graphdef: Any, whole: Any, indices: Any, params: Any, layer: jax.Array) -> Any:
    """One layer of `split_stack`. params: those of the layer; layer: int32 scalar, its index."""
    return nnx.merge(graphdef, whole, jax.tree.map(lambda _: layer, indices), params)


class GridKernel(nnx.Module):
    """An NVFP4 kernel laid out for GPU kernels (`pallas.nvfp4_grid`); `kernels.with_kernels` makes it of a packed one.

    weight: leading axes as in `GridWeight`: [R], if of stacked layers, then [E], if of experts.
    layer: int32[R], each layer's own index, in a loop over layers a scalar; None: not of stacked layers.
    axes: the mesh axes over which experts, inputs and outputs are split. Each device's part is a grid of its own: `k`
      and `width` of `weight` are those of a part, its arrays hold the parts side by side, and only `specs` and the
      operations read them.
    """

    def __init__(
        self,
        weight: GridWeight,
        layer: jax.Array | None,
        choice: KernelChoice,
        axes: tuple[str | None, str | None, str | None] = (None, None, None),
    ):
        self.words, self.scales = WholeParam(weight.words), WholeParam(weight.scales)
        self.factors = WholeParam(weight.factors)
        self.layer = None if layer is None else LayerIndex(layer)
        self.sizes = (weight.k, weight.parts, weight.width, weight.arrangement)
        self.choice, self.axes = choice, axes

    @property
    def specs(self) -> GridWeight:
        """The weight's place on the mesh: its arrays as `PartitionSpec`s."""
        return grid_specs(self.weight, self.axes)

    @property
    def weight(self) -> GridWeight:
        return GridWeight(self.words[...], self.scales[...], self.factors[...], *self.sizes)

    def index(self) -> jax.Array | None:
        return None if self.layer is None else self.layer[...]

    def multiply(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        """[..., K] -> [..., parts, width], without the parts' axis where there is one."""
        rows = x.reshape(-1, x.shape[-1])
        _, contracted, width = self.axes
        specs = product_specs(self.specs, contracted, (None, width))
        args = ("nvfp4_matmul", rows, self.weight, self.index())
        y = _run_product(self.choice, specs, args, out_dtype or x.dtype)
        tail = y.shape[2:] if self.sizes[1] == 1 else y.shape[1:]
        return y.reshape(*x.shape[:-1], *tail)


def grid_specs(weight: GridWeight, axes: tuple[str | None, str | None, str | None]) -> GridWeight:
    """The arrays of a weight as `PartitionSpec`s. axes: as in `GridKernel`."""
    expert, contracted, width = axes
    lead = (None,) * (len(weight.lead) - 1) + (expert,) if weight.lead else ()
    blocks = PartitionSpec(*lead, width, contracted)
    return dataclasses.replace(weight, words=blocks, scales=blocks, factors=PartitionSpec(*lead, width))


def _run_product(choice: KernelChoice, specs: Specs, args: tuple, out_dtype: jnp.dtype) -> jax.Array:
    """Sums over the mesh are float32, as those of one device are."""
    return choice.run(*args, specs=specs, out_dtype=jnp.float32 if specs.sums else out_dtype).astype(out_dtype)


class LayerKernel(nnx.Module):
    """A plain kernel of stacked layers [R, in, *out], read in place; `kernels.with_kernels` makes it of a parameter.

    layer: int32[R], each layer's own index, in a loop over layers a scalar.
    axes: the mesh axes of [in, *out]; empty: not split.
    """

    def __init__(self, values: jax.Array, layer: jax.Array, choice: KernelChoice, axes: tuple[str | None, ...] = ()):
        self.values, self.layer = WholeParam(values), LayerIndex(layer)
        self.choice, self.axes = choice, axes or (None,) * (values.ndim - 1)

    @property
    def dtype(self) -> jnp.dtype:
        return self.values[...].dtype

    def multiply(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        """[..., in] -> [..., *out]."""
        rows = x.reshape(-1, x.shape[-1])
        values, layer = self.values[...], self.layer[...]
        specs = product_specs(PartitionSpec(None, *self.axes), self.axes[0], self.axes[1:])
        y = _run_product(self.choice, specs, ("layer_matmul", rows, values, layer), out_dtype or x.dtype)
        return y.reshape(*x.shape[:-1], *y.shape[1:])


class LayerHeads(nnx.Module):
    """A matrix a head of stacked layers [R, rank, H, width], read in place; made by `kernels.with_kernels`.

    layer: int32[R], each layer's own index, in a loop over layers a scalar.
    axis: the mesh axis of the heads; None: not split.
    """

    def __init__(self, values: jax.Array, layer: jax.Array, choice: KernelChoice, axis: str | None = None):
        self.values, self.layer = WholeParam(values), LayerIndex(layer)
        self.choice, self.axis = choice, axis

    def __getitem__(self, whole: EllipsisType) -> jax.Array:
        """[rank, H, width], as of the parameter of a layer: a copy."""
        return jax.lax.dynamic_index_in_dim(self.values[...], self.layer[...], keepdims=False)[whole]

    def multiply(self, x: jax.Array, *, transposed: bool) -> jax.Array:
        """[B, T, H, rank] -> [B, T, H, width], or back where transposed."""
        specs = heads_specs(x.shape[0], self.axis, self.choice.mesh)
        args = (x, self.values[...], self.layer[...])
        return self.choice.run("layer_heads_matmul", *args, specs=specs, transposed=transposed)


Kernel = nnx.Param | PackedKernel | GridKernel | LayerKernel


def make_kernel(
    shape: Sequence[int],
    *,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
    std: float,
    packed: bool = False,
    axis: int = 0,
    separate: Sequence[int] = (),
) -> Kernel:
    """A random kernel of `shape`, plain in `dtype` or packed along `axis`, the axis that `multiply` contracts."""
    if packed:
        return PackedKernel(shape, axis=axis, separate=separate, rngs=rngs, std=std)
    return truncated_init(rngs, tuple(shape), dtype, std)


def kernel_arrays(kernel: Kernel) -> tuple[jax.Array, ...]:
    """The arrays of a kernel: one if plain, (codes, scales, global_scale) if packed."""
    if isinstance(kernel, PackedKernel):
        return kernel.codes[...], kernel.scales[...], kernel.global_scale[...]
    return (kernel[...],)


def array_values(arrays: tuple[jax.Array, ...], axis: int, dtype: jnp.dtype) -> jax.Array:
    """Kernel arrays, or slices of them, as one plain array; packed ones are dequantised to `dtype` along `axis`."""
    if len(arrays) == 1:
        return arrays[0]
    codes, scales, global_scale = arrays
    return dequantise(codes, scales, global_scale, axis=axis, dtype=dtype)


def below(names: Sequence[str], prefix: str) -> tuple[str, ...]:
    """The names that lie under `prefix`, without it: "mla.o" and "mla" give "o"."""
    return tuple(name.removeprefix(f"{prefix}.") for name in names if name.startswith(f"{prefix}."))


def multiply(spec: str, x: jax.Array, kernel: Kernel, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """`layers.einsum` of activations with a kernel, packed or not."""
    axis = kernel.axis if isinstance(kernel, PackedKernel) else 0
    return multiply_arrays(spec, x, kernel_arrays(kernel), axis, out_dtype)


def multiply_arrays(
    spec: str, x: jax.Array, arrays: tuple[jax.Array, ...], axis: int, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """The same with `kernel_arrays`, or slices of them, that are packed along `axis` if they are: the one place that
    multiplies with packed weights.
    """
    return einsum(spec, x, array_values(arrays, axis, x.dtype), out_dtype)


class Linear(nnx.Module):
    """y = x kernel, no bias. kernel: [in, *out]; several output axes keep merged projections apart."""

    def __init__(
        self,
        d_in: int,
        d_out: int | tuple[int, ...],
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        std: float | None = None,
        packed: bool = False,
    ):
        out = (d_out,) if isinstance(d_out, int) else d_out
        separate = tuple(range(1, len(out)))  # all but the last axis: tensors side by side
        std = d_in**-0.5 if std is None else std
        self.kernel = make_kernel(
            (d_in, *out), dtype=dtype, rngs=rngs, std=std, packed=packed, axis=0, separate=separate
        )
        self.letters = "opq"[: len(out)]

    def __call__(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        if isinstance(self.kernel, (GridKernel, LayerKernel)):
            return self.kernel.multiply(x, out_dtype)
        return multiply(f"...i,i{self.letters}->...{self.letters}", x, self.kernel, out_dtype=out_dtype)


class SwiGLU(nnx.Module):
    """down(silu(gate x) * up x). gate_up: [in, 2, width], the gate first."""

    def __init__(
        self,
        d_model: int,
        width: int,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        out_std: float | None = None,
        packed: Sequence[str] = (),
    ):
        self.gate_up = Linear(d_model, (2, width), dtype=dtype, rngs=rngs, packed="gate_up" in packed)
        self.down = Linear(width, d_model, dtype=dtype, rngs=rngs, std=out_std, packed="down" in packed)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate_up = self.gate_up(x)
        return self.down(jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :])
