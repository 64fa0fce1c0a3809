"""Input that no honest caller gives: one named error, no other exception, no hang and no memory blow-up."""

import copy
import json
import os
import struct

import jax.numpy as jnp
import numpy as np
import pytest

import ddtree_jax
from ddtree_jax import CheckpointError
from ddtree_jax.bench import BenchSettings
from ddtree_jax.checkpoint import save_leaves
from ddtree_jax.models import draft_logits, target_features, target_logits
from ddtree_jax.models.config import DFlashConfig, Glm5Config
from ddtree_jax.models.folders import read_target_config
from ddtree_jax.models.pair import resolve_dtype
from ddtree_jax.models.params import Part, TensorSpec
from ddtree_jax.safetensors_files import CheckpointReader, map_tensor, read_header, read_json
from ddtree_jax.tokenizer import Tokenizer
from tests.engine.conftest import DRAFTER, DRAFTER2, TARGET

NONSENSE = (
    *(None, True, -1, 0, 3.5, float("nan"), float("inf"), "x", "\ud800", [], {}, [[]], [{"a": []}], {"a": 1}),
    *(10**9, 10**12, 10**400, [10**400]),
)


@pytest.mark.parametrize("config", [TARGET, DRAFTER, DRAFTER2], ids=["target", "drafter", "dflash2"])
def test_a_config_with_any_value_anywhere_is_read_or_refused(config):
    good = config.to_hf()
    nested = [key for key, value in good.items() if isinstance(value, dict)]
    places = [(key,) for key in good] + [(outer, key) for outer in nested for key in good[outer]]
    for place in places:
        for value in NONSENSE:
            values = copy.deepcopy(good)
            at = values
            for key in place[:-1]:
                at = at[key]
            at[place[-1]] = value
            try:
                hash(type(config).from_hf(values))
            except CheckpointError:
                pass


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_routed_experts"])
def test_a_huge_count_is_refused_before_a_list_is_made_of_it(key):
    values = TARGET.to_hf() | {key: 10**9}
    for explicit in ("indexer_types", "mlp_layer_types"):
        values.pop(explicit)
    with pytest.raises(CheckpointError, match=key):
        Glm5Config.from_hf(values)


def test_a_huge_drafter_is_refused_before_a_list_is_made_of_it():
    values = DRAFTER.to_hf() | {"num_hidden_layers": 10**9, "layer_types": None}
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        DFlashConfig.from_hf(values)


def test_a_text_is_no_truth_value():
    with pytest.raises(CheckpointError, match="norm_topk_prob"):
        Glm5Config.from_hf(TARGET.to_hf() | {"norm_topk_prob": "false"})


def test_generation_config_that_is_no_object(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TARGET.to_hf()))
    (tmp_path / "generation_config.json").write_text("[5]")
    with pytest.raises(CheckpointError, match="expected an object"):
        read_target_config(tmp_path)


@pytest.mark.parametrize("text", ["9" * 6000, "[" * 200_000, '{"a": ' + "9" * 6000 + "}"])
def test_json_that_python_refuses(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_json(path)


@pytest.mark.parametrize("read", [read_json, read_header, lambda path: Tokenizer.from_folder(path.parent)])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_no_pipe_or_device_is_read(tmp_path, read, kind):
    path = tmp_path / "tokenizer.json"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read(path)


def write_header(path, header: bytes, data: bytes = b""):
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ('{"a":{"dtype":[],"shape":[1],"data_offsets":[0,4]}}', "unknown dtype"),
        ('{"a":{"dtype":{},"shape":[1],"data_offsets":[0,4]}}', "unknown dtype"),
        ('{"a":%s,"a":%s}' % (('{"dtype":"F32","shape":[1],"data_offsets":[0,4]}',) * 2), "twice"),
        (
            '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            "overlaps",
        ),
        ('{"a":%s}' % ("9" * 6000), "header is not JSON"),
        ("[" * 200_000, "header is not JSON"),
    ],
)
def test_damaged_headers(tmp_path, header, message):
    with pytest.raises(CheckpointError, match=message):
        read_header(write_header(tmp_path / "model.safetensors", header.encode(), bytes(8)))


@pytest.mark.parametrize("shard", ["a\0.safetensors", "\ud800.safetensors", "x" * 300 + ".safetensors", "../model"])
def test_an_index_that_names_no_possible_file(tmp_path, shard):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError):
        CheckpointReader(tmp_path)


def test_bit_flips_in_a_header_are_refused_or_harmless(tmp_path):
    spec = TensorSpec("weight", (2, 3), (Part(("w",), (), lambda tensor: tensor),))
    (file,) = save_leaves(tmp_path, [spec], {("w",): np.zeros((2, 3), np.float32)}, dtype=np.float32)
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    for at in range(8 + length):
        for bit in range(8):
            damaged = bytearray(raw)
            damaged[at] ^= 1 << bit
            file.write_bytes(damaged)
            try:
                read_header(file)
            except CheckpointError:
                pass


def test_a_small_save_over_a_sharded_one_is_what_loads(tmp_path, monkeypatch):
    specs = [TensorSpec(name, (2,), (Part((name,), (), lambda tensor: tensor),)) for name in "ab"]
    with monkeypatch.context() as patch:
        patch.setattr("ddtree_jax.checkpoint.MAX_SHARD_BYTES", 8)
        assert len(save_leaves(tmp_path, specs, dict.fromkeys([("a",), ("b",)], np.zeros(2)), dtype=np.float32)) == 3
    save_leaves(tmp_path, specs, dict.fromkeys([("a",), ("b",)], np.ones(2)), dtype=np.float32)
    assert map_tensor(CheckpointReader(tmp_path).entries["a"]).tolist() == [1, 1]


@pytest.mark.parametrize("name", ["a" * 5000, "a/" * 5000, "\0", "/dev/null"])
@pytest.mark.parametrize("which", ["target", "drafter"])
def test_a_path_that_can_be_no_folder(name, which):
    demo = ddtree_jax.engine.demo_folder()
    paths = {"target": demo / "target", "drafter": demo / "drafter"} | {which: name}
    with pytest.raises(CheckpointError):
        ddtree_jax.load(**paths)


@pytest.mark.parametrize("dtype", ["\ud800", "(", "[(1", "f4,f4", None, 5, [], {}])
def test_dtype_nonsense(dtype):
    with pytest.raises(ValueError, match="dtype: got"):
        resolve_dtype(dtype)


@pytest.mark.parametrize("model", ["WordLevel", "BPE"])
def test_a_tokenizer_without_its_unknown_token(tmp_path, model):
    content = {"type": model, "vocab": {"a": 0}, "unk_token": "[UNK]"} | ({"merges": []} if model == "BPE" else {})
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": content, "added_tokens": []}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    with pytest.raises(ValueError, match="prompt: .*cannot encode"):
        tokenizer.encode("zz")


@pytest.mark.parametrize("engine", [None, "demo", 5])
@pytest.mark.parametrize("function", [ddtree_jax.generate, ddtree_jax.stream])
def test_what_is_no_engine(function, engine):
    with pytest.raises(ValueError, match="engine: got"):
        function(engine, [1])


def test_an_integer_beyond_any_float(small_engine):
    for name in ("temperature", "top_p", "min_p"):
        with pytest.raises(ValueError, match=f"{name}: got"):
            ddtree_jax.generate(small_engine, [1], **{name: 10**400})


@pytest.mark.parametrize(
    "ids",
    [[[]], [1], [[1, 2], [3]], [[2**40]], np.array([[2**32 + 1]]), [[2**64]], [[1.0]], [["a"]], None, [[61]], [[True]]],
)
def test_token_ids_of_the_model_functions(small_engine, ids):
    with pytest.raises(ValueError, match="token_ids: got"):
        target_logits(small_engine.target, ids)


@pytest.mark.parametrize("layers", [None, 5, ["a"], [1.5], [3], [-1], [0, 0]])
def test_layer_ids_of_target_features(small_engine, layers):
    with pytest.raises(ValueError, match="layer_ids: got"):
        target_features(small_engine.target, [[1]], layers)


def test_a_drafter_of_another_target(small_engine):
    demo = ddtree_jax.load("demo")
    with pytest.raises(CheckpointError, match="another target"):
        draft_logits(demo.drafter, small_engine.target, [[1, 2]])


@pytest.mark.parametrize(("name", "values"), [("budget", {"budgets": (5000,)}), ("batch", {"batch": 10**6})])
def test_bench_settings_are_refused_before_any_row_runs(name, values):
    with pytest.raises(ValueError, match=f"{name}: got"):
        BenchSettings(**values)


def test_streams_interleave_and_may_be_left(small_engine):
    prompts = ([3, 1, 4], [1, 2])
    whole = [ddtree_jax.generate(small_engine, prompt, 12, budget=5).token_ids for prompt in prompts]
    left = ddtree_jax.stream(small_engine, prompts[0], 12, budget=5)
    next(left)
    streams = [ddtree_jax.stream(small_engine, prompt, 12, budget=5) for prompt in prompts]
    got: list[list[int]] = [[], []]
    for _ in range(12):
        for stream, ids in zip(streams, got, strict=True):
            ids += getattr(next(stream, None), "token_ids", [])
    left.close()
    assert got == whole


def test_all_equal_and_empty_drafts_make_a_tree():
    build = ddtree_jax.tree.build_tree
    root = jnp.array([7])
    for value, nodes in ((0.0, 6), (np.nan, 1), (-np.inf, 1), (np.inf, 1)):
        tree = build(jnp.full((1, 3, 9), value, jnp.float32), root, budget=5)
        assert tree.num_nodes.tolist() == [nodes] and not np.isnan(tree.log_probs).any()
