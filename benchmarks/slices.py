"""A few layers of GLM-5 with random weights, on one device or over a mesh: what other benchmarks run.

True layer shapes, routed experts as NVFP4, and a random DFlash drafter. Random models agree on nothing, so that a round
would accept the root's successor alone; `loud` tokens make both choose among a few.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddtree_jax.abstract import packed_experts
from ddtree_jax.engine import Engine
from ddtree_jax.models.config import DFlashConfig, Glm5Config
from ddtree_jax.models.folders import Opened, describe_drafter, describe_target, with_arrays
from ddtree_jax.models.kernels import with_kernels
from ddtree_jax.models.pair import Drafter, Target, flat_leaves, make_drafter
from ddtree_jax.models.published import GLM_5, GLM_5_3_DFLASH2
from ddtree_jax.pallas.choice import KernelChoice

DENSE_LAYERS, DRAFT_LAYERS = 3, 5
LOUDNESS = 4.0
# Every path of the large one, for machines without a GPU: routed experts, selection of keys, scale groups that divide.
SMALL_TARGET = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 16,
    "n_routed_experts": 40,
    "num_experts_per_tok": 4,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 64,
    "eos_token_id": [509],
    "pad_token_id": 509,
    "max_position_embeddings": 4096,
}
SMALL_DRAFTER = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": [509],
    "pad_token_id": 509,
    "max_position_embeddings": 4096,
}


def slice_engine(dtype: str, *, layers: int, dense: int = DENSE_LAYERS, small: bool = False, loud: int = 0) -> Engine:
    """A random pair on the default device, in plain JAX.

    Args:
      dtype: of whatever is neither packed nor float32 by nature.
      layers: of the target, at least 6.
      dense: how many of them come first and have no experts.
      small: tiny shapes in place of the true ones.
      loud: how many tokens the head prefers to all others, drawn at random; 0: none.
    """
    shapes = SMALL_TARGET if small else {}
    config = Glm5Config.from_hf({**GLM_5, **shapes, "num_hidden_layers": layers, "first_k_dense_replace": dense})
    opened = describe_target(config, dtype=dtype, packed=packed_experts(config))
    # In one program: drawn one by one, the random bits of the experts would not fit as the integers that they start as.
    params = jax.jit(lambda: nnx.split(opened.build(rngs=nnx.Rngs(0)))[1])()
    if loud:
        leaves = flat_leaves(params)
        chosen = np.random.default_rng(1).choice(config.vocab_size // 2, loud, replace=False)
        factors = np.ones(config.vocab_size, np.float32)
        factors[chosen] = LOUDNESS
        head = leaves["head", "kernel"]
        params = with_arrays(params, {**leaves, ("head", "kernel"): head * jnp.asarray(factors, head.dtype)})
    target = Target(config, opened.abstract[0], params)
    own = {
        **(SMALL_DRAFTER if small else {}),
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": DRAFT_LAYERS,
        "num_target_layers": layers,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
        "sliding_window": None,
        "dflash_config": {
            "block_size": 8,
            "mask_token_id": 510 if small else 154856,
            "target_layer_ids": [1, layers // 2, layers - 2],
        },
    }
    drafter = make_drafter(DFlashConfig.from_hf({**GLM_5_3_DFLASH2, **own}), target)
    return Engine(target, drafter, None, "slice")


def on_mesh(engine: Engine, mesh: Any) -> Engine:
    """The same weights, placed as `load(mesh=)` places them. Where a device has them already they may be shared."""
    config, dtype = engine.target.config, engine.target.dtype
    opened = (
        describe_target(config, dtype=dtype, mesh=mesh, packed=packed_experts(config)),
        describe_drafter(engine.drafter.config, config, dtype=dtype, mesh=mesh),
    )
    target, drafter = (_placed(o, model) for o, model in zip(opened, (engine.target, engine.drafter), strict=True))
    return _renewed(engine, target, drafter)


def _placed(opened: Opened, model: Target | Drafter) -> Target | Drafter:
    leaves, graphdef = opened.leaves, opened.abstract[0]
    arrays = {path: jax.device_put(array, leaves[path].sharding) for path, array in flat_leaves(model.params).items()}
    return opened.kind(model.config, graphdef, with_arrays(opened.abstract[1], arrays), None, opened.mesh)


def on_kernels(engine: Engine, choice: KernelChoice) -> Engine:
    """The engine on kernels; the one that is given stays as it is."""
    return _renewed(engine, with_kernels(engine.target, choice), with_kernels(engine.drafter, choice))


def _renewed(engine: Engine, target: Target, drafter: Drafter) -> Engine:
    return dataclasses.replace(engine, target=target, drafter=drafter, compiled=set(), warned=set())


def random_prompts(batches: Sequence[Sequence[int]], engine: Engine) -> list[list[list[int]]]:
    """Batches of prompts of these lengths; longer ones start like shorter ones."""
    vocab = engine.target.config.vocab_size
    draw = np.random.default_rng(0).integers(0, vocab - min(256, vocab // 2), max(map(max, batches)))
    return [[draw[:length].tolist() for length in lengths] for lengths in batches]
