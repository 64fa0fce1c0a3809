"""A second, independent GLM-5 forward pass: numpy float64, no cache, one token and head a time.

Written for being obviously right and not for speed; the expanded form of the latent attention only. Weights
stay [out, in].
"""

import json
import pathlib

import numpy as np
import safetensors.numpy

LORA_NORM_EPS = 1e-6  # of q_a_layernorm, kv_a_layernorm and the indexer's k_norm, whatever the config says


def load_folder(path) -> tuple[dict, dict[str, np.ndarray]]:
    """(config.json, tensors in float64) of a Hugging Face folder."""
    path = pathlib.Path(path)
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= safetensors.numpy.load_file(file)
    config = json.loads((path / "config.json").read_text())
    return config, {name: tensor.astype(np.float64) for name, tensor in tensors.items()}


def rms_norm(x, weight, eps):
    return weight * x / np.sqrt(np.mean(x * x) + eps)


def layer_norm(x, weight, bias, eps):
    centred = x - x.mean()
    return weight * centred / np.sqrt(np.mean(centred * centred) + eps) + bias


def rope_interleaved(x, position, theta):
    """Rotates the pairs (0, 1), (2, 3), ... in place."""
    out = np.empty_like(x)
    for j in range(len(x) // 2):
        angle = position * theta ** (-2 * j / len(x))
        out[2 * j] = x[2 * j] * np.cos(angle) - x[2 * j + 1] * np.sin(angle)
        out[2 * j + 1] = x[2 * j + 1] * np.cos(angle) + x[2 * j] * np.sin(angle)
    return out


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def silu(x):
    return x / (1 + np.exp(-x))


def swiglu(weights, prefix, x):
    gate, up = weights[f"{prefix}.gate_proj.weight"] @ x, weights[f"{prefix}.up_proj.weight"] @ x
    return weights[f"{prefix}.down_proj.weight"] @ (silu(gate) * up)


def select_keys(config, weights, prefix, rows, q_latents, positions, visible):
    """The lightning indexer: for each query the set of the `index_topk` best keys among those it sees."""
    heads, width, rope = config["index_n_heads"], config["index_head_dim"], config["qk_rope_head_dim"]
    theta = config["rope_parameters"]["rope_theta"]

    def rotated(x, position):
        return np.concatenate([rope_interleaved(x[:rope], position, theta), x[rope:]])

    keys = []
    for t, x in enumerate(rows):
        norm = weights[f"{prefix}.k_norm.weight"], weights[f"{prefix}.k_norm.bias"]
        keys.append(rotated(layer_norm(weights[f"{prefix}.wk.weight"] @ x, *norm, LORA_NORM_EPS), positions[t]))
    selected = []
    for t, x in enumerate(rows):
        queries = (weights[f"{prefix}.wq_b.weight"] @ q_latents[t]).reshape(heads, width)
        queries = [rotated(q, positions[t]) for q in queries]
        head_weights = (weights[f"{prefix}.weights_proj.weight"] @ x) * heads**-0.5
        scores = {
            s: sum(w * max(q @ keys[s] * width**-0.5, 0.0) for w, q in zip(head_weights, queries, strict=True))
            for s in visible[t]
        }
        ranked = sorted(scores, key=lambda s: -scores[s])
        selected.append(sorted(ranked[: config["index_topk"]]))
    return selected


def attention(config, weights, prefix, rows, positions, visible, selected):
    """Returns (outputs, the selection used); `selected` None means that this layer runs its own indexer."""
    heads, nope, rope = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    value_width, rank = config["v_head_dim"], config["kv_lora_rank"]
    theta = config["rope_parameters"]["rope_theta"]
    q_latents, queries, keys, values = [], [], [], []
    for t, x in enumerate(rows):
        q_latent = weights[f"{prefix}.q_a_proj.weight"] @ x
        q_latents.append(rms_norm(q_latent, weights[f"{prefix}.q_a_layernorm.weight"], LORA_NORM_EPS))
        q = (weights[f"{prefix}.q_b_proj.weight"] @ q_latents[t]).reshape(heads, nope + rope)
        queries.append([np.concatenate([h[:nope], rope_interleaved(h[nope:], positions[t], theta)]) for h in q])
        latent = weights[f"{prefix}.kv_a_proj_with_mqa.weight"] @ x
        k_rope = rope_interleaved(latent[rank:], positions[t], theta)
        latent = rms_norm(latent[:rank], weights[f"{prefix}.kv_a_layernorm.weight"], LORA_NORM_EPS)
        kv = (weights[f"{prefix}.kv_b_proj.weight"] @ latent).reshape(heads, nope + value_width)
        keys.append([np.concatenate([h[:nope], k_rope]) for h in kv])
        values.append([h[nope:] for h in kv])
    if selected is None:
        selected = select_keys(config, weights, f"{prefix}.indexer", rows, q_latents, positions, visible)
    outputs = []
    for t in range(len(rows)):
        attended = [s for s in selected[t] if s in visible[t]]
        pieces = []
        for h in range(heads):
            probabilities = softmax(np.array([queries[t][h] @ keys[s][h] for s in attended]) * (nope + rope) ** -0.5)
            pieces.append(sum(p * values[s][h] for p, s in zip(probabilities, attended, strict=True)))
        outputs.append(weights[f"{prefix}.o_proj.weight"] @ np.concatenate(pieces))
    return outputs, selected


def mixture(config, weights, prefix, x):
    scores = 1 / (1 + np.exp(-(weights[f"{prefix}.gate.weight"] @ x)))
    choice = scores + weights[f"{prefix}.gate.e_score_correction_bias"]
    groups = np.split(np.arange(len(scores)), config["n_group"])
    if config["n_group"] > 1:
        by_group = sorted(groups, key=lambda members: -sum(sorted(choice[members])[-2:]))
        groups = by_group[: config["topk_group"]]
    candidates = sorted((e for members in groups for e in members), key=lambda e: -choice[e])
    chosen = candidates[: config["num_experts_per_tok"]]
    total = sum(scores[e] for e in chosen) + 1e-20 if config["norm_topk_prob"] else 1.0
    out = swiglu(weights, f"{prefix}.shared_experts", x)
    for e in chosen:
        out = out + config["routed_scaling_factor"] * scores[e] / total * swiglu(weights, f"{prefix}.experts.{e}", x)
    return out


def forward(config, weights, token_ids, *, positions=None, parents=None):
    """(logits [T, V], residual streams [L, T, D] after each layer, the last before the final norm).

    `parents` (default: each token's predecessor) says after which token each one stands, -1 for none, so
    that a tree over a prefix is one call; `positions` default to the number of ancestors.
    """
    parents = range(-1, len(token_ids) - 1) if parents is None else parents
    visible = []
    for t, parent in enumerate(parents):
        visible.append((visible[parent] if parent >= 0 else []) + [t])
    positions = [len(ancestors) - 1 for ancestors in visible] if positions is None else positions
    eps, selected, residuals = config["rms_norm_eps"], None, []
    kinds = config.get("indexer_types") or ["full"] * config["num_hidden_layers"]
    h = [weights["model.embed_tokens.weight"][i] for i in token_ids]
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}"
        rows = [rms_norm(x, weights[f"{prefix}.input_layernorm.weight"], eps) for x in h]
        selected = None if kind == "full" else selected
        outputs, selected = attention(config, weights, f"{prefix}.self_attn", rows, positions, visible, selected)
        h = [x + y for x, y in zip(h, outputs, strict=True)]
        rows = [rms_norm(x, weights[f"{prefix}.post_attention_layernorm.weight"], eps) for x in h]
        if layer < config["first_k_dense_replace"]:
            outputs = [swiglu(weights, f"{prefix}.mlp", x) for x in rows]
        else:
            outputs = [mixture(config, weights, f"{prefix}.mlp", x) for x in rows]
        h = [x + y for x, y in zip(h, outputs, strict=True)]
        residuals.append(np.stack(h))
    final = [rms_norm(x, weights["model.norm.weight"], eps) for x in h]
    return np.stack([weights["lm_head.weight"] @ x for x in final]), np.stack(residuals)


def tree_logits(config, weights, prefix_ids, tree_token_ids, parents):
    """Logits [N, V] after each node of a tree whose root follows the prefix."""
    start = len(prefix_ids)
    token_ids = [int(i) for i in (*prefix_ids, *tree_token_ids)]
    whole = [*range(-1, start - 1), *(start - 1 if parent < 0 else start + parent for parent in parents)]
    return forward(config, weights, token_ids, parents=whole)[0][start:]
