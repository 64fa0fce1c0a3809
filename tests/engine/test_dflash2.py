"""DFlash2 drafters in the engine: configs, folders that do not fit, and losslessness on a small random pair."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ddtree_jax
from ddtree_jax.engine import Engine
from ddtree_jax.models import (
    ConvConfig,
    DFlashConfig,
    SelectorConfig,
    make_drafter,
    make_target,
    save_drafter,
    save_target,
)
from ddtree_jax.models.params import drafter_tensors
from ddtree_jax.models.published import GLM_5_3_DFLASH2
from ddtree_jax.safetensors_files import read_header
from tests.engine.conftest import DRAFTER, DRAFTER2, TARGET, dflash2_noise

PROMPTS = [[7, 3, 11, 2, 40, 41, 8, 1, 17], [50, 3, 3, 21, 8, 9, 30], list(range(1, 45))]
NEW = 24

# The config of the other published drafter, of GLM-5.3-Flash.
GLM_5_3_FLASH = GLM_5_3_DFLASH2 | {
    "hidden_size": 4096,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "layer_types": ["sliding_attention"] * 5,
    "rope_parameters": {"rope_theta": 10000, "rope_type": "default"},
    "num_target_layers": 45,
    "dflash_config": GLM_5_3_DFLASH2["dflash_config"] | {"target_layer_ids": [5, 14, 24, 33, 42]},
}


@pytest.mark.parametrize("architecture", ["DFlashDraftModel", "DFlash2DraftModel"])
def test_published_configs(architecture):
    config = DFlashConfig.from_hf(GLM_5_3_DFLASH2 | {"architectures": [architecture]})
    assert config.conv == ConvConfig(kernel_size=2, group_size=16)
    assert config.selector == SelectorConfig(rank=256, top_k=16)
    assert (config.draft_depth, config.windows, config.causal) == (7, (2048,) * 6, (False,) * 6)
    assert DFlashConfig.from_hf(config.to_hf()) == config and hash(config)
    flash = DFlashConfig.from_hf(GLM_5_3_FLASH | {"architectures": [architecture]})
    assert flash.target_layer_ids == (5, 14, 24, 33, 42) and flash.rope_theta == 1e4
    assert DFlashConfig.from_hf(flash.to_hf()) == flash


def test_published_tensors():
    """96 and 81 tensors; the bytes of the larger are those of the published file without its header."""
    specs = {spec.name: spec.shape for spec in drafter_tensors(DFlashConfig.from_hf(GLM_5_3_DFLASH2), 6144)}
    assert len(specs) == 96
    assert sum(2 * int(np.prod(shape)) for shape in specs.values()) == 4_918_848_512
    assert specs["layers.5.attention_conv.base_kernel"] == (2, 2, 6144)
    assert specs["layers.0.mlp_conv.kernel_projection.weight"] == (1536, 6144)
    assert specs["candidate_selector.predecessor_codebook"] == (154880, 256)
    assert specs["candidate_selector.hidden_projection.weight"] == (256, 6144)
    assert len(list(drafter_tensors(DFlashConfig.from_hf(GLM_5_3_FLASH), 4096))) == 81


def test_keys_beside_the_nested_object():
    """`dflash_config` first, then the top level."""
    inner = dict(GLM_5_3_DFLASH2["dflash_config"])
    moved = {key: inner.pop(key) for key in ("conv_kernel_size", "conv_group_size", "selector_rank")}
    values = GLM_5_3_DFLASH2 | moved | {"dflash_config": inner, "selector_top_k": 99}
    assert DFlashConfig.from_hf(values) == DFlashConfig.from_hf(GLM_5_3_DFLASH2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"conv_kernel_size": None}, "conv_kernel_size"),
        ({"conv_group_size": None}, "conv_group_size"),
        ({"conv_group_size": 5}, "conv_group_size.*divisor of hidden_size 6144"),
        ({"conv_kernel_size": 9}, "conv_kernel_size.*at most block_size 8"),
        ({"conv_kernel_size": 0}, "conv_kernel_size"),
        ({"selector_rank": None}, "selector_rank"),
        ({"selector_rank": -1}, "selector_rank"),
        ({"selector_top_k": None}, "selector_top_k"),
        ({"selector_top_k": 154881}, "selector_top_k.*at most vocab_size 154880"),
        ({"selector_top_k": True}, "selector_top_k"),
        ({"conv_kernel_size": None, "conv_group_size": None}, "conv_kernel_size.*DFlash2DraftModel"),
        ({"selector_rank": None, "selector_top_k": None}, "selector_rank.*DFlash2DraftModel"),
    ],
)
def test_wrong_keys_are_named(changes, named):
    values = GLM_5_3_DFLASH2 | {"dflash_config": GLM_5_3_DFLASH2["dflash_config"] | changes}
    with pytest.raises(ddtree_jax.CheckpointError, match=named):
        DFlashConfig.from_hf(values)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    target = make_target(TARGET, dtype="float32")
    save_target(target, root / "target", dtype=jnp.float32)
    for name, config in (("first", DRAFTER), ("second", DRAFTER2)):
        save_drafter(make_drafter(config, target), target, root / name, dtype=jnp.float32)
    return root


@pytest.fixture
def folders(saved, tmp_path):
    """A target with a drafter of each version, to be changed."""
    return shutil.copytree(saved, tmp_path / "folders")


def set_config(root, name, config):
    (root / name / "config.json").write_text(json.dumps(config.to_hf()))


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        (dict(conv=None, selector=None), r"layers\.\d\.(attention|mlp)_conv|candidate_selector"),
        (dict(selector=None), "candidate_selector"),
        (dict(conv=None), r"layers\.\d\.(attention|mlp)_conv"),
    ],
    ids=["neither", "no selector", "no convolutions"],
)
def test_dflash2_weights_under_another_config(folders, kept, named):
    """They would run, and draft badly: file and tensor are named."""
    set_config(folders, "second", dataclasses.replace(DRAFTER2, **kept))
    with pytest.raises(ddtree_jax.CheckpointError, match=f"tensor '({named})") as raised:
        ddtree_jax.load(folders / "target", folders / "second")
    assert str(folders / "second" / "model.safetensors") in str(raised.value)


def test_a_dflash2_config_over_dflash_weights(folders):
    set_config(folders, "first", DRAFTER2)
    with pytest.raises(ddtree_jax.CheckpointError, match=r"tensor 'layers.0.attention_conv.base_kernel' is missing"):
        ddtree_jax.load(folders / "target", folders / "first")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(conv=ConvConfig(3, 4)), "base_kernel"),
        (dict(conv=ConvConfig(2, 8)), "kernel_projection"),
        (dict(selector=SelectorConfig(7, 5)), "predecessor_codebook"),
    ],
)
def test_dflash2_tensors_of_another_shape(folders, change, named):
    set_config(folders, "second", dataclasses.replace(DRAFTER2, **change))
    with pytest.raises(ddtree_jax.CheckpointError, match=f"{named}.*shape"):
        ddtree_jax.load(folders / "target", folders / "second")


def test_an_own_pair_on_disk_generates_the_same(folders, small_dflash2_engine):
    engine = small_dflash2_engine
    save_target(engine.target, folders / "target", dtype=jnp.float32)
    save_drafter(engine.drafter, engine.target, folders / "second", dtype=jnp.float32)
    names = set(read_header(folders / "second" / "model.safetensors"))
    assert {"candidate_selector.successor_codebook", "layers.1.mlp_conv.base_kernel"} <= names
    loaded = ddtree_jax.load(folders / "target", folders / "second", dtype="float32")
    results = [ddtree_jax.generate(e, PROMPTS[0], 8, "ddtree", 15, stop_token_ids=[]) for e in (engine, loaded)]
    assert results[0].token_ids == results[1].token_ids
    assert results[0].stats.acceptance_lengths == results[1].stats.acceptance_lengths


@pytest.fixture(scope="module")
def greedy(small_dflash2_engine):
    results = ddtree_jax.generate(small_dflash2_engine, PROMPTS, NEW, "none", stop_token_ids=[])
    return [r.token_ids for r in results]


@pytest.mark.parametrize(
    ("algorithm", "budget"),
    [
        ("dflash", 0),
        *(pytest.param("ddtree", budget, marks=pytest.mark.slow) for budget in (0, 1, 4)),
        ("ddtree", 15),
    ],
)
def test_greedy_equals_autoregressive(small_dflash2_engine, greedy, algorithm, budget):
    results = ddtree_jax.generate(small_dflash2_engine, PROMPTS, NEW, algorithm, budget, stop_token_ids=[])
    assert [r.token_ids for r in results] == greedy
    if budget == 15:  # a tree that never accepts anything would pass the rest of this test
        assert max(r.stats.mean_acceptance_length for r in results) > 1.0


@pytest.mark.parametrize(("algorithm", "budget"), [pytest.param("dflash", 0, marks=pytest.mark.slow), ("ddtree", 15)])
def test_a_prompt_alone_with_the_value_rules_checked(small_dflash2_engine, greedy, algorithm, budget):
    options = dict(stop_token_ids=[], debug=True)
    alone = ddtree_jax.generate(small_dflash2_engine, PROMPTS[0], NEW, algorithm, budget, **options)
    assert alone.token_ids == greedy[0]


def test_the_target_alone_decides_what_is_written(small_dflash2_engine, small_engine, greedy):
    """The same target under a DFlash v1 drafter."""
    results = ddtree_jax.generate(small_engine, PROMPTS, NEW, "none", stop_token_ids=[])
    assert [r.token_ids for r in results] == greedy


FILTERED = dict(top_k=12, top_p=0.9, min_p=0.01)


def sampled(engine, prompts, algorithm, seeds, budget=15, **settings):
    options = dict(seed=seeds, stop_token_ids=[], **settings)
    return [r.token_ids for r in ddtree_jax.generate(engine, prompts, NEW, algorithm, budget, 1.3, **options)]


def test_sampled_output_is_that_of_plain_decoding(small_dflash2_engine):
    run = functools.partial(sampled, small_dflash2_engine, **FILTERED)
    plain = run(PROMPTS, "none", [3, 4, 5])
    assert run(PROMPTS, "ddtree", [3, 4, 5]) == plain
    other = run(PROMPTS, "none", [6, 4, 5])
    assert [one == two for one, two in zip(other, plain, strict=True)] == [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, FILTERED], ids=["plain", "filtered"])
def test_sampled_output_is_the_same_for_every_algorithm_and_batch(small_dflash2_engine, settings):
    run = functools.partial(sampled, small_dflash2_engine, **settings)
    plain = run(PROMPTS, "none", [3, 4, 5])
    assert run(PROMPTS, "ddtree", [3, 4, 5]) == plain
    assert run(PROMPTS, "dflash", [3, 4, 5]) == plain
    assert run(PROMPTS[1:2], "ddtree", [4]) == plain[1:2]
    assert run(PROMPTS[:1] * 2, "none", [3, 6])[1] != plain[0]


def first_tree(engine, algorithm, budget):
    options = dict(stop_token_ids=[], with_tree=True)
    chunks = list(ddtree_jax.stream(engine, PROMPTS[0], NEW, algorithm, budget, **options))
    tree = next(chunk.tree for chunk in chunks if chunk.tree is not None)
    row = jax.tree.map(lambda leaf: np.asarray(leaf)[tree.batch_index], tree.tree)
    return sum((chunk.token_ids for chunk in chunks), []), row


@pytest.mark.parametrize(("algorithm", "budget"), [pytest.param("dflash", 0, marks=pytest.mark.slow), ("ddtree", 8)])
def test_the_codebooks_drive_the_tree_and_not_the_output(small_dflash2_engine, greedy, algorithm, budget):
    target = small_dflash2_engine.target
    silent = dflash2_noise(make_drafter(DRAFTER2, target, seed=2), conv=0.3, pairs=0.0)
    silent = Engine(target, silent, None, "silent")
    tokens, tree = first_tree(small_dflash2_engine, algorithm, budget)
    silent_tokens, silent_tree = first_tree(silent, algorithm, budget)
    assert tokens == silent_tokens == greedy[0]
    assert tree.token_ids.tolist() != silent_tree.token_ids.tolist()


def test_the_first_round_is_the_tree_of_the_selectors_pairs(small_dflash2_engine, greedy):
    """`generate` against the public pieces: draft_pairs and the plain heap."""
    from ddtree_jax.models import draft_pairs
    from ddtree_jax.tree import reference

    engine, ids = small_dflash2_engine, PROMPTS[0] + greedy[0][:1]
    pairs = draft_pairs(engine.drafter, engine.target, [ids])
    expected = reference.best_first_tree_from_pairs(pairs.log_probs[0], np.asarray(pairs.token_ids[0]), ids[-1], 8)
    _, tree = first_tree(engine, "ddtree", 8)
    assert tree.token_ids.tolist() == [node.token_id for node in expected]
    assert tree.parents.tolist() == [node.parent for node in expected]
    np.testing.assert_allclose(tree.log_probs, [node.log_prob for node in expected], atol=1e-4)


@pytest.mark.slow
def test_bfloat16_runs(folders):
    target = make_target(TARGET, dtype="bfloat16")
    drafter = dflash2_noise(make_drafter(DRAFTER2, target), conv=0.3, pairs=1.0)
    result = ddtree_jax.generate(Engine(target, drafter, None, "bf16"), PROMPTS[0], 6, "ddtree", 7, stop_token_ids=[])
    assert len(result.token_ids) == 6
