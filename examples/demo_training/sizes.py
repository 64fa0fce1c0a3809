"""Sizes of the pair and of its training run, in one frozen dataclass."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class DemoSizes:
    """Everything that fixes the shape of the pair and of the training batches.

    The defaults are the pair that ships with the package; `tiny()` is a pair for tests.
    Durations are not sizes: every stage runs against a clock (`schedule.Clock`).
    """

    # Tokenizer and target (a miniature GLM-5).
    vocab_size: int = 2048
    hidden_size: int = 384
    num_layers: int = 8
    num_dense_layers: int = 1
    dense_width: int = 768
    num_experts: int = 16
    experts_per_token: int = 4
    expert_width: int = 56
    num_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 64
    nope_dim: int = 32
    rope_dim: int = 32
    value_dim: int = 64
    index_heads: int = 16
    index_dim: int = 48
    index_topk: int = 128
    full_indexer_layers: tuple[int, ...] = (0, 1, 2, 6)
    target_rope_theta: float = 1e6
    max_positions: int = 4096

    # Drafter (DFlash). Its rope theta differs from the target's on purpose.
    draft_layers: int = 3
    draft_width: int = 576
    draft_heads: int = 4
    draft_kv_heads: int = 2
    draft_head_dim: int = 64
    block_size: int = 16
    draft_rope_theta: float = 1e4
    # DFlash2: convolutions and a candidate selector; 0 leaves the part out.
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16

    # Target training.
    target_context: int = 1024
    target_batch: int = 64
    target_learning_rate: float = 2e-3
    target_warmup_steps: int = 200
    chunk_steps: int = 8

    # Indexer training.
    indexer_batch: int = 16
    indexer_learning_rate: float = 1e-3
    sparse_batch: int = 32
    # (context, index_topk) pairs whose held-out loss is reported beside the dense one.
    sparse_checks: tuple[tuple[int, int], ...] = ((1024, 64), (1024, 128), (1024, 256), (256, 64), (256, 128))
    sparse_learning_rate: float = 2e-4

    # Text written by the target. One batch per prompt length in turn.
    own_batch: int = 4096
    own_length: int = 320
    own_prompt_lengths: tuple[int, ...] = (128, 128, 64, 128, 128, 24)
    own_greedy_share: float = 0.75
    own_max_tokens: int = 40_000_000

    # Drafter training.
    draft_batch: int = 128
    anchors: int = 16
    draft_learning_rate: float = 2e-3
    draft_warmup_steps: int = 100
    draft_gamma: float = 7.0
    soft_label_weight: float = 0.0

    # Held-out material.
    heldout_per_mille: int = 20
    num_prompts: int = 128
    prompt_tokens: int = 128
    reference_tokens: int = 96
    heldout_tokens: int = 400_000
    check_batch: int = 32
    evaluate_batch: int = 8
    tree_budgets: tuple[int, ...] = (8, 16, 32, 64, 128)

    seed: int = 20261

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Layers whose outputs feed the drafter: the even spread of the DFlash reference code.

        A target too shallow for that rule (tests) gives its first layers.
        """
        count = self.draft_layers
        if self.num_layers < count + 4:
            return tuple(range(min(count, self.num_layers - 1)))
        if count == 1:
            return (self.num_layers // 2,)
        return tuple(round(1 + i * (self.num_layers - 4) / (count - 1)) for i in range(count))

    @property
    def indexer_types(self) -> tuple[str, ...]:
        """`full` where a layer owns an indexer, `shared` where it reuses the one before."""
        return tuple("full" if i in self.full_indexer_layers else "shared" for i in range(self.num_layers))

    def target_hf_config(self, end_id: int) -> dict:
        """config.json of the target, in the keys of GlmMoeDsaForCausalLM."""
        dense = self.num_dense_layers
        return {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.dense_width,
            "moe_intermediate_size": self.expert_width,
            "num_hidden_layers": self.num_layers,
            "num_nextn_predict_layers": 0,
            "first_k_dense_replace": dense,
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * (self.num_layers - dense),
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "qk_head_dim": self.nope_dim + self.rope_dim,
            "head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
            "n_routed_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "moe_router_dtype": "float32",
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_dim,
            "index_topk": self.index_topk,
            "indexer_types": list(self.indexer_types),
            "rope_interleave": True,
            "indexer_rope_interleave": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.target_rope_theta},
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "attention_dropout": 0.0,
            "use_cache": True,
            "bos_token_id": end_id,
            "eos_token_id": [end_id],
            "pad_token_id": end_id,
            "dtype": "bfloat16",
        }

    def drafter_hf_config(self, end_id: int, mask_id: int, target_config: dict | None = None) -> dict:
        """config.json of the drafter, in the keys of DFlashDraftModel or, with both of its parts, DFlash2DraftModel.

        Args:
          end_id: end-of-text token id.
          mask_id: token id that fills rows 1.. of a block.
          target_config: config.json of a target other than `target_hf_config`'s, whose width, vocabulary and
            depth the drafter then follows.
        """
        sizes = self
        if target_config is not None:
            sizes = dataclasses.replace(
                self,
                hidden_size=target_config["hidden_size"],
                vocab_size=target_config["vocab_size"],
                num_layers=target_config["num_hidden_layers"],
            )
        added = {}
        if self.conv_kernel_size:
            added |= {"conv_kernel_size": self.conv_kernel_size, "conv_group_size": self.conv_group_size}
        if self.selector_rank:
            added |= {"selector_rank": self.selector_rank, "selector_top_k": self.selector_top_k}
        is_second = self.conv_kernel_size and self.selector_rank
        return {
            "architectures": ["DFlash2DraftModel" if is_second else "DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": sizes.vocab_size,
            "hidden_size": sizes.hidden_size,
            "intermediate_size": self.draft_width,
            "num_hidden_layers": self.draft_layers,
            "num_target_layers": sizes.num_layers,
            "num_attention_heads": self.draft_heads,
            "num_key_value_heads": self.draft_kv_heads,
            "head_dim": self.draft_head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "is_causal": False,
            "layer_types": ["full_attention"] * self.draft_layers,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.draft_rope_theta},
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "block_size": self.block_size,
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": mask_id,
                "target_layer_ids": list(sizes.tap_layers),
                **added,
            },
            "eos_token_id": [end_id],
            "pad_token_id": end_id,
            "dtype": "bfloat16",
        }

    @classmethod
    def tiny(cls) -> DemoSizes:
        """A pair that trains for seconds on a CPU; every part of the full one is present."""
        return cls(
            vocab_size=512,
            hidden_size=32,
            num_layers=3,
            dense_width=48,
            num_experts=4,
            experts_per_token=2,
            expert_width=16,
            num_heads=2,
            q_lora_rank=24,
            kv_lora_rank=16,
            nope_dim=8,
            rope_dim=8,
            value_dim=16,
            index_heads=16,
            index_dim=16,
            index_topk=16,
            full_indexer_layers=(0, 2),
            max_positions=512,
            draft_layers=2,
            draft_width=48,
            draft_heads=2,
            draft_kv_heads=1,
            draft_head_dim=16,
            block_size=4,
            target_context=64,
            target_batch=4,
            target_warmup_steps=4,
            chunk_steps=4,
            indexer_batch=2,
            sparse_batch=2,
            sparse_checks=((64, 16),),
            check_batch=4,
            evaluate_batch=4,
            own_batch=16,
            own_length=48,
            own_prompt_lengths=(24,),
            own_max_tokens=4000,
            draft_batch=4,
            anchors=4,
            draft_warmup_steps=4,
            heldout_per_mille=150,
            num_prompts=4,
            prompt_tokens=24,
            reference_tokens=16,
            heldout_tokens=2000,
            tree_budgets=(4,),
        )

    @classmethod
    def from_overrides(cls, base: DemoSizes, overrides: dict[str, str]) -> DemoSizes:
        """`base` with fields replaced by values read from text such as `num_layers=8`.

        Raises:
          ValueError: a name is no field, or a value does not parse as JSON.
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        values = {}
        for name, text in overrides.items():
            if name not in fields:
                raise ValueError(f"size {name!r} is unknown; allowed: {', '.join(sorted(fields))}")
            value = json.loads(text)
            values[name] = tuple(value) if isinstance(value, list) else value
        return dataclasses.replace(base, **values)

    def save(self, path: Path) -> None:
        """Write the sizes as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    def num_steps_per_epoch(self, num_tokens: int) -> int:
        """Training steps that see every token once."""
        return math.ceil(num_tokens / (self.target_batch * self.target_context))
