"""Small random pairs: shapes with teeth (sparse attention active, mixed indexers, experts), seconds to compile."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import tokenizers

from ddtree_jax.engine import Engine
from ddtree_jax.models import ConvConfig, DFlashConfig, Glm5Config, SelectorConfig, make_drafter, make_target
from ddtree_jax.models.pair import flat_leaves
from tests.conftest import compiles_quickly
from tests.grammar.conftest import make_tiny_tokenizer

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
DRAFTER2 = dataclasses.replace(DRAFTER, conv=ConvConfig(2, 4), selector=SelectorConfig(rank=6, top_k=5))


def sharpened(target, factor=60.0):
    """The target with a louder head: random networks have flat logits, and near-ties are no test of losslessness."""
    leaves = target.params
    leaves["head"]["kernel"][...] = leaves["head"]["kernel"][...] * jnp.float32(factor)
    return target


def dflash2_noise(drafter, *, conv, pairs, seed=3):
    """The drafter with normal noise on what DFlash2 adds: new ones start as DFlash v1, and would test nothing else."""
    scales = {"base_kernel": conv, "kernel_projection": conv, "successor_codebook": pairs}
    changed = 0
    for i, (path, leaf) in enumerate(sorted(flat_leaves(drafter.params).items())):
        scale = next((value for name, value in scales.items() if name in path), None)
        if scale is None:
            continue
        variable = drafter.params
        for key in path:
            variable = variable[key]
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), leaf.shape)
        fan_in = leaf.shape[-2] if "kernel_projection" in path else 1
        variable[...] = leaf + (scale * fan_in**-0.5 * noise).astype(leaf.dtype)
        changed += 1
    assert changed == 5
    return drafter


@pytest.fixture(scope="session")
def small_dflash2_engine():
    """The same target as that of `small_engine`, with a random DFlash2 drafter."""
    target = sharpened(make_target(TARGET, dtype="float32", seed=1))
    drafter = dflash2_noise(make_drafter(DRAFTER2, target, seed=2), conv=0.3, pairs=1.0)
    return Engine(target, drafter, None, "small-dflash2")


@pytest.fixture(scope="session")
def small_engine():
    target = sharpened(make_target(TARGET, dtype="float32", seed=1))
    return Engine(target, make_drafter(DRAFTER, target, seed=2), None, "small")


@pytest.fixture(scope="session")
def lone_engine(small_engine):
    return dataclasses.replace(small_engine, drafter=None, name="lone")


def text_tokenizer():
    """A tokenizer of a few characters; token 0 is its stop token."""
    kept = "abcdefghijklmnopqrstuvwxyz0123456789-,:{}"
    dropped = "".join(sorted(set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - set(kept + '"Ġ')))
    return make_tiny_tokenizer(drop=dropped)


@pytest.fixture(scope="session")
def text_engine(small_engine):
    """`small_engine` with `text_tokenizer`."""
    tokenizer = text_tokenizer()
    assert tokenizer.vocab_size <= small_engine.target.config.vocab_size - 1  # the last row is the drafter's mask
    return dataclasses.replace(small_engine, tokenizer=tokenizer, name="small-text")


@pytest.fixture(scope="session")
def text_dflash2_engine(text_engine, small_dflash2_engine):
    """`text_engine` with the random DFlash2 drafter."""
    return dataclasses.replace(small_dflash2_engine, tokenizer=text_engine.tokenizer, name="small-text-dflash2")


@pytest.fixture(scope="module")
def quick_compilation(request):
    """Programs compiled with few optimisations: where a program runs once or twice, compilation is all the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", compiles_quickly(request.config))
