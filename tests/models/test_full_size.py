"""Full-size GLM-5 and GLM-5.2 by their shapes: parameters, bytes and tensors to the last one. No array is made."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import abstract
from ddtree_jax.models import Glm5Config, published
from ddtree_jax.models.folders import describe_target
from ddtree_jax.models.params import mtp_tensors, target_tensors
from tests.models import checkpoint_names as names

SIZES = names.Sizes()
MODELS = {"GLM-5": tuple(range(names.LAYERS)), "GLM-5.2": names.FULL_5_2}
PARAMETERS = {"GLM-5": 743_911_218_432, "GLM-5.2": 743_377_019_904}  # 743.91 and 743.38 billion
TENSORS = {"GLM-5": 59_079, "GLM-5.2": 58_794}
NVFP4_BYTES = {"GLM-5": 465_863_664_128, "GLM-5.2": 464_795_267_072}  # 465.9 and 464.795 GB with the MTP layer
NVFP4_TENSORS = {"GLM-5": 232_670, "GLM-5.2": 232_385}
each_model = pytest.mark.parametrize("model", list(MODELS))


def config_of(model):
    return Glm5Config.from_hf(published.TARGETS[model])


def own_tensors(model):
    return list(names.main_tensors(SIZES, MODELS[model]))


@each_model
def test_config_is_read_as_published(model):
    config = config_of(model)
    assert tuple(i for i, kind in enumerate(config.indexer_types) if kind == "full") == MODELS[model]
    assert tuple(i for i, kind in enumerate(config.mlp_layer_types) if kind == "dense") == (0, 1, 2)
    assert Glm5Config.from_hf(config.to_hf()) == config
    without_lists = {k: v for k, v in published.TARGETS[model].items() if k not in ("indexer_types", "mlp_layer_types")}
    assert Glm5Config.from_hf(without_lists) == config  # the rules that the lists stand for give the same layers


@each_model
def test_name_map_is_the_published_table(model):
    found = {spec.name: spec.shape for spec in target_tensors(config_of(model))}
    expected = {tensor.name: tensor.shape for tensor in own_tensors(model)}
    assert len(expected) == len(own_tensors(model)) == TENSORS[model]
    assert found == expected


@each_model
def test_parameters_in_all(model):
    assert sum(tensor.elements for tensor in own_tensors(model)) == PARAMETERS[model]
    assert sum(math.prod(spec.shape) for spec in target_tensors(config_of(model))) == PARAMETERS[model]
    plain = describe_target(config_of(model))
    assert sum(leaf.size for leaf in plain.leaves.values()) == PARAMETERS[model]
    assert f"{PARAMETERS[model] / 1e9:.2f}" == {"GLM-5": "743.91", "GLM-5.2": "743.38"}[model]


@each_model
def test_mtp_layer(model):
    layer = list(names.mtp_layer(SIZES))
    found = list(mtp_tensors(config_of(model)))
    assert len(layer) == len(found) == 791
    assert dict(found) == {tensor.name: tensor.shape for tensor in layer}
    parameters = sum(math.prod(shape) for _, shape in found)
    assert f"{parameters / 1e9:.3f}" == "9.953" and f"{2 * parameters / 1e9:.3f}" == "19.906"
    total = {"GLM-5": "753.9", "GLM-5.2": "753.3"}[model]
    assert f"{(PARAMETERS[model] + parameters) / 1e9:.1f}" == total


@each_model
def test_nvfp4_checkpoint(model):
    """The size and the number of tensors that NVIDIA's GLM-5.2 export has; the same layout of GLM-5."""
    stored = [*names.nvidia_nvfp4(own_tensors(model)), *names.mtp_layer(SIZES)]
    assert len(stored) == NVFP4_TENSORS[model]
    assert sum(tensor.num_bytes for tensor in stored) == NVFP4_BYTES[model]
    if model == "GLM-5.2":
        assert f"{NVFP4_BYTES[model] / 1e9:.3f}" == "464.795"


@each_model
def test_packed_target_in_memory(model):
    """Bytes of the checkpoint without its MTP layer and activation scales, the router being float32 in memory."""
    config = config_of(model)
    packed = abstract.packed_experts(config)
    target = describe_target(config, packed=packed)
    in_memory = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in target.leaves.values())
    quantised = 75 * 256 * 3
    on_disk = NVFP4_BYTES[model] - sum(tensor.num_bytes for tensor in names.mtp_layer(SIZES))
    assert in_memory == on_disk - 4 * quantised + 75 * 256 * 6144 * (4 - 2)
    assert target.bytes_per_device() == in_memory  # one device
    codes = [leaf for path, leaf in target.leaves.items() if path[-1] == "codes"]
    assert sum(leaf.size for leaf in codes) * 2 == quantised * 2048 * 6144 and all(c.dtype == jnp.uint8 for c in codes)
