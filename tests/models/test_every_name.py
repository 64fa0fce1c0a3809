"""A tiny checkpoint with every tensor name of GLM-5.2, MTP layer and scales included: each finds its place."""

import re

import ml_dtypes
import numpy as np
import pytest

from ddtree_jax.models import Glm5Config, load_target, published
from ddtree_jax.models.pair import flat_leaves
from ddtree_jax.models.params import mtp_tensors, target_tensors
from ddtree_jax.safetensors_files import write_json, write_safetensors
from tests.engine.checkpoint_files import decode
from tests.models import checkpoint_names as names

DTYPES = {
    **{names.BF16: ml_dtypes.bfloat16, names.F32: np.float32},
    **{names.U8: np.uint8, names.E4M3: ml_dtypes.float8_e4m3fn},
}
# Two heads of 4 + 2 (queries), 4 + 6 (keys and values); two index heads of 4.
SIZES = names.Sizes(
    **{"vocab": 24, "hidden": 16, "dense": 32, "expert": 16, "q_rank": 8, "kv_rank": 6, "kv_rope": 8},
    **{"heads_qk": 12, "heads_kv": 20, "heads_v": 12, "index_heads": 2, "index_all": 8, "index_dim": 4},
)
CONFIG = published.GLM_5_2 | {
    **{"vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 16, "q_lora_rank": 8},
    **{"kv_lora_rank": 6, "num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 4, "v_head_dim": 6},
    **{"qk_rope_head_dim": 2, "qk_head_dim": 6, "index_n_heads": 2, "index_head_dim": 4},
    **{"eos_token_id": [3], "pad_token_id": 3},
}
# A spread of layers: dense, the run of shared ones after them, full and shared ones of the repeated pattern, the last.
LAYERS = (0, 2, 3, 5, 6, 9, 10, 37, 42, 74, 77)


def own_tensors():
    yield from names.main_tensors(SIZES, names.FULL_5_2)


def write(folder, tensors):
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", CONFIG)
    return folder


def random_tensor(tensor, rng):
    if tensor.dtype == names.U8:
        return rng.integers(0, 256, tensor.shape, np.uint8)
    if tensor.dtype == names.E4M3:
        return rng.integers(8, 0x7F, tensor.shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
    if tensor.name.endswith("scale_2"):
        return rng.uniform(1e-4, 1e-3, tensor.shape).astype(np.float32).reshape(tensor.shape)
    return np.asarray(rng.standard_normal(tensor.shape)).astype(DTYPES[tensor.dtype]).reshape(tensor.shape)


def kv_scales():
    for layer in range(names.LAYERS):
        for side in "kv":
            yield names.Tensor(f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale", (), names.F32)


def place_of(layer):
    """(stack, place, repeat) of a layer, by the pattern of GLM-5.2: 0..2, then 3..5, then four at a time from 6."""
    if layer < 3:
        return 0, 0, layer
    if layer < 6:
        return 1, 0, layer - 3
    return 2, (layer - 6) % 4, (layer - 6) // 4


def as_float(leaf):
    return np.asarray(leaf).astype(np.float64)


def test_names_are_the_published_ones():
    config = Glm5Config.from_hf(CONFIG)
    own = {tensor.name: tensor.shape for tensor in own_tensors()}
    assert len(own) == 58_794
    assert {spec.name: spec.shape for spec in target_tensors(config)} == own
    mtp = {tensor.name: tensor.shape for tensor in names.mtp_layer(SIZES)}
    assert len(mtp) == 791 and dict(mtp_tensors(config)) == mtp and not mtp.keys() & own.keys()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bfloat16", "nvfp4"])
def test_every_tensor_finds_its_place(tmp_path, layout):
    rng = np.random.default_rng(0)
    own = list(own_tensors())
    stored = own if layout == "bfloat16" else list(names.nvidia_nvfp4(own))
    everything = [*stored, *names.mtp_layer(SIZES), *kv_scales()]
    tensors = {tensor.name: random_tensor(tensor, rng) for tensor in everything}
    assert len(tensors) == len(everything)
    said = []
    target = load_target(write(tmp_path / "target", tensors), dtype="float32", progress=said.append)
    left_out = {"MTP layer": 791, "k/v scales": 2 * 78} | ({"activation scales": 57_600} if layout == "nvfp4" else {})
    assert len(own) == 58_794 and f"{len(own)} tensors" in said[0]
    assert {what: int(n) for n, what in re.findall(r"(\d+) of ([a-zA-Z/ ]+)", said[0])} == left_out
    leaves = flat_leaves(target.params)
    assert any(path[-1] == "codes" for path in leaves) == (layout == "nvfp4")
    held = {path: as_float(leaf) for path, leaf in leaves.items() if path[-1] not in ("codes", "scales")}

    def expected(name):
        return decode(tensors, name)

    np.testing.assert_array_equal(held["embed",], expected("model.embed_tokens.weight"))
    np.testing.assert_array_equal(held["head", "kernel"], expected("lm_head.weight").T)
    np.testing.assert_array_equal(held["norm", "weight"], expected("model.norm.weight"))
    for layer in LAYERS:
        stack, place, repeat = place_of(layer)
        name = f"model.layers.{layer}."

        def same(path, value, root=("stacks", stack, "layers", place), repeat=repeat):
            np.testing.assert_array_equal(
                held[*root, *path.split(".")][repeat], value, err_msg=f"{repeat} {root} {path}"
            )

        same("input_norm.weight", expected(name + "input_layernorm.weight"))
        same("mlp_norm.weight", expected(name + "post_attention_layernorm.weight"))
        same("attention.mla.q_b.kernel", expected(name + "self_attn.q_b_proj.weight").T)
        same("attention.mla.o.kernel", expected(name + "self_attn.o_proj.weight").T)
        kv_b = expected(name + "self_attn.kv_b_proj.weight").reshape(2, 10, 6)
        same("attention.mla.k_b", np.moveaxis(kv_b[:, :4], 2, 0))
        same("attention.mla.v_b", np.moveaxis(kv_b[:, 4:], 2, 0))
        own_indexer = ("stacks", stack, "layers", place, "attention", "indexer", "wk", "kernel") in held
        assert own_indexer == (layer in names.FULL_5_2)
        if own_indexer:
            same("attention.indexer.wk.kernel", expected(name + "self_attn.indexer.wk.weight").T)
            same("attention.indexer.k_norm.bias", expected(name + "self_attn.indexer.k_norm.bias"))
        if layer < 3:
            same("mlp.gate_up.kernel", gate_up(expected, name + "mlp."))
            continue
        same("mlp.router", expected(name + "mlp.gate.weight").T)
        same("mlp.router_bias", expected(name + "mlp.gate.e_score_correction_bias"))
        same("mlp.shared.gate_up.kernel", gate_up(expected, name + "mlp.shared_experts."))
        mlp = ("stacks", stack, "layers", place, "mlp")
        for e in (0, 1, 128, 255):
            up_gate, down = (expert(leaves, (*mlp, half), repeat, e) for half in ("gate_up", "down"))
            own_name = f"{name}mlp.experts.{e}."
            close(up_gate, gate_up(expected, own_name), own_name)
            close(down, expected(own_name + "down_proj.weight").T, own_name)


def gate_up(expected, prefix):
    """[in, 2, out], the gate first."""
    return np.stack([expected(f"{prefix}{half}_proj.weight").T for half in ("gate", "up")], axis=1)


def expert(leaves, path, repeat, e):
    """One expert's kernel [in, ...] in float64, decoded by hand where it is packed."""
    if path in leaves:
        return as_float(leaves[path])[repeat, e]
    codes = np.asarray(leaves[*path, "codes"])[repeat, e]
    scales = as_float(leaves[*path, "scales"])[repeat, e]
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.stack([codes & 15, codes >> 4], axis=1).reshape(-1, *codes.shape[1:])
    values = magnitudes[values & 7] * np.where(values & 8, -1.0, 1.0)
    return values * np.repeat(scales, 16, axis=0) * as_float(leaves[*path, "global_scale"])[repeat, e]


def close(found, wanted, what):
    assert found.shape == wanted.shape and np.abs(wanted).max() > 0, what
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=0, err_msg=what)
