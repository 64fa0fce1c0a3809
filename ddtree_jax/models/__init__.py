"""GLM-5 target and DFlash drafter in Flax NNX, and their loaders."""

from ddtree_jax.models.cache import Cache, write_rows
from ddtree_jax.models.config import DFlashConfig, Glm5Config
from ddtree_jax.models.folders import load_drafter, load_target, save_drafter, save_target
from ddtree_jax.models.pair import (
    Drafter,
    Target,
    draft_logits,
    make_drafter,
    make_target,
    target_features,
    target_logits,
)
from ddtree_jax.models.sharding import make_mesh

__all__ = [
    "Cache",
    "DFlashConfig",
    "Drafter",
    "Glm5Config",
    "Target",
    "draft_logits",
    "load_drafter",
    "load_target",
    "make_drafter",
    "make_mesh",
    "make_target",
    "save_drafter",
    "save_target",
    "target_features",
    "target_logits",
    "write_rows",
]
