"""Folders on disk: round trip, and every way a folder can be wrong gives one CheckpointError that names the place."""

import dataclasses
import json
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ddtree_jax
from ddtree_jax import loading
from ddtree_jax.encodings import Stored
from ddtree_jax.models import load_drafter, load_target, make_drafter, make_mesh, make_target, save_drafter, save_target
from ddtree_jax.models.folders import open_target
from ddtree_jax.models.pair import flat_leaves
from ddtree_jax.safetensors_files import read_header
from tests.engine.conftest import DRAFTER, TARGET


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target = make_target(TARGET, dtype="float32")
    save_target(target, root / "target", dtype=jnp.float32)
    save_drafter(make_drafter(DRAFTER, target), target, root / "drafter", dtype=jnp.float32)
    return root


@pytest.fixture
def copy(folders, tmp_path):
    shutil.copytree(folders, tmp_path / "pair")
    return tmp_path / "pair"


def edit(path, **changes):
    content = json.loads(path.read_text())
    for key, value in changes.items():
        if value is KeyError:
            content.pop(key, None)
        else:
            content[key] = value
    path.write_text(json.dumps(content))


def rewrite(path, change):
    """Applies `change(header dict, data bytes) -> (header, data)` to a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = change(json.loads(raw[8 : 8 + length]), raw[8 + length :])
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def load_pair(root):
    return ddtree_jax.load(root / "target", root / "drafter")


def test_round_trip_is_exact(folders):
    engine = load_pair(folders)
    assert engine.target.config == TARGET and engine.drafter.config == DRAFTER
    original = flat_leaves(make_target(TARGET, dtype="float32").params)
    for path, leaf in flat_leaves(engine.target.params).items():
        np.testing.assert_array_equal(leaf, original[path])
    assert engine.tokenizer is None


def test_sharded_save_and_unrolled_load_agree(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("ddtree_jax.checkpoint.MAX_SHARD_BYTES", 20_000)
    target = load_target(folders / "target", scan=False)
    save_target(target, tmp_path, dtype=jnp.float32)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3 and not list(tmp_path.glob("*.partial"))
    again = load_target(tmp_path)
    reference = flat_leaves(load_target(folders / "target").params)
    for path, leaf in flat_leaves(again.params).items():
        np.testing.assert_array_equal(leaf, reference[path])


def test_bfloat16_save_keeps_the_router_in_float32(folders, tmp_path):
    save_target(load_target(folders / "target"), tmp_path)
    dtypes = {name: entry.dtype for name, entry in read_header(tmp_path / "model.safetensors").items()}
    wide = {name for name, dtype in dtypes.items() if dtype == "F32"}
    assert wide == {n for n in dtypes if n.endswith(("mlp.gate.weight", "e_score_correction_bias"))} and wide


def test_a_checkpoint_that_ends_in_the_mtp_layer_loads(copy):
    """Tensors of layer `num_hidden_layers` (the MTP layer of published checkpoints) are left out."""

    def add(header, data):
        name = "model.layers.3.eh_proj.weight"
        header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [len(data), len(data) + 4]}
        return header, data + b"\0\0\0\0"

    rewrite(copy / "target" / "model.safetensors", add)
    assert load_target(copy / "target").config == TARGET


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_a_config_with_too_few_layers_is_refused(copy, part):
    """It would load the beginning of a network, and the rest would look like an MTP layer."""
    layers = {"target": dict(indexer_types=["full"] * 2, mlp_layer_types=["dense", "sparse"]), "drafter": {}}[part]
    changes = {"num_hidden_layers": 2 if part == "target" else 1, "layer_types": KeyError, **layers}
    edit(copy / part / "config.json", **changes)
    with pytest.raises(ddtree_jax.CheckpointError, match=r"layers\.\d.*num_hidden_layers"):
        load_pair(copy)


def test_what_no_device_here_holds_is_not_read(folders, monkeypatch):
    """As on one of several hosts: of the experts only those are fetched that lie in a region of a device here."""
    opened = open_target(folders / "target", dtype="float32")
    path, leaf = next((p, leaf) for p, leaf in opened.leaves.items() if p[-2:] == ("mlp", "gate_up"))
    found = loading.sources(opened.specs(), opened.stored, opened.leaves)[path]
    regions = {tuple(slice(0, n) for n in (*leaf.shape[:3], 2, *leaf.shape[4:])): ["a device"]}  # experts 0 and 1
    placed, fetched = [], []
    sharding = NamedSharding(make_mesh(), PartitionSpec())
    monkeypatch.setattr(loading, "regions_of", lambda shape, sharding: regions)
    monkeypatch.setattr(loading, "put_piece", lambda buffers, *rest: placed.append(rest) or jnp.zeros(()))
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", lambda *rest: None)
    monkeypatch.setattr(Stored, "decoded", _remembering(fetched, Stored.decoded))
    with ThreadPoolExecutor(1) as pool:
        loading._Loader(loading.Meter(opened.stored.values()), pool).leaf(leaf.update(sharding=sharding), found)
    assert placed and {name.split(".")[5] for name in fetched} == {"0", "1"}


def _remembering(names, original):
    def decoded(self, dtype):
        names.append(self.name)
        return original(self, dtype)

    return decoded


def _drop_tensor(root):
    def change(header, data):
        del header["model.layers.1.mlp.experts.3.up_proj.weight"]
        return header, data

    rewrite(root / "target" / "model.safetensors", change)


def _wrong_shape(root):
    def change(header, data):
        entry = header["model.layers.0.self_attn.q_a_proj.weight"]
        entry["shape"] = entry["shape"][::-1]
        return header, data

    rewrite(root / "target" / "model.safetensors", change)


def _integer_weights(root):
    def change(header, data):
        header["model.norm.weight"]["dtype"] = "I32"
        return header, data

    rewrite(root / "target" / "model.safetensors", change)


def _not_finite(root):
    def change(header, data):
        start = header["model.norm.weight"]["data_offsets"][0]
        return header, data[:start] + struct.pack("<f", float("nan")) + data[start + 4 :]

    rewrite(root / "target" / "model.safetensors", change)


def _truncate(root):
    path = root / "target" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _cut_header(root):
    path = root / "target" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:50])


def _long_header(root):
    path = root / "target" / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + path.read_bytes()[8:])


def _empty_file(root):
    (root / "target" / "model.safetensors").write_bytes(b"")


def _shard_missing(root):
    names = read_header(root / "target" / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (root / "target" / "model.safetensors.index.json").write_text(json.dumps(index))


def _shard_outside(root):
    (root / "target" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "../other.safetensors"}})
    )


def _tensor_not_in_shard(root):
    names = read_header(root / "target" / "model.safetensors")
    index = {"weight_map": dict.fromkeys([*names, "extra"], "model.safetensors")}
    (root / "target" / "model.safetensors.index.json").write_text(json.dumps(index))


def _edit_target(**changes):
    return lambda root: edit(root / "target" / "config.json", **changes)


def _edit_drafter(**changes):
    return lambda root: edit(root / "drafter" / "config.json", **changes)


def _dflash(**changes):
    def damage(root):
        path = root / "drafter" / "config.json"
        nested = json.loads(path.read_text())["dflash_config"]
        for key, value in changes.items():
            nested[key] = value
            if value is KeyError:
                del nested[key]
        edit(path, dflash_config=nested)

    return damage


DAMAGES = {
    "no target folder": (lambda root: shutil.rmtree(root / "target"), "no such folder"),
    "no drafter folder": (lambda root: shutil.rmtree(root / "drafter"), "no such folder"),
    "no config": (lambda root: (root / "target" / "config.json").unlink(), "config.json"),
    "config is not JSON": (lambda root: (root / "target" / "config.json").write_text("{"), "config.json"),
    "config is a list": (lambda root: (root / "target" / "config.json").write_text("[]"), "config.json"),
    "no weights": (lambda root: (root / "target" / "model.safetensors").unlink(), "model.safetensors"),
    "another architecture": (_edit_target(model_type="llama", architectures=["Llama"]), "model_type"),
    "key missing": (_edit_target(kv_lora_rank=KeyError), "kv_lora_rank"),
    "value is no integer": (_edit_target(hidden_size="32"), "hidden_size"),
    "no rope theta": (_edit_target(rope_parameters={}), "rope_theta"),
    "value beyond a float": (_edit_target(rms_norm_eps=10**400), "rms_norm_eps"),
    "pad token is a list": (_edit_target(pad_token_id=[1]), "pad_token_id"),
    "architectures is a number": (_edit_target(architectures=5), "architectures"),
    "absurd number of layers": (_edit_target(num_hidden_layers=10**9, indexer_types=None), "num_hidden_layers"),
    "scaled rope": (_edit_target(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "rope_type"),
    "first layer shared": (_edit_target(indexer_types=["shared"] * 3), "indexer_types"),
    "indexer types too short": (_edit_target(indexer_types=["full"]), "indexer_types"),
    "tied embeddings": (_edit_target(tie_word_embeddings=True), "tie_word_embeddings"),
    "end token outside": (_edit_target(eos_token_id=61), "eos_token_id"),
    "too many experts a token": (_edit_target(num_experts_per_tok=5), "num_experts_per_tok"),
    "vocabulary of another size": (_edit_target(vocab_size=62), "model.embed_tokens.weight"),
    "tensor missing": (_drop_tensor, "experts.3.up_proj"),
    "wrong shape": (_wrong_shape, "q_a_proj"),
    "wrong dtype": (_integer_weights, "model.norm.weight"),
    "not finite": (_not_finite, "model.norm.weight"),
    "truncated file": (_truncate, "truncated"),
    "truncated header": (_cut_header, "truncated"),
    "header longer than the file": (_long_header, "truncated"),
    "empty file": (_empty_file, "truncated"),
    "shard missing": (_shard_missing, "model-00001-of-00002"),
    "shard outside the folder": (_shard_outside, "other.safetensors"),
    "tensor not in its shard": (_tensor_not_in_shard, "extra"),
    "bad generation config": (
        lambda root: (root / "target" / "generation_config.json").write_text('{"eos_token_id": [99]}'),
        "generation_config.json",
    ),
    "bad tokenizer": (lambda root: (root / "target" / "tokenizer.json").write_text("{}"), "tokenizer.json"),
    "drafter: another vocabulary": (_edit_drafter(vocab_size=64), "vocab_size"),
    "drafter: another width": (_edit_drafter(hidden_size=48), "hidden_size"),
    "drafter: another depth of target": (_edit_drafter(num_target_layers=78), "num_target_layers"),
    "drafter: tap beyond the target": (_dflash(target_layer_ids=[0, 34]), "target_layer_ids"),
    "drafter: another number of taps": (_dflash(target_layer_ids=[0]), "fc.weight"),
    "drafter: no taps": (_dflash(target_layer_ids=KeyError), "target_layer_ids"),
    "drafter: no mask id": (_dflash(mask_token_id=KeyError), "mask_token_id"),
    "drafter: mask id outside": (_dflash(mask_token_id=61), "mask_token_id"),
    "drafter: mask id is an end token": (_dflash(mask_token_id=5), "mask_token_id"),
    "drafter: block of one": (_dflash(block_size=1), "block_size"),
    "drafter: a target in its place": (
        lambda root: shutil.copy(root / "target" / "config.json", root / "drafter" / "config.json"),
        "architectures",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(copy, name):
    damage, expected = DAMAGES[name]
    damage(copy)
    with pytest.raises(ddtree_jax.CheckpointError, match=expected) as raised:
        load_pair(copy)
    assert str(copy) in str(raised.value)


def test_generation_config_overrides_end_tokens(copy):
    (copy / "target" / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert load_pair(copy).stop_token_ids == (7,)


def test_mask_id_that_is_an_ordinary_token_is_refused(copy):
    import tokenizers

    vocabulary = {chr(33 + i): i for i in range(61)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="!"))
    inner.save(str(copy / "target" / "tokenizer.json"))
    with pytest.raises(ddtree_jax.CheckpointError, match="mask_token_id 60"):
        load_pair(copy)
    inner.add_special_tokens([vocabulary_token for vocabulary_token, i in vocabulary.items() if i == 60])
    inner.save(str(copy / "target" / "tokenizer.json"))
    assert load_pair(copy).tokenizer is not None


def test_own_end_tokens_never_in_a_config_are_none(copy):
    edit(copy / "target" / "config.json", eos_token_id=None)
    (copy / "target" / "generation_config.json").unlink()
    assert load_pair(copy).stop_token_ids == ()


@pytest.mark.parametrize("bad", ["float8", "int8", 3, None])
def test_dtype_is_checked(folders, bad):
    with pytest.raises(ValueError, match="dtype"):
        load_target(folders / "target", dtype=bad)


def test_mesh_is_refused(folders):
    with pytest.raises(ValueError, match="mesh"):
        load_target(folders / "target", mesh=object())


def test_drafter_takes_the_targets_dtype(folders):
    target = load_target(folders / "target", dtype="bfloat16")
    assert load_drafter(folders / "drafter", target).module().fc.kernel.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_drafter_runs_in_its_own_dtype(folders, dtypes):
    target = load_target(folders / "target", dtype=dtypes[0])
    drafter = load_drafter(folders / "drafter", target, dtype=dtypes[1])
    logits = ddtree_jax.models.draft_logits(drafter, target, [[1, 2, 3]])
    assert logits.dtype == jnp.float32 and bool(jnp.isfinite(logits).all())


def test_feature_layers_are_checked(folders):
    target = load_target(folders / "target")
    for bad in ([3], [-1], [0, 0]):
        with pytest.raises(ValueError, match="layer_ids"):
            ddtree_jax.models.target_features(target, [[1, 2]], bad)


def test_configs_survive_the_trip(folders):
    for scale in (1.0, 2.5):
        config = dataclasses.replace(DRAFTER, output_multiplier=scale)
        assert type(config).from_hf(config.to_hf()) == config
    mixed = dataclasses.replace(DRAFTER, causal=(True, False), windows=(7, None))
    assert type(mixed).from_hf(mixed.to_hf()) == mixed
    with pytest.raises(ValueError, match="causal"):
        dataclasses.replace(mixed, causal=(False, True)).to_hf()


def test_a_wrong_drafter_is_refused_before_any_weights_are_read(copy, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were read before both folders were checked")

    monkeypatch.setattr("ddtree_jax.models.folders.load_leaves", refuse)
    edit(copy / "drafter" / "config.json", num_target_layers=78)
    with pytest.raises(ddtree_jax.CheckpointError, match="num_target_layers"):
        load_pair(copy)


def test_progress_names_both_folders(folders):
    lines = []
    ddtree_jax.load(folders / "target", folders / "drafter", progress=lines.append)
    text = "\n".join(lines)
    assert "loading target" in text and "loaded target" in text and "loaded drafter" in text
