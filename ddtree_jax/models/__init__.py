"""GLM-5 target and DFlash drafter in Flax NNX, and their loaders.

Names load on first use: modules outside this package import single modules of it and are imported by others.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree_jax.models.cache import Cache, write_rows, write_states
    from ddtree_jax.models.config import ConvConfig, DFlashConfig, Glm5Config, SelectorConfig
    from ddtree_jax.models.dflash2 import PairProposal
    from ddtree_jax.models.folders import load_drafter, load_target, save_drafter, save_target
    from ddtree_jax.models.pair import (
        Drafter,
        Target,
        draft_logits,
        draft_pairs,
        make_drafter,
        make_target,
        target_features,
        target_logits,
    )
    from ddtree_jax.models.sharding import make_mesh

_MODULE_OF = {
    **dict.fromkeys(("Cache", "write_rows", "write_states"), "cache"),
    **dict.fromkeys(("ConvConfig", "DFlashConfig", "Glm5Config", "SelectorConfig"), "config"),
    **dict.fromkeys(("load_drafter", "load_target", "save_drafter", "save_target"), "folders"),
    **dict.fromkeys(("Drafter", "Target", "make_drafter", "make_target"), "pair"),
    **dict.fromkeys(("draft_logits", "draft_pairs", "target_features", "target_logits"), "pair"),
    "PairProposal": "dflash2",
    "make_mesh": "sharding",
}
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
    "make_mesh",
    "make_target",
    "save_drafter",
    "save_target",
    "target_features",
    "target_logits",
    "write_rows",
    "write_states",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ddtree_jax.models' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ddtree_jax.models.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
