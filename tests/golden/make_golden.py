"""Writes the golden GLM-5 models of tests/golden/data with transformers' own implementation.

Every model is a small random `GlmMoeDsaForCausalLM` in the Hugging Face folder format plus `golden.npz`
with what transformers computed for it. The weights and sizes are chosen so that a wrong port shows:
sequences longer than `index_topk`, indexers that are shared between layers, small low-rank activations (so
the epsilon of their norms matters) and non-trivial norms and biases. `check_teeth` refuses to write a model
on which one of the usual porting mistakes would go unseen, and `Margins` one whose selections are so close
to a tie that two correct float32 programs could differ.

This file needs torch and transformers, which the tests do not: see README.md beside it.
"""

import contextlib
import json
import pathlib
import sys

import numpy as np
import safetensors.torch
import torch
import transformers
from transformers import DynamicCache, GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as modeling

DATA = pathlib.Path(__file__).parent / "data"
NUM_TOKENS = 24
PREFIX_LENGTHS = (14, 9)
CHUNKS = (5, 8)
NUM_GREEDY = 12
# Two branches at the root, one of depth 4; node 7 makes the deepest path and node 5 has no children.
TREE_PARENTS = (-1, 0, 0, 1, 1, 2, 3, 6)

BASE = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_shared_experts=1,
    n_routed_experts=8,
    routed_scaling_factor=2.5,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=16,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    hidden_act="silu",
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    first_k_dense_replace=2,
    index_topk=6,
    index_head_dim=16,
    index_n_heads=16,
    tie_word_embeddings=False,
    attention_bias=False,
    eos_token_id=[120, 125, 127],
    pad_token_id=120,
)
# Keys that published config.json files have and transformers' modelling code does not read.
EXTRA = dict(
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    moe_layer_freq=1,
    ep_size=1,
    rope_interleave=True,
    num_nextn_predict_layers=1,
)

VARIANTS = {
    # Indexers of both kinds.
    "mixed": dict(
        config=dict(indexer_types=["full", "full", "shared", "shared", "full", "shared"]),
        extra=dict(moe_router_dtype="float32", indexer_rope_interleave=True),
    ),
    # Group-limited routing; a width of the shared expert that differs from the routed ones.
    "groups": dict(
        config=dict(
            num_hidden_layers=4,
            indexer_types=["full", "shared", "full", "shared"],
            n_group=4,
            topk_group=2,
            num_experts_per_tok=3,
            n_shared_experts=2,
            first_k_dense_replace=1,
        ),
        extra=dict(indexer_rope_interleave=True),
    ),
    # GLM-5 / GLM-5.1: no indexer_types key, an indexer in each layer, tensors of the MTP layer present.
    "all_full": dict(
        config=dict(num_hidden_layers=4, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
        drop=["indexer_types", "mlp_layer_types", "layer_types"],
        extra=dict(head_dim=64),
        mtp=True,
    ),
    # GLM-5.2 / GLM-5.3: three full layers, then three shared and one full repeated; several shards.
    "index_share": dict(
        config=dict(
            num_hidden_layers=11,
            indexer_types=["full"] * 3 + ["shared"] * 3 + ["full"] + ["shared"] * 3 + ["full"],
            first_k_dense_replace=3,
            n_routed_experts=6,
            rope_parameters={"rope_theta": 8e6, "rope_type": "default"},
        ),
        extra=dict(
            moe_router_dtype="float32",
            indexer_rope_interleave=True,
            index_topk_freq=4,
            index_skip_topk_offset=3,
            index_topk_pattern=None,
            index_share_for_mtp_iteration=True,
            head_dim=192,
        ),
        max_shard_size="500KB",
    ),
}


def randomize(model: GlmMoeDsaForCausalLM, seed: int) -> None:
    """Weights of order 1 / sqrt(fan in); small inputs to some norms: their epsilons matter."""
    generator = torch.Generator().manual_seed(seed)

    def randn(tensor):
        return torch.randn(tensor.shape, generator=generator)

    rank = model.config.kv_lora_rank
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in sorted(state.items()):
            if name.endswith("inv_freq"):
                continue
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.3 * randn(tensor))
            elif name.endswith("k_norm.bias"):
                tensor.copy_(0.2 * randn(tensor))
            elif name.endswith("norm.weight"):
                tensor.copy_(1 + 0.2 * randn(tensor))
            elif name.endswith("embed_tokens.weight"):
                tensor.copy_(0.1 * randn(tensor))
            else:
                tensor.copy_(randn(tensor) * tensor.shape[-1] ** -0.5)
            if name.endswith("q_a_proj.weight") or name.endswith("indexer.wk.weight"):
                tensor.mul_(0.02)
            if name.endswith("kv_a_proj_with_mqa.weight"):
                tensor[:rank].mul_(0.02)


@contextlib.contextmanager
def patched(owner, name, value):
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class Margins:
    """Smallest gap between the last selected and the first rejected score of every top-k taken meanwhile."""

    def __init__(self):
        self.smallest = float("inf")

    def __enter__(self):
        original = torch.Tensor.topk
        self._original = original, torch.topk

        def record(scores, k, *args, **kwargs):
            if k < scores.shape[-1]:
                ordered = original(scores.float(), k + 1, dim=-1).values
                gap = ordered[..., k - 1] - ordered[..., k]
                gap = gap[torch.isfinite(gap) & (ordered[..., k] > -1e30)]
                if gap.numel():
                    self.smallest = min(self.smallest, gap.min().item())
            return original(scores, k, *args, **kwargs)

        torch.Tensor.topk = torch.topk = record
        return self

    def __exit__(self, *_):
        torch.Tensor.topk, torch.topk = self._original


def logits_of(model, token_ids) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.as_tensor(token_ids), use_cache=False).logits


def residuals_of(model, token_ids) -> np.ndarray:
    """Residual stream after each layer, [L, B, T, D], the last one before the final norm."""
    outputs = []
    hooks = [layer.register_forward_hook(lambda *args: outputs.append(args[2][0])) for layer in model.model.layers]
    logits_of(model, token_ids)
    for hook in hooks:
        hook.remove()
    return torch.stack(outputs).numpy()


def cached_logits(model, token_ids) -> torch.Tensor:
    """Prefill in chunks, then one token at a time."""
    cache, pieces, start = DynamicCache(config=model.config), [], 0
    while start < token_ids.shape[1]:
        size = CHUNKS[len(pieces)] if len(pieces) < len(CHUNKS) else 1
        with torch.no_grad():
            output = model(torch.as_tensor(token_ids[:, start : start + size]), cache=cache, use_cache=True)
        pieces.append(output.logits)
        start += size
    return torch.cat(pieces, dim=1)


def tree_path(node: int) -> list[int]:
    path = []
    while node != -1:
        path.insert(0, node)
        node = TREE_PARENTS[node]
    return path


def tree_logits(model, token_ids, tree_token_ids) -> np.ndarray:
    """Logits after each tree node, [B, N, V]: the plain forward of the prefix and the path from the root."""
    rows = []
    for b, length in enumerate(PREFIX_LENGTHS):
        for n in range(len(TREE_PARENTS)):
            ids = np.concatenate([token_ids[b, :length], tree_token_ids[b, tree_path(n)]])
            rows.append(logits_of(model, ids[None])[0, -1].numpy())
    return np.stack(rows).reshape(len(PREFIX_LENGTHS), len(TREE_PARENTS), -1)


def greedy(model, prompt) -> tuple[np.ndarray, float]:
    ids, gap = list(prompt), float("inf")
    for _ in range(NUM_GREEDY):
        top = logits_of(model, np.array([ids]))[0, -1].sort(descending=True)
        gap = min(gap, (top.values[0] - top.values[1]).item())
        ids.append(top.indices[0].item())
    return np.array(ids[len(prompt) :], np.int32), gap


def changes(model, token_ids, logits) -> dict[str, float]:
    """Largest change of the logits under each usual mistake (0 where the model has nothing to get wrong)."""
    config, found = model.config, {}

    def change():
        return (logits_of(model, token_ids) - logits).abs().max().item()

    full = [layer.self_attn for layer in model.model.layers if layer.self_attn.indexer is not None]
    shared = [layer.self_attn for layer in model.model.layers if layer.self_attn.indexer is None]
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    interleaved = modeling.apply_rotary_pos_emb_interleave

    def half_split(q, k, cos, sin, unsqueeze_dim=1, **_):
        def rotate(x):
            a, b = x.chunk(2, dim=-1)
            c, s = (table.chunk(2, dim=-1)[0].unsqueeze(unsqueeze_dim) for table in (cos, sin))
            return torch.cat([a * c - b * s, b * c + a * s], dim=-1)

        return rotate(q), rotate(k)

    def indexer_half_split(q, k, cos, sin, unsqueeze_dim=1, **kwargs):
        rope = half_split if unsqueeze_dim == 2 else interleaved
        return rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, **kwargs)

    def main_half_split(q, k, cos, sin, unsqueeze_dim=1, **kwargs):
        rope = interleaved if unsqueeze_dim == 2 else half_split
        return rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, **kwargs)

    with contextlib.ExitStack() as stack:
        for attention in full:
            stack.enter_context(patched(attention.indexer, "index_topk", NUM_TOKENS))
        found["indexer_off"] = change()
    with patched(modeling, "apply_rotary_pos_emb_interleave", indexer_half_split):
        found["indexer_rope_half_split"] = change()
    with patched(modeling, "apply_rotary_pos_emb_interleave", main_half_split):
        found["main_rope_half_split"] = change()
    for name, norm_names in {"q_a_eps_1e-5": ["q_a_layernorm"], "kv_a_eps_1e-5": ["kv_a_layernorm"]}.items():
        with contextlib.ExitStack() as stack:
            for layer in model.model.layers:
                for norm_name in norm_names:
                    stack.enter_context(patched(getattr(layer.self_attn, norm_name), "variance_epsilon", 1e-5))
            found[name] = change()
    with contextlib.ExitStack() as stack:
        for layer in model.model.layers:
            stack.enter_context(patched(layer.input_layernorm, "variance_epsilon", 1e-6))
        found["input_eps_1e-6"] = change()
    with contextlib.ExitStack() as stack:
        for router in routers:
            stack.enter_context(patched(router, "e_score_correction_bias", torch.zeros(config.n_routed_experts)))
        found["router_bias_dropped"] = change()
    with contextlib.ExitStack() as stack:
        for router in routers:
            stack.enter_context(patched(router, "num_group", 1))
            stack.enter_context(patched(router, "topk_group", 1))
        found["groups_ignored"] = change()
    with contextlib.ExitStack() as stack:
        everything = torch.arange(NUM_TOKENS).expand(*token_ids.shape, NUM_TOKENS)
        for attention in shared:

            def dense(*args, _forward=attention.forward, **kwargs):
                return _forward(*args, **(kwargs | {"prev_topk_indices": everything}))

            stack.enter_context(patched(attention, "forward", dense))
        found["shared_layers_dense"] = change()
    return found


def check_teeth(found: dict[str, float], config: GlmMoeDsaConfig) -> None:
    expected = set(found)
    if config.n_group == 1:
        expected.remove("groups_ignored")
    if "shared" not in config.indexer_types:
        expected.remove("shared_layers_dense")
    for name in expected:
        floor = 2e-3 if "eps" in name else 1e-2
        assert found[name] > floor, (
            f"{name}: the logits change by {found[name]} only, so no test would see this mistake"
        )


def mtp_tensors(config, seed: int) -> dict[str, torch.Tensor]:
    """Some tensors that published checkpoints have for the layer after the last; a port must ignore them."""
    generator = torch.Generator().manual_seed(seed)
    prefix, width = f"model.layers.{config.num_hidden_layers}.", config.hidden_size
    shapes = {
        "eh_proj": (width, 2 * width),
        "enorm": (width,),
        "hnorm": (width,),
        "shared_head.norm": (width,),
    }
    shapes["self_attn.q_a_proj"] = (config.q_lora_rank, width)
    return {f"{prefix}{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def build(name: str, spec: dict, seed: int):
    """One attempt: (model, arrays, teeth), or None where a selection or an argmax is too close to a tie."""
    config = GlmMoeDsaConfig(**(BASE | spec["config"]))
    config._attn_implementation = "eager"
    model = GlmMoeDsaForCausalLM(config).to(torch.float32).eval()
    randomize(model, seed)
    generator = np.random.default_rng(seed)
    token_ids = generator.integers(0, config.vocab_size, (2, NUM_TOKENS), dtype=np.int64)
    tree_token_ids = generator.integers(0, config.vocab_size, (2, len(TREE_PARENTS)), dtype=np.int64)
    with Margins() as margins:
        logits = logits_of(model, token_ids)
        arrays = dict(
            token_ids=token_ids.astype(np.int32),
            logits=logits.numpy(),
            residuals=residuals_of(model, token_ids),
            cached_logits=cached_logits(model, token_ids).numpy(),
            chunks=np.array(CHUNKS, np.int32),
            prefix_lengths=np.array(PREFIX_LENGTHS, np.int32),
            tree_parents=np.array(TREE_PARENTS, np.int32),
            tree_token_ids=tree_token_ids.astype(np.int32),
            tree_logits=tree_logits(model, token_ids, tree_token_ids),
        )
        arrays["greedy_token_ids"], gap = greedy(model, token_ids[0])
    print(f"{name} seed {seed}: smallest selection gap {margins.smallest:.1e}, smallest argmax gap {gap:.1e}")
    if margins.smallest < 3e-5 or gap < 1e-2:
        return None
    difference = np.abs(arrays["cached_logits"] - arrays["logits"]).max()
    assert difference < 5e-5, f"transformers' own cached run differs by {difference}"
    teeth = changes(model, token_ids, logits)
    check_teeth(teeth, config)
    return model, arrays, teeth


def write(name: str, spec: dict) -> None:
    folder = DATA / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    seed = 0
    while (built := build(name, spec, seed)) is None:
        seed += 1
    model, arrays, teeth = built
    model.save_pretrained(folder, max_shard_size=spec.get("max_shard_size", "50GB"))
    if spec.get("mtp"):
        path = folder / "model.safetensors"
        tensors = safetensors.torch.load_file(path) | mtp_tensors(model.config, seed)
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text()) | EXTRA | spec.get("extra", {})
    for key in spec.get("drop", []):
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)
    # What is on disk, and not only what was in memory, gives these logits; this covers the edited
    # config.json.
    reloaded = GlmMoeDsaForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    difference = (
        (logits_of(reloaded, arrays["token_ids"].astype(np.int64)) - torch.tensor(arrays["logits"])).abs().max()
    )
    assert difference < 1e-5, f"the reloaded model differs by {difference}"
    # Kept narrow: the layers that the tests look at, the last one included.
    last = model.config.num_hidden_layers - 1
    layer_ids = np.array(sorted({0, 2, last // 2, last}), np.int32)
    arrays["residuals"] = arrays["residuals"][layer_ids]
    arrays["residual_layer_ids"] = layer_ids
    np.savez_compressed(folder / "golden.npz", **arrays)
    about = dict(
        seed=seed,
        torch=torch.__version__,
        transformers=transformers.__version__,
        logits_std=float(arrays["logits"].std()),
        largest_logit_change_under=teeth,
    )
    (folder / "golden.json").write_text(json.dumps(about, indent=2) + "\n")
    print(json.dumps(about, indent=2))


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name in names or VARIANTS:
        write(name, VARIANTS[name])


if __name__ == "__main__":
    main(sys.argv[1:])
