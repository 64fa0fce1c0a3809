"""Learning rates that follow the clock, the optimiser, and checkpoints of a parameter tree."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax


@dataclasses.dataclass
class Clock:
    """Time of one stage. It starts with the first `start()`, so that compilation does not eat the schedule.

    `now` is a parameter for tests.
    """

    seconds: float
    now: Callable[[], float] = time.monotonic
    started: float | None = None

    def start(self) -> None:
        """Start counting; later calls do nothing."""
        if self.started is None:
            self.started = self.now()

    @property
    def elapsed(self) -> float:
        """Seconds since `start`, 0 before."""
        return 0.0 if self.started is None else self.now() - self.started

    @property
    def fraction(self) -> float:
        """Share of the stage's time that has passed, between 0 and 1."""
        return min(1.0, self.elapsed / self.seconds)

    @property
    def done(self) -> bool:
        """Whether the time is up."""
        return self.elapsed >= self.seconds


def learning_rate(
    fraction: float, step: int, *, peak: float, warmup_steps: int, flat: float, floor: float = 0.02
) -> float:
    """Warm-up by steps, flat until `flat` of the time, then linear to `floor` of the peak at its end."""
    warm = min(1.0, (step + 1) / max(1, warmup_steps))
    decay = 1.0 if fraction <= flat else 1.0 - (1.0 - floor) * (fraction - flat) / (1.0 - flat)
    return peak * warm * decay


def path_name(path: tuple) -> str:
    """A key path as text: `layers/0/attention/kernel`; a wrapper's own `.value` is left out."""
    parts = []
    for key in path:
        for attribute in ("key", "idx", "name"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
    return "/".join(part for part in parts if part != "value")


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves of a pytree by path name."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def map_named(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` whose function gets the leaf's path name first."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(path_name(path), *leaves), tree, *rest)


def adamw(
    is_decayed: Callable[[str, jax.Array], bool], *, weight_decay: float, clip: float = 1.0
) -> optax.GradientTransformation:
    """AdamW (0.9, 0.95) with gradient clipping, without the learning rate: `apply` takes it each step."""
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(weight_decay, mask=lambda params: map_named(is_decayed, params)),
    )


def apply(
    optimiser: optax.GradientTransformation, params: Any, state: Any, gradients: Any, rate: jax.Array
) -> tuple[Any, Any]:
    """One optimiser step at the learning rate `rate`. Returns the new parameters and optimiser state."""
    updates, state = optimiser.update(gradients, state, params)
    return jax.tree.map(lambda p, u: p - rate * u, params, updates), state


def save_tree(path: Path, tree: Any) -> None:
    """Write a pytree's leaves to an .npz file by path name; bfloat16 leaves are stored as their bits."""
    arrays = {}
    for name, leaf in named_leaves(tree).items():
        array = np.asarray(leaf)
        arrays[f"bf16:{name}" if array.dtype == ml_dtypes.bfloat16 else name] = (
            array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
        )
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, **arrays)
    temporary.replace(path)


def load_tree(path: Path, like: Any) -> Any:
    """Read what `save_tree` wrote into the structure of `like`.

    Raises:
      ValueError: a leaf is missing or has another shape.
    """
    with np.load(path) as file:
        stored = {}
        for name in file.files:
            bits = name.startswith("bf16:")
            stored[name.removeprefix("bf16:")] = file[name].view(ml_dtypes.bfloat16) if bits else file[name]

    def read(name: str, leaf: Any) -> jax.Array:
        if name not in stored or stored[name].shape != leaf.shape:
            found = stored[name].shape if name in stored else "nothing"
            raise ValueError(f"{path.name}: {name} expected with shape {leaf.shape}, found {found}")
        return jnp.asarray(stored[name])

    return map_named(read, like)


class Log:
    """Lines of JSON in a file of the work folder, printed as they come."""

    def __init__(self, path: Path):
        self._path = path
        self._started = time.monotonic()

    def __call__(self, stage: str, **values: Any) -> None:
        """Record one line."""
        rounded = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}
        record = {"stage": stage, "at": round(time.monotonic() - self._started, 1), **rounded}
        line = json.dumps(record)
        with self._path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def records(self) -> list[dict]:
        """Every line so far, those of earlier runs in this work folder included."""
        return [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []
