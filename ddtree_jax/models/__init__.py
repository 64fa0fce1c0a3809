"""GLM-5 target and DFlash drafter in Flax NNX, and their loaders."""

from ddtree_jax.models.cache import Cache, write_rows
from ddtree_jax.models.config import ConvConfig, DFlashConfig, Glm5Config, SelectorConfig
from ddtree_jax.models.dflash2 import PairProposal
from ddtree_jax.models.pair import (
    Drafter,
    Target,
    draft_logits,
    draft_pairs,
    load_drafter,
    load_target,
    make_drafter,
    make_target,
    save_drafter,
    save_target,
    target_features,
    target_logits,
)

__all__ = [
    "Cache",
    "ConvConfig",
    "DFlashConfig",
    "Drafter",
    "Glm5Config",
    "PairProposal",
    "SelectorConfig",
    "Target",
    "draft_logits",
    "draft_pairs",
    "load_drafter",
    "load_target",
    "make_drafter",
    "make_target",
    "save_drafter",
    "save_target",
    "target_features",
    "target_logits",
    "write_rows",
]
