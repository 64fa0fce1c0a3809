"""Whole targets from checkpoints in every encoding: logits of the decoded weights, and packed where possible."""

import dataclasses
import re

import numpy as np
import pytest

from ddtree_jax.errors import CheckpointError
from ddtree_jax.models import load_target, save_target, target_logits
from ddtree_jax.models.pair import flat_leaves
from ddtree_jax.models.params import target_tensors
from ddtree_jax.safetensors_files import write_json, write_safetensors
from tests.engine import checkpoint_files
from tests.engine.conftest import TARGET

CONFIG = dataclasses.replace(
    TARGET,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=12,
    v_head_dim=16,
    n_routed_experts=6,
    index_head_dim=16,
    indexer_types=("full", "full", "shared", "full"),
    mlp_layer_types=("dense", "sparse", "sparse", "sparse"),
    eos_token_ids=(),
)
IDS = np.random.default_rng(0).integers(0, 61, (2, 20))
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def weights():
    """name -> float64 weight, of the scale that trained ones have."""
    return checkpoint_files.random_weights(CONFIG, seed=1)


def linear(name: str) -> bool:
    return name.endswith("proj.weight") or ".kv_a_proj" in name or ".wk." in name or ".wq_b." in name


def layer_of(name: str) -> int:
    return int(re.search(r"layers\.(\d+)\.", name)[1])


def everywhere(kind):
    return lambda name: kind if linear(name) or name == "lm_head.weight" else "float32"


def experts_only(name):
    return "nvfp4" if ".experts." in name else "bfloat16"


def experts_of_inner_layers(name):
    return "nvfp4" if ".experts." in name and layer_of(name) == 2 else "bfloat16"


def three_kinds(name):
    """Gate and up NVFP4, down FP8 by channel, attention FP8 in blocks, as community exports mix them."""
    if ".experts." in name:
        return "fp8_channel" if "down_proj" in name else "nvfp4_packed"
    return "fp8_block" if "self_attn" in name and linear(name) else "bfloat16"


def one_expert_differs(name):
    return "fp8_tensor" if "layers.2.mlp.experts.3.up_proj" in name else experts_only(name)


RULES = {
    **{kind: everywhere(kind) for kind in checkpoint_files.KINDS},
    **{"experts": experts_only, "inner layers": experts_of_inner_layers, "three kinds": three_kinds},
    "one expert differs": one_expert_differs,
}


def write_folder(folder, config, tensors):
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", {n: np.ascontiguousarray(t) for n, t in tensors.items()})
    write_json(folder / "config.json", config.to_hf())
    return folder


def encoded(weights, rule):
    return {k: t for name, w in weights.items() for k, t in checkpoint_files.encode(name, w, rule(name)).items()}


def decoded_folder(folder, tensors, weights):
    """The same weights, decoded in float64 and stored as float32."""
    plain = {name: checkpoint_files.decode(tensors, name).astype(np.float32) for name in weights}
    return write_folder(folder, CONFIG, plain)


def packed_leaves(target):
    return {".".join(map(str, path[:-1])) for path in flat_leaves(target.params) if path[-1] == "codes"}


BY_EXPERT = ("bfloat16", "nvfp4", "nvfp4_packed", "experts", "three kinds")


@pytest.mark.parametrize(
    ("rule", "layout"), [(rule, "wide") for rule in RULES] + [(rule, "by expert") for rule in BY_EXPERT]
)
def test_logits_equal_those_of_the_decoded_weights(weights, tmp_path, many_experts, rule, layout):
    if layout == "by expert":
        many_experts()
    tensors = encoded(weights, RULES[rule])
    target = load_target(write_folder(tmp_path / "encoded", CONFIG, tensors), dtype="float32")
    reference = load_target(decoded_folder(tmp_path / "plain", tensors, weights), dtype="float32")
    found, expected = target_logits(target, IDS), target_logits(reference, IDS)
    assert float(np.abs(np.asarray(expected)).max()) > 0.5
    assert float(np.abs(np.asarray(found) - np.asarray(expected)).max()) <= TOLERANCE
    packed = packed_leaves(target)
    if RULES[rule]("model.layers.2.mlp.experts.0.gate_proj.weight").startswith("nvfp4"):
        assert any(leaf.endswith("mlp.gate_up") for leaf in packed)
    else:
        assert not packed


def test_what_is_nvfp4_everywhere_stays_packed_everywhere(weights, tmp_path):
    """All kernels but kv_b, which the absorbed form splits by head, take 4.5 bits a weight and their global scales."""
    folder = write_folder(tmp_path / "encoded", CONFIG, encoded(weights, everywhere("nvfp4")))
    target = load_target(folder, dtype="float32")
    leaves = flat_leaves(target.params)
    names = {leaf.removesuffix(".kernel").split(".")[-1] for leaf in packed_leaves(target)}
    assert names == {"q_a", "q_b", "kv_a", "o", "wq_b", "wk", "weights_proj", "gate_up", "down", "head"}
    for path, codes in leaves.items():
        if path[-1] == "codes":
            scales = leaves[*path[:-1], "scales"]
            assert (codes.nbytes + scales.nbytes) * 8 == 4.5 * 2 * codes.size and str(scales.dtype) == "float8_e4m3fn"


def test_one_plain_tensor_unpacks_its_kernel_alone(weights, tmp_path):
    folder = write_folder(tmp_path / "encoded", CONFIG, encoded(weights, one_expert_differs))
    target = load_target(folder, dtype="float32")
    module = target.module()
    kinds = {s.layer_index(p, r): k for s in module.plan for p, k in enumerate(s.pattern) for r in range(s.repeats)}
    both = ("mlp.down", "mlp.gate_up")
    assert [kinds[i].packed for i in range(4)] == [(), both, ("mlp.down",), both]


def test_a_packed_target_is_saved_as_it_is(weights, tmp_path):
    """ModelOpt names, the same bytes: codes and scales are not computed anew."""
    tensors = encoded(weights, experts_only)
    target = load_target(write_folder(tmp_path / "encoded", CONFIG, tensors), dtype="float32")
    save_target(target, tmp_path / "again", dtype="bfloat16")
    again = load_target(tmp_path / "again", dtype="float32")
    for path, leaf in flat_leaves(target.params).items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(flat_leaves(again.params)[path]), err_msg=str(path))


def test_group_width_is_checked(tmp_path):
    narrow = dataclasses.replace(CONFIG, moe_intermediate_size=24)
    tensors = {spec.name: np.zeros(spec.shape, np.float32) for spec in target_tensors(narrow)}
    down = "model.layers.1.mlp.experts.0.down_proj"
    tensors[f"{down}.weight"] = np.zeros((64, 12), np.uint8)
    with pytest.raises(CheckpointError, match="multiple of 16"):
        load_target(write_folder(tmp_path / "narrow", narrow, tensors), dtype="float32")
