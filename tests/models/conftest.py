"""Puts this folder on the import path, for the reference code, and loads each golden model once."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import dflash_reference  # noqa: E402  (needs the path above)
import golden_models  # noqa: E402

from ddtree_jax import models  # noqa: E402
from ddtree_jax.models import folders, moe, params  # noqa: E402


@pytest.fixture(scope="session")
def load_golden():
    """load_golden(name) -> (target, arrays of golden.npz), loaded at most once a session."""
    loaded = {}

    def load(name):
        if name not in loaded:
            target = models.load_target(golden_models.path(name), dtype="float32")
            loaded[name] = target, golden_models.arrays(name)
        return loaded[name]

    return load


@pytest.fixture
def many_experts(monkeypatch):
    """Call it, and small models take the paths and layouts of those with many experts until the test ends."""

    def switch():
        for module in (moe, params, folders):
            monkeypatch.setattr(module, "DENSE_EXPERTS_LIMIT", 0)
        folders._abstract.cache_clear()  # it remembers shapes by config alone

    yield switch
    folders._abstract.cache_clear()


@pytest.fixture
def make_drafter(tmp_path):
    """make_drafter(target, seed=1, **config changes) -> (drafter, config, weights), by way of a folder."""

    def make(target, seed=1, **changes):
        config = dflash_reference.drafter_config(**changes)
        weights = dflash_reference.random_weights(config, seed)
        folder = tmp_path / f"drafter{len(list(tmp_path.iterdir()))}"
        dflash_reference.write_folder(folder, config, weights)
        return models.load_drafter(folder, target, dtype="float32"), config, weights

    return make
