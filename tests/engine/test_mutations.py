"""Hundreds of damaged checkpoints: `CheckpointError` or exactly the right weights, and nothing else."""

import collections
import shutil
import tracemalloc

import numpy as np
import pytest

from ddtree_jax import CheckpointError
from ddtree_jax.encodings import find
from ddtree_jax.safetensors_files import CheckpointReader
from tests.engine.checkpoint_files import KINDS, write_checkpoint
from tests.engine.mutations import FILES, HEADERS, INDICES, VALUES, mutate

CASES = 900
SHAPES = {f"model.layers.{i}.mlp.up_proj.weight": (20, 32) for i in range(len(KINDS))}
SHAPES |= {"model.layers.0.self_attn.o_proj.weight": (32, 32), "model.layers.1.self_attn.o_proj.weight": (136, 144)}
SHAPES |= {"model.norm.weight": (32,), "model.layers.0.mlp.gate.bias": (4,)}
KIND_OF = dict(zip(SHAPES, (*KINDS, "nvfp4", "fp8_block"), strict=False))
KIND_OF["model.layers.0.mlp.gate.bias"] = "float32"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder -> its weights: the same tensors in one file, and in three with an index."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
    extra = {
        "model.layers.0.self_attn.k_proj.k_scale": np.ones(1, np.float32),
        "model.layers.78.eh_proj.weight": np.zeros((3, 5), np.float16),
    }
    root = tmp_path_factory.mktemp("good")
    return {
        root / f"in{shards}": write_checkpoint(root / f"in{shards}", weights, KIND_OF, shards=shards, extra=extra)
        for shards in (1, 3)
    }


def read_all(folder):
    """All weights; every header is judged before any data is read."""
    reader = CheckpointReader(folder)
    found = [find(reader.entries, folder, name, shape) for name, shape in SHAPES.items()]
    return {stored.name: stored.decoded(np.float32) for stored in found}


def test_the_undamaged_folders_load(folders):
    for folder, weights in folders.items():
        for name, weight in read_all(folder).items():
            np.testing.assert_allclose(weight, weights[name].astype(np.float32), rtol=1.2e-7, atol=0)


@pytest.mark.parametrize("count", [CASES // 3, pytest.param(CASES, marks=pytest.mark.slow)])
def test_damage_is_refused_or_without_effect(folders, tmp_path, count):
    outcomes = collections.Counter()
    tried = set()
    for seed in range(count):
        source = list(folders)[seed % 2]
        folder = tmp_path / str(seed)
        shutil.copytree(source, folder)
        case = mutate(folder, folders[source], seed)
        tried.add(case.mutation)
        tracemalloc.start()
        try:
            got = read_all(folder)
        except CheckpointError as error:
            assert case.may_refuse, f"{case.what}: refused: {error}"
            assert str(folder) in str(error) and len(str(error)) < 12_000, case.what
            outcomes["refused"] += 1
        except BaseException as error:
            error.add_note(case.what)
            raise
        else:
            assert case.weights is not None, f"{case.what}: not refused"
            for name, weight in got.items():
                truth = case.weights[name].astype(np.float32)
                np.testing.assert_allclose(weight, truth, rtol=1.2e-7, atol=0, err_msg=f"{case.what}: {name}")
            outcomes["changed" if case.weights is not folders[source] else "unharmed"] += 1
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 4_000_000, f"{case.what}: {peak} bytes"
        shutil.rmtree(folder)
    assert tried == {mutation.__name__ for mutation in (*HEADERS, *FILES, *INDICES, *VALUES)}
    # Cases that are all refused, or none, would mean that the mutations have lost their teeth.
    assert outcomes["refused"] > count // 2 and min(outcomes["unharmed"], outcomes["changed"]) > count // 20, outcomes
