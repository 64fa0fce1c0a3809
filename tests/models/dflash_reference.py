"""An independent DFlash drafter: numpy float64, no cache, one row and head at a time; random drafters.

The network of a block: rows of the context (target features, one per token before the block) and of the
block itself (the root token, then mask tokens); only the block has queries.
"""

import json
import pathlib

import numpy as np
import safetensors.numpy


def rms_norm(x, weight, eps):
    return weight * x / np.sqrt(np.mean(x * x) + eps)


def rope_half_split(x, position, theta):
    """Rotates the pairs (j, j + half), as GPT-NeoX does; not the target's interleaved pairs."""
    half = len(x) // 2
    out = np.empty_like(x)
    for j in range(half):
        angle = position * theta ** (-2 * j / len(x))
        out[j] = x[j] * np.cos(angle) - x[j + half] * np.sin(angle)
        out[j + half] = x[j + half] * np.cos(angle) + x[j] * np.sin(angle)
    return out


def rope_theta(config):
    return config["rope_theta"] if "rope_theta" in config else config["rope_parameters"]["rope_theta"]


def layer_rule(config, layer) -> tuple[bool, int | None]:
    """(causal, window or None) of a layer."""
    kind = (config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"])[layer]
    window = config.get("sliding_window") if kind == "sliding_attention" else None
    causal = config["is_causal"] if config.get("is_causal") is not None else kind == "sliding_attention"
    return causal, window


def sees(query_position, key_position, causal, window) -> bool:
    if causal and key_position > query_position:
        return False
    return window is None or abs(query_position - key_position) < window


def convolved(config, weights, name, side, normed, rows):
    """The grouped dynamic convolution of DFlash2 over the rows of one block; the rows as they are without one.

    Row r's kernel comes from `normed[r]`, the sublayer's normed input, whichever side it is on.
    """
    base = weights.get(f"{name}.base_kernel")
    if base is None:
        return rows
    taps, group = (config["dflash_config"][key] for key in ("conv_kernel_size", "conv_group_size"))
    groups, out = len(rows[0]) // group, []
    for r in range(len(rows)):
        projected = weights[f"{name}.kernel_projection.weight"] @ normed[r]
        row = np.zeros_like(rows[0])
        for t in range(min(taps, r + 1)):
            for channel in range(len(row)):
                dynamic = projected[(side * taps + t) * groups + channel // group]
                row[channel] += (base[side, t, channel] + dynamic) * rows[r - t][channel]
        out.append(row)
    return out


def forward_block(config, weights, embed_tokens, features, root_token_id):
    """Final hidden rows [block, D] of one block that starts at position len(features).

    Args: `weights` float64, [out, in]; `embed_tokens` [V, D] of the target; `features` [T, taps * D], row t
    for the token at position t.
    """
    inner = config["dflash_config"]
    start, size, eps = len(features), inner["block_size"], config["rms_norm_eps"]
    width = config["head_dim"]
    queries_per_key = config["num_attention_heads"] // config["num_key_value_heads"]
    ids = [root_token_id] + [inner["mask_token_id"]] * (size - 1)
    h = [embed_tokens[i] * inner.get("input_embedding_scale", 1.0) for i in ids]
    context = [rms_norm(weights["fc.weight"] @ row, weights["hidden_norm.weight"], eps) for row in features]

    def heads(name, layer, x):
        return (weights[f"layers.{layer}.self_attn.{name}.weight"] @ x).reshape(-1, width)

    def rotated(norm, layer, x, position):
        weight = weights[f"layers.{layer}.self_attn.{norm}.weight"]
        return [rope_half_split(rms_norm(head, weight, eps), position, rope_theta(config)) for head in x]

    for layer in range(config["num_hidden_layers"]):
        causal, window = layer_rule(config, layer)
        normed = [rms_norm(x, weights[f"layers.{layer}.input_layernorm.weight"], eps) for x in h]
        conv = f"layers.{layer}.attention_conv"
        block = convolved(config, weights, conv, 0, normed, normed)
        rows = context + block
        attended = []
        keys = [rotated("k_norm", layer, heads("k_proj", layer, x), p) for p, x in enumerate(rows)]
        values = [heads("v_proj", layer, x) for x in rows]
        for r in range(size):
            queries = rotated("q_norm", layer, heads("q_proj", layer, block[r]), start + r)
            seen = [p for p in range(len(rows)) if sees(start + r, p, causal, window)]
            pieces = []
            for i, query in enumerate(queries):
                scores = np.array([query @ keys[p][i // queries_per_key] for p in seen]) * width**-0.5
                probabilities = np.exp(scores - scores.max())
                probabilities /= probabilities.sum()
                pieces.append(
                    sum(w * values[p][i // queries_per_key] for w, p in zip(probabilities, seen, strict=True))
                )
            attended.append(weights[f"layers.{layer}.self_attn.o_proj.weight"] @ np.concatenate(pieces))
        h = [x + y for x, y in zip(h, convolved(config, weights, conv, 1, normed, attended), strict=True)]
        normed = [rms_norm(x, weights[f"layers.{layer}.post_attention_layernorm.weight"], eps) for x in h]
        conv, outputs = f"layers.{layer}.mlp_conv", []
        for x in convolved(config, weights, conv, 0, normed, normed):
            gate, up = (weights[f"layers.{layer}.mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
            outputs.append(weights[f"layers.{layer}.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up))
        h = [x + y for x, y in zip(h, convolved(config, weights, conv, 1, normed, outputs), strict=True)]
    return np.stack([rms_norm(x, weights["norm.weight"], eps) for x in h])


def draft_logits(config, weights, embed_tokens, lm_head, features, root_token_id):
    """Logits [block - 1, V]: row r predicts the token at position len(features) + 1 + r."""
    inner = config["dflash_config"]
    logits = forward_block(config, weights, embed_tokens, features, root_token_id)[1:] @ lm_head.T
    logits = logits * inner.get("output_multiplier", 1.0)
    cap = inner.get("final_logit_softcapping")
    return cap * np.tanh(logits / cap) if cap else logits


def drafter_config(**changes) -> dict:
    """A config.json of a small drafter for the golden targets; dict values are merged, None removes a key."""
    config = dict(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        attention_bias=False,
        dtype="float32",
        head_dim=8,
        hidden_act="silu",
        hidden_size=32,
        intermediate_size=48,
        is_causal=False,
        layer_types=["full_attention", "full_attention"],
        max_position_embeddings=256,
        num_attention_heads=4,
        num_hidden_layers=2,
        num_key_value_heads=2,
        num_target_layers=6,
        rms_norm_eps=1e-5,
        # Not the target's, so that using the target's would show.
        rope_parameters={"rope_theta": 500.0, "rope_type": "default"},
        sliding_window=None,
        tie_word_embeddings=False,
        vocab_size=128,
        eos_token_id=[120, 125, 127],
        pad_token_id=120,
        dflash_config=dict(block_size=6, mask_token_id=126, target_layer_ids=[1, 2, 3]),
    )
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(config.get(key), dict) and value is not None else value
    if isinstance(config["dflash_config"], dict):
        config["dflash_config"] = {k: v for k, v in config["dflash_config"].items() if v is not None}
    return {key: value for key, value in config.items() if value is not None}


def random_weights(config, seed: int, *, num_taps: int | None = None) -> dict[str, np.ndarray]:
    """Float32 tensors under their published names; small inputs to the norms, so that their epsilon shows."""
    generator = np.random.default_rng(seed)
    size, inner = config["hidden_size"], config["intermediate_size"]
    query_width = config["num_attention_heads"] * config["head_dim"]
    key_width = config["num_key_value_heads"] * config["head_dim"]
    num_taps = len(config["dflash_config"]["target_layer_ids"]) if num_taps is None else num_taps
    shapes = {"fc": (size, num_taps * size), "hidden_norm": (size,), "norm": (size,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        shapes |= {f"{prefix}input_layernorm": (size,), f"{prefix}post_attention_layernorm": (size,)}
        shapes |= {
            f"{prefix}self_attn.q_proj": (query_width, size),
            f"{prefix}self_attn.o_proj": (size, query_width),
        }
        shapes |= {f"{prefix}self_attn.{name}_proj": (key_width, size) for name in "kv"}
        shapes |= {f"{prefix}self_attn.{name}_norm": (config["head_dim"],) for name in "qk"}
        shapes |= {f"{prefix}mlp.{name}_proj": (inner, size) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj"] = (size, inner)
    weights = {}
    for name, shape in sorted(shapes.items()):
        if len(shape) == 1:
            value = 1 + 0.2 * generator.standard_normal(shape)
        else:
            value = generator.standard_normal(shape) * shape[-1] ** -0.5
        if name == "fc" or name.endswith(("q_proj", "k_proj")):
            value *= 0.05
        weights[f"{name}.weight"] = value.astype(np.float32)
    return weights


def write_folder(path, config, weights) -> pathlib.Path:
    path = pathlib.Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(weights, path / "model.safetensors")
    return path
