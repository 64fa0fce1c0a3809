"""Shapes of real models: one table for the tests, the tile choices and the benchmarks."""

from __future__ import annotations

from typing import NamedTuple


class Linear(NamedTuple):
    """A projection [K -> N]."""

    n: int
    k: int


# GLM-5 and its relatives (models.published.GLM_5): output width, input width.
GLM5_LINEARS = {
    "q_a": Linear(2048, 6144),
    "q_b": Linear(16384, 2048),
    "kv_a": Linear(576, 6144),
    "kv_b": Linear(28672, 512),
    "o": Linear(6144, 16384),
    "dense_gate_up": Linear(24576, 6144),
    "dense_down": Linear(6144, 12288),
    "shared_gate_up": Linear(4096, 6144),
    "shared_down": Linear(6144, 2048),
    "index_q": Linear(4096, 2048),
    "index_k": Linear(128, 6144),
}
TREE_ROWS = (1, 2, 5, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257)


class Experts(NamedTuple):
    """Routed experts: E of [D -> 2 I -> D], `top_k` a token."""

    e: int
    d: int
    i: int
    top_k: int


GLM5_EXPERTS = Experts(256, 6144, 2048, 8)


class Mla(NamedTuple):
    """Absorbed latent attention: H heads share rows of `rank` + `rope`."""

    heads: int
    rank: int
    rope: int
    scale: float


GLM5_MLA = Mla(64, 512, 64, 256**-0.5)


class Heads(NamedTuple):
    """A matrix [rank, width] a head; transposed: what is multiplied with is its transpose."""

    width: int
    transposed: bool


GLM5_HEADS = {"k_b": Heads(192, True), "v_b": Heads(256, False)}


class Gqa(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int


QWEN3_8B_GQA = Gqa(32, 8, 128)
GLM5_DRAFTER_GQA = Gqa(64, 8, 128)


class Index(NamedTuple):
    """DSA lightning indexer: `heads` queries of `head_dim` a row, the best `top_k` keys."""

    heads: int
    head_dim: int
    top_k: int


GLM5_INDEX = Index(32, 128, 2048)
GLM5_VOCAB = 154880
CONTEXTS = (1024, 8192, 65536)
