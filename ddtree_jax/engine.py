"""An engine: a target, its drafter and its tokenizer, loaded and checked against each other."""

from __future__ import annotations

import dataclasses
import importlib.resources
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddtree_jax.capacity import CHECKED_CONTEXT, estimate
from ddtree_jax.errors import CheckpointError
from ddtree_jax.models.folders import open_drafter, open_target
from ddtree_jax.models.pair import Drafter, Target
from ddtree_jax.tokenizer import Tokenizer

DEMO = "demo"
Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
    """What `generate` runs on. Immutable but for `compiled`, which remembers what has been announced as compiling.

    `drafter` is None for an engine that serves plain autoregressive decoding only; `tokenizer` is None for a target
    folder without tokenizer.json, which then takes and gives token ids alone.
    """

    target: Target
    drafter: Drafter | None = None
    tokenizer: Tokenizer | None = None
    name: str = "unnamed"
    compiled: set = dataclasses.field(default_factory=set, repr=False)

    @property
    def max_positions(self) -> int:
        """Tokens that a sequence may have, prompt and output together."""
        return self.target.config.max_position_embeddings

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The model's own end tokens (generation_config.json, else config.json)."""
        return self.target.config.eos_token_ids


def demo_folder() -> Path:
    """Folder of the pair that ships with the package: target/, drafter/, heldout.json."""
    return Path(str(importlib.resources.files("ddtree_jax") / DEMO))


def pair_names(target: str | Path, drafter: str | Path | None) -> tuple[str | Path, str | Path | None]:
    """Arguments of `load` with "demo" replaced by its folders; ValueError for what no folder can be called."""
    for name, value in (("target", target), ("drafter", drafter)):
        if not isinstance(value, (str, Path)) and not (name == "drafter" and value is None):
            raise ValueError(f"{name}: got {value!r}, allowed is the path of a folder")
        if isinstance(value, str) and not value:
            raise ValueError(f"{name}: got an empty string, allowed is the path of a folder")
    if target == DEMO:
        target = demo_folder() / "target"
        drafter = demo_folder() / "drafter" if drafter is None else drafter
    return target, drafter


def load(
    target: str | Path = DEMO,
    drafter: str | Path | None = None,
    *,
    dtype: Any = "auto",
    mesh: Any = None,
    progress: Progress | None = None,
) -> Engine:
    """Loads a pair of model folders: HF-format ones, or what `ddtree-jax convert` wrote.

    Args:
      target: a GLM-5 folder, the id `owner/name` of a repository on the Hugging Face hub, or "demo" for the pair that
        ships with the package.
      drafter: a DFlash folder or repository id; None serves the algorithm `none` only.
      dtype: "auto" (float32 on CPU, bfloat16 on GPU; what a converted target holds), "float32" or "bfloat16".
      mesh: None for one device, or a mesh from `ddtree_jax.make_mesh`: experts, heads and widths are split over it.
      progress: called with one line of text now and then while weights load.

    Raises:
      CheckpointError: a folder, file, tensor or pairing that does not fit; nothing half-loaded remains.
      ValueError: a bad argument.
    """
    name = str(target)
    target, drafter = pair_names(target, drafter)
    # Both folders are checked against each other before any weights are read.
    opened = open_target(target, dtype=dtype, mesh=mesh)
    tokenizer = Tokenizer.from_folder(opened.folder)
    size = opened.config.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > size:
        raise CheckpointError(
            f"{opened.folder}/tokenizer.json: {tokenizer.vocab_size} tokens, the model has vocab_size {size}"
        )
    opened_drafter = None
    if drafter is not None:
        opened_drafter = open_drafter(drafter, opened.config, dtype=dtype, mesh=mesh, auto_dtype=opened.dtype)
        _check_mask_token(opened_drafter.folder, opened_drafter.config.mask_token_id, tokenizer)
    context = min(CHECKED_CONTEXT, opened.config.max_position_embeddings)
    capacity = estimate(opened, opened_drafter, context=context)
    capacity.require(name)
    for line in capacity.table().splitlines() if progress is not None else ():
        progress(line)
    return Engine(
        target=opened.read(progress),
        drafter=None if opened_drafter is None else opened_drafter.read(progress),
        tokenizer=tokenizer,
        name=name,
    )


def _check_mask_token(folder: Path, mask: int, tokenizer: Tokenizer | None) -> None:
    """The mask id must be a special token or a reserved row: an ordinary token there means another vocabulary."""
    if tokenizer is not None and mask < tokenizer.vocab_size and not tokenizer.is_special(mask):
        raise CheckpointError(
            f"{folder}/config.json: mask_token_id {mask} is the ordinary token {tokenizer.token_text(mask)!r} of the "
            "target's tokenizer; expected a special token or a reserved row: made for another target"
        )
