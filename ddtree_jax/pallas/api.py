"""The kernel table: every operation, its implementations, and which GPU generation prefers which."""

from __future__ import annotations

from ddtree_jax.pallas.dispatch import Op

OPS: dict[str, Op] = {}
