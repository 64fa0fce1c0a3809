"""The golden models of tests/golden/data, copies with chosen faults, and the tolerance that all tests use."""

import json
import pathlib
import shutil

import numpy as np
import safetensors.numpy

DATA = pathlib.Path(__file__).parents[1] / "golden" / "data"
NAMES = ("mixed", "groups", "all_full", "index_share")
# Taps of the test drafters; every golden model has these layers.
LAYER_IDS = (1, 2, 3)
# Float32 against float32 (or float64) at full matmul precision, logits of standard deviation 1.
TOLERANCE = 5e-5
# A fault must show at least this much, or the test that should catch it has no teeth.
FAULT = 1e-3


def path(name) -> pathlib.Path:
    return DATA / name


def arrays(name) -> dict[str, np.ndarray]:
    with np.load(DATA / name / "golden.npz") as file:
        return dict(file)


def edited(source, destination, *, config=None, tensors=None) -> pathlib.Path:
    """A copy of a folder; `config` is merged into its config.json (None removes), `tensors` edits a dict."""
    source, destination = pathlib.Path(source), pathlib.Path(destination)
    destination.mkdir(parents=True)
    for extra in ("generation_config.json", "tokenizer.json"):
        if (source / extra).exists():
            shutil.copy(source / extra, destination)
    values = json.loads((source / "config.json").read_text()) | (config or {})
    values = {key: value for key, value in values.items() if value is not None}
    (destination / "config.json").write_text(json.dumps(values))
    weights = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= safetensors.numpy.load_file(file)
    if tensors is not None:
        tensors(weights)
    weights = {name: np.ascontiguousarray(value) for name, value in weights.items()}
    safetensors.numpy.save_file(weights, destination / "model.safetensors")
    return destination


def largest_error(found, expected) -> float:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert np.isfinite(found).all()
    return float(np.abs(found - expected).max())


# ---- faults that a port could have, each written as an exactly equivalent edit of the weights or the config


def indexer_rope_half_split(weights, rope_width=8, head_dim=16):
    """Interleaved RoPE on permuted dims is half-split RoPE on the original: (j, j + half) -> (2j, 2j + 1)."""
    half = rope_width // 2
    order = [index for j in range(half) for index in (j, j + half)] + list(range(rope_width, head_dim))
    for name in list(weights):
        if name.endswith("indexer.wq_b.weight"):
            heads = weights[name].reshape(-1, head_dim, weights[name].shape[-1])
            weights[name] = heads[:, order].reshape(weights[name].shape)
        elif ".indexer.wk." in name or ".indexer.k_norm." in name:
            weights[name] = weights[name][order]


def q_a_norm_eps_ten_times(weights):
    """RMSNorm(x / sqrt(10); eps) is RMSNorm(x; 10 eps)."""
    for name in weights:
        if name.endswith("q_a_proj.weight"):
            weights[name] = weights[name] * np.float32(10**-0.5)


def kv_a_norm_eps_ten_times(weights, rank=16):
    for name in weights:
        if name.endswith("kv_a_proj_with_mqa.weight"):
            weights[name][:rank] *= np.float32(10**-0.5)


def router_bias_dropped(weights):
    for name in weights:
        if name.endswith("e_score_correction_bias"):
            weights[name] = np.zeros_like(weights[name])


def indexers_everywhere(indexer_types):
    """Shared layers recompute their selection, with the weights of the full layer before them."""

    def edit(weights):
        source = None
        for layer, kind in enumerate(indexer_types):
            source = layer if kind == "full" else source
            prefix = f"model.layers.{source}.self_attn.indexer."
            own = f"model.layers.{layer}.self_attn.indexer."
            for name in [name for name in weights if name.startswith(prefix)]:
                weights[name.replace(prefix, own)] = weights[name].copy()

    return edit
