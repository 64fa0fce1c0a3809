"""The tensors of full-size GLM-5 checkpoints, written out by name, shape and dtype: the tests' own table.

Nothing here comes from the package. A width is written as a name of `Sizes`, so that the same table gives the
published shapes and tiny ones.
"""

import dataclasses
from collections.abc import Iterator

BF16, F32, U8, E4M3 = "BF16", "F32", "U8", "F8_E4M3"
ITEM_BYTES = {BF16: 2, F32: 4, U8: 1, E4M3: 1}
LAYERS, EXPERTS, FIRST_MOE, MTP = 78, 256, 3, 78
FULL_5_2 = (0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Published widths by default. heads_qk, heads_kv, heads_v: heads x (192 + 64), x (192 + 256), x 256."""

    vocab: int = 154880
    hidden: int = 6144
    dense: int = 12288
    expert: int = 2048
    q_rank: int = 2048
    kv_rank: int = 512
    kv_rope: int = 576
    heads_qk: int = 16384
    heads_kv: int = 28672
    heads_v: int = 16384
    index_heads: int = 32
    index_all: int = 4096
    index_dim: int = 128


@dataclasses.dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    dtype: str = BF16

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]


def main_tensors(s: Sizes, full_layers: tuple[int, ...]) -> Iterator[Tensor]:
    """Everything but the MTP layer, in BF16 but for the selection bias."""
    yield Tensor("model.embed_tokens.weight", (s.vocab, s.hidden))
    yield Tensor("model.norm.weight", (s.hidden,))
    yield Tensor("lm_head.weight", (s.vocab, s.hidden))
    for layer in range(LAYERS):
        yield from layer_tensors(s, layer, full=layer in full_layers, moe=layer >= FIRST_MOE)


def layer_tensors(s: Sizes, layer: int, *, full: bool, moe: bool) -> Iterator[Tensor]:
    p = f"model.layers.{layer}."
    yield Tensor(p + "input_layernorm.weight", (s.hidden,))
    yield Tensor(p + "post_attention_layernorm.weight", (s.hidden,))
    yield Tensor(p + "self_attn.q_a_proj.weight", (s.q_rank, s.hidden))
    yield Tensor(p + "self_attn.q_a_layernorm.weight", (s.q_rank,))
    yield Tensor(p + "self_attn.q_b_proj.weight", (s.heads_qk, s.q_rank))
    yield Tensor(p + "self_attn.kv_a_proj_with_mqa.weight", (s.kv_rope, s.hidden))
    yield Tensor(p + "self_attn.kv_a_layernorm.weight", (s.kv_rank,))
    yield Tensor(p + "self_attn.kv_b_proj.weight", (s.heads_kv, s.kv_rank))
    yield Tensor(p + "self_attn.o_proj.weight", (s.hidden, s.heads_v))
    if full:
        yield Tensor(p + "self_attn.indexer.wq_b.weight", (s.index_all, s.q_rank))
        yield Tensor(p + "self_attn.indexer.wk.weight", (s.index_dim, s.hidden))
        yield Tensor(p + "self_attn.indexer.k_norm.weight", (s.index_dim,))
        yield Tensor(p + "self_attn.indexer.k_norm.bias", (s.index_dim,))
        yield Tensor(p + "self_attn.indexer.weights_proj.weight", (s.index_heads, s.hidden))
    if not moe:
        yield Tensor(p + "mlp.gate_proj.weight", (s.dense, s.hidden))
        yield Tensor(p + "mlp.up_proj.weight", (s.dense, s.hidden))
        yield Tensor(p + "mlp.down_proj.weight", (s.hidden, s.dense))
        return
    yield Tensor(p + "mlp.gate.weight", (EXPERTS, s.hidden))
    yield Tensor(p + "mlp.gate.e_score_correction_bias", (EXPERTS,), F32)
    for e in range(EXPERTS):
        yield Tensor(p + f"mlp.experts.{e}.gate_proj.weight", (s.expert, s.hidden))
        yield Tensor(p + f"mlp.experts.{e}.up_proj.weight", (s.expert, s.hidden))
        yield Tensor(p + f"mlp.experts.{e}.down_proj.weight", (s.hidden, s.expert))
    yield Tensor(p + "mlp.shared_experts.gate_proj.weight", (s.expert, s.hidden))
    yield Tensor(p + "mlp.shared_experts.up_proj.weight", (s.expert, s.hidden))
    yield Tensor(p + "mlp.shared_experts.down_proj.weight", (s.hidden, s.expert))


def mtp_layer(s: Sizes) -> Iterator[Tensor]:
    """Layer 78: a MoE layer with its own indexer, and what joins it to the embedding and the head."""
    yield from layer_tensors(s, MTP, full=True, moe=True)
    p = f"model.layers.{MTP}."
    yield Tensor(p + "eh_proj.weight", (s.hidden, 2 * s.hidden))
    yield Tensor(p + "enorm.weight", (s.hidden,))
    yield Tensor(p + "hnorm.weight", (s.hidden,))
    yield Tensor(p + "shared_head.norm.weight", (s.hidden,))


def is_expert(tensor: Tensor) -> bool:
    return ".mlp.experts." in tensor.name and not tensor.name.startswith(f"model.layers.{MTP}.")


def nvidia_nvfp4(tensors: Iterator[Tensor]) -> Iterator[Tensor]:
    """The ModelOpt layout with the routed experts of layers 3..77 quantised and all else as it was."""
    for tensor in tensors:
        if not is_expert(tensor):
            yield tensor
            continue
        rows, columns = tensor.shape
        base = tensor.name.removesuffix("weight")
        yield Tensor(tensor.name, (rows, columns // 2), U8)
        yield Tensor(base + "weight_scale", (rows, columns // 16), E4M3)
        yield Tensor(base + "weight_scale_2", (), F32)
        yield Tensor(base + "input_scale", (), F32)
