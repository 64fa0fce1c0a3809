"""Small random pairs: shapes with teeth (sparse attention active, mixed indexers, experts), seconds to compile."""

import dataclasses

import jax.numpy as jnp
import pytest

from ddtree_jax.engine import Engine
from ddtree_jax.models import DFlashConfig, Glm5Config, make_drafter, make_target

TARGET = Glm5Config(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    index_topk=8,
    index_n_heads=16,
    index_head_dim=12,
    indexer_types=("full", "full", "shared"),
    mlp_layer_types=("dense", "sparse", "sparse"),
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    max_position_embeddings=192,
    eos_token_ids=(5, 9),
)
DRAFTER = DFlashConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    block_size=6,
    mask_token_id=60,
    target_layer_ids=(0, 2),
    rope_theta=1e3,
    rms_norm_eps=1e-6,
    max_position_embeddings=192,
    causal=(False, False),
    windows=(None, None),
    num_target_layers=3,
)


def sharpened(target, factor=60.0):
    """The target with a louder head: random networks have flat logits, and near-ties are no test of losslessness."""
    leaves = target.params
    leaves["head"]["kernel"][...] = leaves["head"]["kernel"][...] * jnp.float32(factor)
    return target


@pytest.fixture(scope="session")
def small_engine():
    target = sharpened(make_target(TARGET, dtype="float32", seed=1))
    return Engine(target, make_drafter(DRAFTER, target, seed=2), None, "small")


@pytest.fixture(scope="session")
def lone_engine(small_engine):
    return dataclasses.replace(small_engine, drafter=None, name="lone")
