"""The name map: every checkpoint tensor, its shape on disk and where it lies in the parameter tree. One table a model.

A `Part` joins a view of the tensor on disk with a place in one parameter leaf. Views are numpy views, so the same
table serves both directions: loading copies view -> place, saving copies place -> view.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from ddtree_jax.models.config import DENSE, FULL, SPARSE, DFlashConfig, Glm5Config
from ddtree_jax.models.glm5 import LayerKind, PackedKernels, Segment, layer_plan
from ddtree_jax.models.moe import DENSE_EXPERTS_LIMIT

Path = tuple[str | int, ...]
View = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Part:
    """`leaf[index]` holds `view(tensor)`."""

    leaf: Path
    index: tuple[int | slice, ...]
    view: View


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor of the checkpoint.

    float32: saved as float32 whatever the rest is.
    packable: a linear weight [out, in] whose leaf can stay packed along `in` (`linear.PackedKernel`); its views move
      whole axes only, so they serve codes, scales and values alike.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    float32: bool = False
    packable: bool = False


def as_stored(tensor: np.ndarray) -> np.ndarray:
    return tensor


def transposed(tensor: np.ndarray) -> np.ndarray:
    return tensor.T


ALL = slice(None)


class _Layer:
    """Builds the specs of one layer: `at` is the place of the layer in its stacked leaves."""

    def __init__(self, prefix: str, root: Path, at: tuple[int, ...]):
        self.prefix, self.root, self.at = prefix, root, at

    def part(self, leaf: str, *index: int | slice, view: View = transposed) -> Part:
        return Part((*self.root, *leaf.split(".")), (*self.at, *index), view)

    def linear(self, name: str, leaf: str, d_in: int, d_out: int) -> TensorSpec:
        return self.kernel(name, (d_out, d_in), self.part(f"{leaf}.kernel"))

    def kernel(self, name: str, shape: tuple[int, int], part: Part) -> TensorSpec:
        return TensorSpec(f"{self.prefix}{name}.weight", shape, (part,), packable=True)

    def vector(self, name: str, leaf: str, width: int) -> TensorSpec:
        return TensorSpec(f"{self.prefix}{name}", (width,), (self.part(leaf, view=as_stored),))

    def swiglu(self, name: str, leaf: str, d: int, width: int) -> Iterator[TensorSpec]:
        for at, half in enumerate(("gate_proj", "up_proj")):
            yield self.kernel(f"{name}.{half}", (width, d), self.part(f"{leaf}.gate_up.kernel", ALL, at))
        yield self.linear(f"{name}.down_proj", f"{leaf}.down", width, d)


def target_tensors(
    config: Glm5Config, *, scan: bool = True, packed: PackedKernels | None = None
) -> Iterator[TensorSpec]:
    """All tensors of a GLM-5 target in the names of its HF checkpoints, the MTP layer left out.

    `scan` and `packed` decide where a layer lies (`glm5.layer_plan`). The leaf of a kernel is named as if it were
    plain; if it is packed, its codes, scales and global scales lie at the same index of the leaves below it.
    """
    c = config
    top = _Layer("", (), ())
    embed = top.part("embed", view=as_stored)
    yield TensorSpec("model.embed_tokens.weight", (c.vocab_size, c.hidden_size), (embed,))
    for i, segment in enumerate(layer_plan(config, scan=scan, packed=packed)):
        for place, kind in enumerate(segment.pattern):
            for repeat in range(segment.repeats):
                yield from _target_layer(config, i, segment, place, repeat, kind)
    yield top.vector("model.norm.weight", "norm.weight", c.hidden_size)
    yield top.linear("lm_head", "head", c.hidden_size, c.vocab_size)


def _target_layer(
    c: Glm5Config, stack: int, segment: Segment, place: int, repeat: int, kind: LayerKind
) -> Iterator[TensorSpec]:
    number = segment.layer_index(place, repeat)
    layer = _Layer(f"model.layers.{number}.", ("stacks", stack, "layers", place), (repeat,))
    d, heads, nope = c.hidden_size, c.num_attention_heads, c.qk_nope_head_dim
    yield layer.vector("input_layernorm.weight", "input_norm.weight", d)
    yield layer.vector("post_attention_layernorm.weight", "mlp_norm.weight", d)
    mla = "attention.mla"
    yield layer.linear("self_attn.q_a_proj", f"{mla}.q_a", d, c.q_lora_rank)
    yield layer.vector("self_attn.q_a_layernorm.weight", f"{mla}.q_a_norm.weight", c.q_lora_rank)
    yield layer.linear("self_attn.q_b_proj", f"{mla}.q_b", c.q_lora_rank, heads * c.qk_head_dim)
    kv_width = c.kv_lora_rank + c.qk_rope_head_dim
    yield layer.linear("self_attn.kv_a_proj_with_mqa", f"{mla}.kv_a", d, kv_width)
    yield layer.vector("self_attn.kv_a_layernorm.weight", f"{mla}.kv_a_norm.weight", c.kv_lora_rank)
    rows = nope + c.v_head_dim  # per head: its key rows, then its value rows

    def per_head(tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(heads, rows, c.kv_lora_rank).transpose(2, 0, 1)

    yield TensorSpec(
        f"{layer.prefix}self_attn.kv_b_proj.weight",
        (heads * rows, c.kv_lora_rank),
        (
            layer.part(f"{mla}.k_b", view=lambda tensor: per_head(tensor)[..., :nope]),
            layer.part(f"{mla}.v_b", view=lambda tensor: per_head(tensor)[..., nope:]),
        ),
    )
    yield layer.linear("self_attn.o_proj", f"{mla}.o", heads * c.v_head_dim, d)
    if kind.indexer == FULL:
        own, width = "attention.indexer", c.index_head_dim
        yield layer.linear("self_attn.indexer.wq_b", f"{own}.wq_b", c.q_lora_rank, c.index_n_heads * width)
        yield layer.linear("self_attn.indexer.wk", f"{own}.wk", d, width)
        yield layer.vector("self_attn.indexer.k_norm.weight", f"{own}.k_norm.weight", width)
        yield layer.vector("self_attn.indexer.k_norm.bias", f"{own}.k_norm.bias", width)
        yield layer.linear("self_attn.indexer.weights_proj", f"{own}.weights_proj", d, c.index_n_heads)
    if kind.mlp == DENSE:
        yield from layer.swiglu("mlp", "mlp", d, c.intermediate_size)
        return
    experts, width = c.n_routed_experts, c.moe_intermediate_size
    router = layer.part("mlp.router")
    yield TensorSpec(f"{layer.prefix}mlp.gate.weight", (experts, d), (router,), float32=True)
    bias = layer.part("mlp.router_bias", view=as_stored)
    yield TensorSpec(f"{layer.prefix}mlp.gate.e_score_correction_bias", (experts,), (bias,), float32=True)
    for e in range(experts):
        for half, proj in enumerate(("gate_proj", "up_proj")):
            index = (ALL, half, e) if experts <= DENSE_EXPERTS_LIMIT else (e, ALL, half)  # the layout of `moe.MoE`
            yield layer.kernel(f"mlp.experts.{e}.{proj}", (width, d), layer.part("mlp.gate_up", *index))
        yield layer.kernel(f"mlp.experts.{e}.down_proj", (d, width), layer.part("mlp.down", e))
    yield from layer.swiglu("mlp.shared_experts", "mlp.shared", d, width * c.n_shared_experts)


def packed_kernels(config: Glm5Config, is_packed: Callable[[str], bool]) -> PackedKernels | None:
    """Which kernels can stay packed: those all of whose tensors are, as `is_packed(tensor name)` says; None: none."""
    votes: dict[Path, bool] = {}
    for spec in target_tensors(config, scan=False):
        for part in spec.parts:
            votes[part.leaf] = votes.get(part.leaf, True) and spec.packable and is_packed(spec.name)
    layers: list[list[str]] = [[] for _ in range(config.num_hidden_layers)]
    for leaf in (leaf for leaf, packed in votes.items() if packed and leaf[0] == "stacks"):
        _, layer, _, _, *names = leaf
        layers[layer].append(".".join(name for name in names if name != "kernel"))
    found = PackedKernels(tuple(tuple(sorted(names)) for names in layers), votes["head", "kernel"])
    return found if found.head or any(found.layers) else None


def mtp_tensors(config: Glm5Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the multi-token-prediction layer that checkpoints carry after the last one; never loaded."""
    d, number = config.hidden_size, config.num_hidden_layers
    one = dataclasses.replace(
        config, num_hidden_layers=1, indexer_types=(FULL,), mlp_layer_types=(SPARSE,), eos_token_ids=()
    )
    for spec in target_tensors(one):
        if spec.name.startswith("model.layers.0."):
            yield spec.name.replace("layers.0.", f"layers.{number}.", 1), spec.shape
    prefix = f"model.layers.{number}."
    yield f"{prefix}eh_proj.weight", (d, 2 * d)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{prefix}{name}.weight", (d,)


def drafter_tensors(config: DFlashConfig, target_hidden_size: int) -> Iterator[TensorSpec]:
    """All tensors of a DFlash drafter in the names of its checkpoints; embedding and head are the target's."""
    c, d = config, config.hidden_size
    top = _Layer("", (), ())
    yield top.linear("fc", "fc", len(c.target_layer_ids) * target_hidden_size, d)
    yield top.vector("hidden_norm.weight", "hidden_norm.weight", d)
    yield top.vector("norm.weight", "norm.weight", d)
    for i in range(c.num_hidden_layers):
        layer = _Layer(f"layers.{i}.", ("layers",), (i,))
        yield layer.vector("input_layernorm.weight", "input_norm.weight", d)
        yield layer.vector("post_attention_layernorm.weight", "mlp_norm.weight", d)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        yield layer.linear("self_attn.q_proj", "attention.q", d, queries)
        for name, at in (("k_proj", slice(0, keys)), ("v_proj", slice(keys, 2 * keys))):
            part = layer.part("attention.kv.kernel", ALL, at)
            yield TensorSpec(f"{layer.prefix}self_attn.{name}.weight", (keys, d), (part,))
        yield layer.linear("self_attn.o_proj", "attention.o", queries, d)
        yield layer.vector("self_attn.q_norm.weight", "attention.q_norm.weight", c.head_dim)
        yield layer.vector("self_attn.k_norm.weight", "attention.k_norm.weight", c.head_dim)
        yield from layer.swiglu("mlp", "mlp", d, c.intermediate_size)
        if c.conv is not None:
            for name in ("attention_conv", "mlp_conv"):
                taps, groups = c.conv.kernel_size, d // c.conv.group_size
                base = layer.part(f"{name}.base_kernel", view=as_stored)
                yield TensorSpec(f"{layer.prefix}{name}.base_kernel", (2, taps, d), (base,))
                yield layer.linear(f"{name}.kernel_projection", f"{name}.kernel_projection", d, 2 * taps * groups)
    if c.selector is not None:
        for name in ("predecessor_codebook", "successor_codebook"):
            table = top.part(f"selector.{name}", view=as_stored)
            yield TensorSpec(f"candidate_selector.{name}", (c.vocab_size, c.selector.rank), (table,))
        yield top.linear("candidate_selector.hidden_projection", "selector.hidden_projection", d, c.selector.rank)
