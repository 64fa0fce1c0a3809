"""Static, hashable descriptions of the two networks, read from and written to HF-format `config.json`.

A config is validated when it is read: a value that no layer could honour raises `CheckpointError` naming the key,
what was found and what is allowed, before any array exists.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ddtree_jax.errors import CheckpointError

FULL, SHARED = "full", "shared"
DENSE, SPARSE = "dense", "sparse"
MAX_SIZE = 2**31 - 1  # of any size in a config: positions, ids and indices are int32
# Lists are made of these before the weights can contradict them; the limits lie far above any model.
MAX_COUNTS = {"num_hidden_layers": 4096, "n_routed_experts": 65536, "block_size": 4096}
TARGET_ARCHITECTURE = "GlmMoeDsaForCausalLM"
DRAFTER_ARCHITECTURE = "DFlashDraftModel"
DRAFTER2_ARCHITECTURE = "DFlash2DraftModel"


def _require(condition: bool, key: str, found: Any, allowed: str) -> None:
    if not condition:
        raise CheckpointError(f"config key {key!r}: found {found!r}, expected {allowed}")


def _positive_ints(values: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in keys:
        value = values.get(key)
        limit = MAX_COUNTS.get(key, MAX_SIZE)
        ok = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= limit
        _require(ok, key, value, f"an integer in [1, {limit}]")


def _number(values: dict[str, Any], key: str, default: float, minimum: float) -> float:
    value = values.get(key, default)
    _require(_is_finite(value) and value > minimum, key, value, f"a finite number above {minimum:g}")
    return float(value)


def _is_finite(value: Any) -> bool:
    """A JSON number that a float can hold."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of float
        return False


def _flag(values: dict[str, Any], key: str, default: bool) -> bool:
    value = values.get(key, default)
    _require(isinstance(value, bool), key, value, "true or false")
    return value


def _architectures(values: dict[str, Any]) -> list[Any]:
    names = values.get("architectures") or []
    _require(isinstance(names, list), "architectures", names, "a list of names")
    return names


def _rope_theta(values: dict[str, Any], *, default: float | None) -> float:
    """`rope_parameters.rope_theta` (new configs) or `rope_theta` (old ones); no scaled RoPE."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    _require(isinstance(parameters, dict), "rope_parameters", parameters, "an object")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    _require(kind == "default", "rope_parameters.rope_type", kind, "'default' (no scaled RoPE is implemented)")
    theta = parameters.get("rope_theta", values.get("rope_theta", default))
    ok = _is_finite(theta) and theta > 0
    _require(ok, "rope_parameters.rope_theta", theta, "a positive number; it has no safe default")
    return float(theta)


def _token_ids(value: Any, key: str, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, (list, tuple)) else [value]
    for item in ids:
        ok = isinstance(item, int) and not isinstance(item, bool) and 0 <= item < vocab_size
        _require(ok, key, value, f"token ids in [0, {vocab_size})")
    return tuple(ids)


@dataclasses.dataclass(frozen=True)
class Glm5Config:
    """GLM-5 target (`model_type` glm_moe_dsa). Field names are those of the HF config.

    `indexer_types` and `mlp_layer_types` are always explicit here, one entry a layer. `qk_rope_head_dim` is the
    rotary width; the HF key `head_dim` is ignored because published configs carry a misleading value.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    index_topk: int
    index_n_heads: int
    index_head_dim: int
    indexer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    lora_norm_eps: float = 1e-6  # q_a and kv_a norms: transformers passes no eps there, its class default rules

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def layer_kinds(self) -> tuple[tuple[str, str], ...]:
        """One `(indexer type, MLP type)` a layer."""
        return tuple(zip(self.indexer_types, self.mlp_layer_types, strict=True))

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Layers that keep a state in place of rows of the cache: none, every kind of GLM-5 layer attends."""
        return ()

    @classmethod
    def from_hf(cls, values: dict[str, Any]) -> Glm5Config:
        """Reads an HF `config.json` dict. Raises `CheckpointError` naming a key that is missing or not allowed."""
        _require(isinstance(values, dict), "(whole file)", type(values).__name__, "an object")
        model_type = values.get("model_type")
        architectures = _architectures(values)
        ok = model_type == "glm_moe_dsa" or TARGET_ARCHITECTURE in architectures
        _require(ok, "model_type", model_type, "'glm_moe_dsa' (GLM-5, 5.1, 5.2, 5.3); glm5_next is another network")
        v = dict(values)
        v.setdefault("n_shared_experts", 1)
        v.setdefault("n_group", 1)
        v.setdefault("topk_group", 1)
        if "n_routed_experts" not in v and "num_local_experts" in v:
            v["n_routed_experts"] = v["num_local_experts"]
        integer_keys = (
            *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
            *("v_head_dim", "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group", "topk_group"),
            *("index_topk", "index_n_heads", "index_head_dim", "max_position_embeddings"),
        )
        _positive_ints(v, integer_keys)
        fixed = {
            "hidden_act": "silu",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "rope_interleave": True,
            "indexer_rope_interleave": True,
        }
        for key, allowed in fixed.items():
            found = v.get(key)
            _require(found is None or found == allowed, key, found, f"{allowed!r}")
        layers, pad_token_id = v["num_hidden_layers"], v.get("pad_token_id")
        _require(not isinstance(pad_token_id, (list, tuple)), "pad_token_id", pad_token_id, "one token id")
        _token_ids(pad_token_id, "pad_token_id", v["vocab_size"])
        config = cls(
            **{key: v[key] for key in integer_keys},
            norm_topk_prob=_flag(v, "norm_topk_prob", True),
            routed_scaling_factor=_number(v, "routed_scaling_factor", 1.0, 0.0),
            indexer_types=_indexer_types(v, layers),
            mlp_layer_types=_mlp_layer_types(v, layers),
            rope_theta=_rope_theta(v, default=None),
            rms_norm_eps=_number(v, "rms_norm_eps", 1e-5, 0.0),
            eos_token_ids=_token_ids(v.get("eos_token_id"), "eos_token_id", v["vocab_size"]),
            pad_token_id=pad_token_id,
        )
        config._validate()
        return config

    def _validate(self) -> None:
        _require(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", self.qk_rope_head_dim, "an even number")
        ok = self.index_head_dim >= self.qk_rope_head_dim
        _require(ok, "index_head_dim", self.index_head_dim, f"at least qk_rope_head_dim {self.qk_rope_head_dim}")
        ok = self.n_routed_experts % self.n_group == 0
        _require(ok, "n_group", self.n_group, f"a divisor of n_routed_experts {self.n_routed_experts}")
        _require(self.topk_group <= self.n_group, "topk_group", self.topk_group, f"at most n_group {self.n_group}")
        reachable = self.n_routed_experts // self.n_group * self.topk_group
        ok = self.num_experts_per_tok <= reachable
        _require(ok, "num_experts_per_tok", self.num_experts_per_tok, f"at most {reachable} (experts in reach)")
        if self.n_group > 1:
            size = self.n_routed_experts // self.n_group
            _require(size >= 2, "n_group", self.n_group, "groups of at least two experts (top-2 group score)")
        _require(self.indexer_types[0] == FULL, "indexer_types", self.indexer_types, "'full' in the first layer")

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` dict that `from_hf` reads back to an equal config."""
        values = dataclasses.asdict(self)
        for key in ("rope_theta", "eos_token_ids", "lora_norm_eps"):
            values.pop(key)
        values |= {
            "architectures": [TARGET_ARCHITECTURE],
            "model_type": "glm_moe_dsa",
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.qk_rope_head_dim,
            "qk_head_dim": self.qk_head_dim,
            "first_k_dense_replace": self.mlp_layer_types.count(DENSE),
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rope_interleave": True,
            "indexer_rope_interleave": True,
            "hidden_act": "silu",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "indexer_types": list(self.indexer_types),
            "mlp_layer_types": list(self.mlp_layer_types),
            "eos_token_id": list(self.eos_token_ids) if self.eos_token_ids else None,
        }
        return values


def _indexer_types(values: dict[str, Any], layers: int) -> tuple[str, ...]:
    """Explicit list, else `index_topk_pattern`, else the frequency rule of transformers."""
    types = values.get("indexer_types")
    if types is None:
        pattern = values.get("index_topk_pattern")
        if pattern is not None:
            names = {"F": FULL, "S": SHARED}
            ok = isinstance(pattern, (str, list)) and all(letter in ("F", "S") for letter in pattern)
            _require(ok, "index_topk_pattern", pattern, "letters F and S")
            types = [names[letter] for letter in pattern]
        else:
            frequency = values.get("index_topk_freq") or 1
            offset = values.get("index_skip_topk_offset", 2)
            _positive_ints({"index_topk_freq": frequency}, ("index_topk_freq",))
            _require(isinstance(offset, int), "index_skip_topk_offset", offset, "an integer")
            types = [FULL if max(i - offset + 1, 0) % frequency == 0 else SHARED for i in range(layers)]
    ok = isinstance(types, (list, tuple)) and all(kind in (FULL, SHARED) for kind in types)
    _require(ok, "indexer_types", types, "a list of 'full' and 'shared'")
    _require(len(types) == layers, "indexer_types", f"{len(types)} entries", f"{layers} (num_hidden_layers)")
    return tuple(types)


def _mlp_layer_types(values: dict[str, Any], layers: int) -> tuple[str, ...]:
    types = values.get("mlp_layer_types")
    if types is None:
        dense = values.get("first_k_dense_replace", 3)
        ok = isinstance(dense, int) and not isinstance(dense, bool) and dense >= 0
        _require(ok, "first_k_dense_replace", dense, "an integer >= 0")
        types = [DENSE if i < dense else SPARSE for i in range(layers)]
    ok = isinstance(types, (list, tuple)) and all(kind in (DENSE, SPARSE) for kind in types)
    _require(ok, "mlp_layer_types", types, "a list of 'dense' and 'sparse'")
    _require(len(types) == layers, "mlp_layer_types", f"{len(types)} entries", f"{layers} (num_hidden_layers)")
    return tuple(types)


@dataclasses.dataclass(frozen=True)
class ConvConfig:
    """Grouped dynamic convolution around the sublayers of a DFlash2 drafter.

    kernel_size: taps: a row, and the kernel_size - 1 rows above it in its block.
    group_size: channels that share the dynamic part of a tap; a divisor of the hidden size.
    """

    kernel_size: int
    group_size: int


@dataclasses.dataclass(frozen=True)
class SelectorConfig:
    """Candidate selector of a DFlash2 drafter.

    rank: width of its codebooks.
    top_k: K, candidates of each row.
    """

    rank: int
    top_k: int


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """DFlash block-diffusion drafter (arXiv 2602.06036); with `conv` and `selector` it is a DFlash2 drafter.

    `target_layer_ids` k means the residual stream AFTER 0-based target layer k. `causal` holds one entry a layer:
    whether a block row attends only to block rows at or before it. `windows` holds one entry a layer: the sliding
    window in tokens, None for full attention.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    num_target_layers: int | None = None
    conv: ConvConfig | None = None
    selector: SelectorConfig | None = None

    @property
    def draft_depth(self) -> int:
        """L, the number of drafted positions: the block without its root."""
        return self.block_size - 1

    @classmethod
    def from_hf(cls, values: dict[str, Any]) -> DFlashConfig:
        """Reads an HF `config.json` dict. Raises `CheckpointError` naming a key that is missing or not allowed.

        `target_layer_ids` and `mask_token_id` are never guessed: a wrong guess only shows as poor acceptance.
        """
        _require(isinstance(values, dict), "(whole file)", type(values).__name__, "an object")
        architectures = _architectures(values)
        known = (DRAFTER_ARCHITECTURE, DRAFTER2_ARCHITECTURE)
        ok = any(name in architectures for name in known)
        _require(ok, "architectures", architectures, f"[{known[0]!r}] or [{known[1]!r}]")
        nested = values.get("dflash_config") or {}
        _require(isinstance(nested, dict), "dflash_config", nested, "an object")
        v = {**values, **{key: value for key, value in nested.items() if value is not None}}
        v.setdefault("num_key_value_heads", v.get("num_attention_heads"))
        if v.get("head_dim") is None and all(isinstance(v.get(k), int) for k in ("hidden_size", "num_attention_heads")):
            v["head_dim"] = v["hidden_size"] // max(v["num_attention_heads"], 1)
        integer_keys = (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "block_size", "max_position_embeddings"),
        )
        _positive_ints(v, integer_keys)
        _require(v["block_size"] >= 2, "block_size", v["block_size"], "at least 2 (the root and one drafted token)")
        mask = v.get("mask_token_id")
        ok = isinstance(mask, int) and not isinstance(mask, bool) and 0 <= mask < v["vocab_size"]
        _require(ok, "dflash_config.mask_token_id", mask, f"a token id in [0, {v['vocab_size']}); it has no default")
        taps = v.get("target_layer_ids")
        ok = isinstance(taps, (list, tuple)) and len(taps) > 0
        ok = ok and all(isinstance(k, int) and not isinstance(k, bool) and k >= 0 for k in taps)
        ok = ok and len(set(taps)) == len(taps)
        _require(ok, "dflash_config.target_layer_ids", taps, "distinct 0-based target layers; it has no default")
        for key, allowed in {"hidden_act": "silu", "attention_bias": False}.items():
            found = v.get(key)
            _require(found is None or found == allowed, key, found, f"{allowed!r}")
        layers = v["num_hidden_layers"]
        types = v.get("layer_types") or ["full_attention"] * layers
        ok = isinstance(types, (list, tuple)) and all(t in ("full_attention", "sliding_attention") for t in types)
        _require(ok, "layer_types", types, "a list of 'full_attention' and 'sliding_attention'")
        _require(len(types) == layers, "layer_types", f"{len(types)} entries", f"{layers} (num_hidden_layers)")
        sliding = [t == "sliding_attention" for t in types]
        if any(sliding):
            _positive_ints(v, ("sliding_window",))
        is_causal = v.get("is_causal")
        _require(is_causal in (None, True, False), "is_causal", is_causal, "true, false or absent")
        heads, groups = v["num_attention_heads"], v["num_key_value_heads"]
        _require(heads % groups == 0, "num_key_value_heads", groups, f"a divisor of num_attention_heads {heads}")
        _require(v["head_dim"] % 2 == 0, "head_dim", v["head_dim"], "an even number (rotary halves)")
        softcap = v.get("final_logit_softcapping")
        conv, selector = _conv(v), _selector(v)
        if DRAFTER2_ARCHITECTURE in architectures:
            _require(conv is not None, "dflash_config.conv_kernel_size", None, f"an integer ({known[1]})")
            _require(selector is not None, "dflash_config.selector_rank", None, f"an integer ({known[1]})")
        if v.get("num_target_layers") is not None:
            _positive_ints(v, ("num_target_layers",))
        return cls(
            **{key: v[key] for key in integer_keys},
            mask_token_id=mask,
            target_layer_ids=tuple(taps),
            rope_theta=_rope_theta(v, default=None),
            rms_norm_eps=_number(v, "rms_norm_eps", 1e-6, 0.0),
            causal=tuple(bool(is_causal) if is_causal is not None else s for s in sliding),
            windows=tuple(v["sliding_window"] if s else None for s in sliding),
            input_embedding_scale=_number(v, "input_embedding_scale", 1.0, 0.0),
            output_multiplier=_number(v, "output_multiplier", 1.0, 0.0),
            final_logit_softcapping=None if softcap is None else _number(v, "final_logit_softcapping", 1.0, 0.0),
            num_target_layers=v.get("num_target_layers"),
            conv=conv,
            selector=selector,
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` dict that `from_hf` reads back to an equal config.

        Raises ValueError for what a config.json cannot say: two windows, or layers of mixed causality other than
        "sliding layers are causal".
        """
        nested: dict[str, Any] = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "input_embedding_scale": self.input_embedding_scale,
            "output_multiplier": self.output_multiplier,
            "final_logit_softcapping": self.final_logit_softcapping,
        }
        if self.conv is not None:
            nested |= {"conv_kernel_size": self.conv.kernel_size, "conv_group_size": self.conv.group_size}
        if self.selector is not None:
            nested |= {"selector_rank": self.selector.rank, "selector_top_k": self.selector.top_k}
        is_second = self.conv is not None and self.selector is not None
        simple = (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "num_target_layers"),
        )
        windows = {window for window in self.windows if window is not None}
        sliding = tuple(window is not None for window in self.windows)
        if len(windows) > 1 or (len(set(self.causal)) > 1 and self.causal != sliding):
            raise ValueError(f"causal {self.causal}, windows {self.windows}: config.json cannot say this")
        return {
            "architectures": [DRAFTER2_ARCHITECTURE if is_second else DRAFTER_ARCHITECTURE],
            "model_type": "qwen3",
            **{key: getattr(self, key) for key in simple},
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "is_causal": self.causal[0] if len(set(self.causal)) == 1 else None,
            "layer_types": ["full_attention" if w is None else "sliding_attention" for w in self.windows],
            "sliding_window": min(windows) if windows else None,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "dflash_config": nested,
        }


def _conv(values: dict[str, Any]) -> ConvConfig | None:
    """None where neither key is given; one without the other is a fault."""
    keys = ("conv_kernel_size", "conv_group_size")
    if all(values.get(key) is None for key in keys):
        return None
    _positive_ints(values, keys)
    taps, group = (values[key] for key in keys)
    block, width = values["block_size"], values["hidden_size"]
    _require(taps <= block, "conv_kernel_size", taps, f"at most block_size {block} (a tap never leaves its block)")
    _require(width % group == 0, "conv_group_size", group, f"a divisor of hidden_size {width}")
    return ConvConfig(kernel_size=taps, group_size=group)


def _selector(values: dict[str, Any]) -> SelectorConfig | None:
    """None where neither key is given; one without the other is a fault."""
    keys = ("selector_rank", "selector_top_k")
    if all(values.get(key) is None for key in keys):
        return None
    _positive_ints(values, keys)
    rank, top_k = (values[key] for key in keys)
    _require(top_k <= values["vocab_size"], "selector_top_k", top_k, f"at most vocab_size {values['vocab_size']}")
    return SelectorConfig(rank=rank, top_k=top_k)
