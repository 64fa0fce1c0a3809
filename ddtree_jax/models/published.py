"""Published configs of the full-size models, as their `config.json` has them: shapes to plan, compile and test with.

Keys that say nothing about the network (token classes, versions, dropout) are left out. Read them with
`Glm5Config.from_hf` and `DFlashConfig.from_hf`.
"""

from __future__ import annotations

from typing import Any, Final

_LAYERS = 78

_GLM_5_FAMILY: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": _LAYERS,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 256,
    "v_head_dim": 256,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "rope_interleave": True,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
}

# GLM-5 and GLM-5.1: every layer has an indexer.
GLM_5: Final[dict[str, Any]] = {
    **_GLM_5_FAMILY,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "max_position_embeddings": 202752,
}

# GLM-5.2 and GLM-5.3: layers 0, 1, 2 and then every fourth have an indexer, the others share the one before them.
GLM_5_2: Final[dict[str, Any]] = {
    **_GLM_5_FAMILY,
    "mlp_layer_types": ["dense" if i < 3 else "sparse" for i in range(_LAYERS)],
    "moe_router_dtype": "float32",
    "indexer_types": ["full" if i < 3 or i % 4 == 2 else "shared" for i in range(_LAYERS)],
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_topk_pattern": None,
    "index_share_for_mtp_iteration": True,
    "indexer_rope_interleave": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8000000},
    "max_position_embeddings": 1048576,
}

# The drafter GLM-5.3-DFlash2, which also runs with GLM-5.2.
GLM_5_3_DFLASH2: Final[dict[str, Any]] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 6,
    "sliding_window": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_target_layers": _LAYERS,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "max_position_embeddings": 1048576,
    "vocab_size": 154880,
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
    "dflash_config": {
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": 154856,
        "selector_rank": 256,
        "selector_top_k": 16,
        "target_layer_ids": [5, 19, 33, 47, 61, 75],
    },
}

TARGETS: Final[dict[str, dict[str, Any]]] = {"GLM-5": GLM_5, "GLM-5.2": GLM_5_2}
