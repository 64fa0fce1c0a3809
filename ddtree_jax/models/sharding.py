"""How parameters and caches are split over a mesh: one table.

A mesh has the axes EXPERT (routed experts, and the batch of the caches where it divides) and TENSOR (attention heads,
widths of the MLPs, the vocabulary). What does not divide evenly is replicated along that axis, except the vocabulary,
whose tables are then split along the hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ddtree_jax.models.cache import Cache
from ddtree_jax.models.config import Glm5Config
from ddtree_jax.models.quant import GROUP

EXPERT, TENSOR = "expert", "tensor"
MAX_ABSTRACT_DEVICES = 2**20  # JAX counts devices in 32 bits, and fails without a message beyond
PACKED_LEAVES = ("codes", "scales", "global_scale")


@dataclasses.dataclass(frozen=True)
class Split:
    """One dimension of a kernel goes over mesh axis `axis`, in `units` pieces that must stay whole."""

    axis: str
    units: int


Dims = tuple[Split | None, ...]


def make_mesh(expert: int = 1, tensor: int = 1, devices: Sequence[Any] | str | None = None) -> Mesh | AbstractMesh:
    """A mesh of expert x tensor devices, for `load(..., mesh=)`.

    Args:
      expert: ways in which the routed experts are split.
      tensor: ways in which heads, MLP widths and the vocabulary are split.
      devices: which devices, expert-major; None takes the first of `jax.devices()`; "abstract" needs none, for
        estimates and for compiling without them.

    Raises:
      ValueError: a count below 1, too few devices, or more than 2^20 abstract ones.
    """
    for name, value in (("expert", expert), ("tensor", tensor)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: got {value!r}, allowed is an integer >= 1")
    if devices == "abstract":
        if expert * tensor > MAX_ABSTRACT_DEVICES:
            raise ValueError(
                f"mesh: got {expert} x {tensor} (expert x tensor); allowed are products up to {MAX_ABSTRACT_DEVICES}"
            )
        return AbstractMesh((expert, tensor), (EXPERT, TENSOR))
    found = list(jax.devices() if devices is None else devices)
    if len(found) < expert * tensor:
        raise ValueError(
            f"mesh: got {expert} x {tensor} (expert x tensor), which needs {expert * tensor} devices; here are "
            f"{len(found)}; allowed are products up to that"
        )
    return Mesh(np.array(found[: expert * tensor]).reshape(expert, tensor), (EXPERT, TENSOR))


def check_mesh(mesh: Any) -> Mesh | AbstractMesh | None:
    """The mesh with the axes that this package uses, all automatic; ValueError for anything else."""
    if mesh is None:
        return None
    if (
        not isinstance(mesh, (Mesh, AbstractMesh))
        or not mesh.axis_names
        or not set(mesh.axis_names) <= {EXPERT, TENSOR}
    ):
        raise ValueError(
            f"mesh: got {mesh!r}, allowed are None and a jax.sharding.Mesh with the axes {EXPERT!r} and {TENSOR!r} "
            "(ddtree_jax.models.make_mesh)"
        )
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names)  # jax.make_mesh may have made the axes explicit


def axis_size(mesh: Mesh | None, axis: str) -> int:
    """Devices along an axis, 1 if the mesh has no such axis."""
    return 1 if mesh is None else dict(mesh.shape).get(axis, 1)


def heads_split(num_heads: int) -> Split:
    """Attention heads go over TENSOR, whole heads to a device."""
    return Split(TENSOR, num_heads)


def _groups(width: int) -> int:
    """Pieces of a contracted width that packing allows: whole scale groups."""
    return width // GROUP if width % GROUP == 0 else 1


def target_dims(config: Glm5Config) -> dict[str, tuple[Dims, ...]]:
    """The table: kernel path inside a layer (or the model) -> ways to split it, best first.

    Kernels that are not listed are replicated: norms, the router, the low-rank inputs and the indexer, whose scores
    would otherwise be summed over the mesh for every cached token.
    """
    c = config
    heads = heads_split(c.num_attention_heads)
    head_rows = Split(TENSOR, c.num_attention_heads if c.v_head_dim % GROUP == 0 else 1)
    vocab, hidden = Split(TENSOR, c.vocab_size), Split(TENSOR, _groups(c.hidden_size))
    experts, expert_width = Split(EXPERT, c.n_routed_experts), Split(TENSOR, _groups(c.moe_intermediate_size))
    dense_width = Split(TENSOR, _groups(c.intermediate_size))
    shared_width = Split(TENSOR, _groups(c.moe_intermediate_size * c.n_shared_experts))
    return {
        "embed": ((vocab, None), (None, hidden)),
        "head.kernel": ((None, vocab), (hidden, None)),
        "attention.mla.q_b.kernel": ((None, heads),),
        "attention.mla.k_b": ((None, heads, None),),
        "attention.mla.v_b": ((None, heads, None),),
        "attention.mla.o.kernel": ((head_rows, None),),
        "mlp.gate_up.kernel": ((None, None, dense_width),),
        "mlp.down.kernel": ((dense_width, None),),
        "mlp.shared.gate_up.kernel": ((None, None, shared_width),),
        "mlp.shared.down.kernel": ((shared_width, None),),
        "mlp.dense_experts.gate_up": ((None, None, experts, expert_width),),
        "mlp.experts.gate_up": ((experts, None, None, expert_width),),
        "mlp.experts.down": ((experts, expert_width, None),),
    }


def drafter_dims(config: Any) -> dict[str, tuple[Dims, ...]]:
    """The same for a drafter: query heads and MLP widths; the rest is small and replicated."""
    c = config
    heads = heads_split(c.num_attention_heads)
    width = Split(TENSOR, _groups(c.intermediate_size))
    return {
        "attention.q.kernel": ((None, heads),),
        "attention.o.kernel": ((heads, None),),
        "mlp.gate_up.kernel": ((None, None, width),),
        "mlp.down.kernel": ((width, None),),
    }


def partition(ways: Sequence[Dims], shape: Sequence[int], mesh: Mesh | None) -> PartitionSpec:
    """The first of `ways` that divides evenly over the mesh; of the last one, whatever does."""
    if mesh is None:
        return PartitionSpec()

    def fits(split: Split | None, size: int) -> bool:
        ways = 1 if split is None else axis_size(mesh, split.axis)
        return ways > 1 and split.units % ways == 0 and size % ways == 0

    for dims in ways:
        wanted = [split is not None and axis_size(mesh, split.axis) > 1 for split in dims]
        if all(not want or fits(split, size) for want, split, size in zip(wanted, dims, shape, strict=True)):
            break
    return PartitionSpec(*(s.axis if fits(s, n) else None for s, n in zip(dims, shape, strict=True)))


def leaf_sharding(
    path: tuple, shape: Sequence[int], table: dict[str, tuple[Dims, ...]], mesh: Mesh, *, dense_experts: bool = False
) -> NamedSharding:
    """The sharding of one parameter leaf.

    Args:
      path: as in `params.py`, leading stack places included.
      shape: of the whole leaf; parameters of layers have the stack's repeats first.
      table: `target_dims` or `drafter_dims`.
      mesh: from `check_mesh`.
      dense_experts: the layout of `moe.MoE`.
    """
    names = [part for part in path if isinstance(part, str) and part not in ("stacks", "layers")]
    if names[-1] in PACKED_LEAVES:
        names.pop()
    name = ".".join(names)
    if name in ("mlp.gate_up", "mlp.down"):  # without `kernel`: expert kernels
        name = f"mlp.experts.{names[-1]}"
        if dense_experts and names[-1] == "gate_up":
            name = "mlp.dense_experts.gate_up"
    if name not in table:
        return NamedSharding(mesh, PartitionSpec())
    rank = len(table[name][0])
    spec = partition(table[name], shape[len(shape) - rank :], mesh)
    return NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - rank), *spec))


def cache_sharding(batch: int, mesh: Mesh) -> NamedSharding:
    """Of cache leaves [R, B, ...]: split by batch over EXPERT where that divides, else replicated."""
    size = axis_size(mesh, EXPERT)
    split = size > 1 and batch % size == 0
    return NamedSharding(mesh, PartitionSpec(None, EXPERT) if split else PartitionSpec())


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """Asks, inside a jitted function, that every array of a tree lie whole on every device; no mesh: as it is."""
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))


def settle(tree: Any, mesh: Mesh | None) -> Any:
    """Gives what one program hands to the next its fixed place, by `placements`.

    Without this the partitioner would choose, and a second call with another placement would compile again.
    """
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, placements(tree, mesh))


def placements(tree: Any, mesh: Mesh) -> Any:
    """A tree of the shardings that `settle` gives: cache rows and states by `cache_sharding`, the rest replicated."""
    whole = NamedSharding(mesh, PartitionSpec())

    def place(node: Any) -> Any:
        if not isinstance(node, Cache):
            return whole
        own = cache_sharding(node.lengths.shape[0], mesh)
        rows, states = jax.tree.map(lambda leaf: own, (node.rows, node.states))
        return Cache(rows=rows, lengths=whole, states=states)

    return jax.tree.map(place, tree, is_leaf=lambda node: isinstance(node, Cache))
