"""Lossless tree speculative decoding in JAX: a drafter proposes a token tree, one target pass verifies it.

Public names load on first use, so that `import ddtree_jax` by itself imports neither JAX nor Flax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree_jax import models, tree
    from ddtree_jax.algorithm import SpeculativeAlgorithm
    from ddtree_jax.debug import debug_checks
    from ddtree_jax.engine import load
    from ddtree_jax.errors import CheckpointError, InvariantError, UnsupportedRequestError
    from ddtree_jax.generation import generate, stream
    from ddtree_jax.grammar import Grammar
    from ddtree_jax.models.sharding import make_mesh
    from ddtree_jax.stats import Chunk, Result, Stats

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Chunk",
    "Grammar",
    "InvariantError",
    "Result",
    "SpeculativeAlgorithm",
    "Stats",
    "UnsupportedRequestError",
    "__version__",
    "debug_checks",
    "generate",
    "load",
    "make_mesh",
    "models",
    "stream",
    "tree",
]

# The module behind each lazy name. No module may be called like a function here: importing a submodule binds
# its name on the package, and `ddtree_jax.generate` would then be a module.
_MODULE_OF = {
    "CheckpointError": "errors",
    "Chunk": "stats",
    "Grammar": "grammar",
    "InvariantError": "errors",
    "Result": "stats",
    "SpeculativeAlgorithm": "algorithm",
    "Stats": "stats",
    "UnsupportedRequestError": "errors",
    "debug_checks": "debug",
    "generate": "generation",
    "load": "engine",
    "make_mesh": "models.sharding",
    "stream": "generation",
}
_SUBPACKAGES = ("models", "tree")


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"ddtree_jax.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ddtree_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ddtree_jax.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
