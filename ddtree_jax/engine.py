"""An engine: a target, its drafter and its tokenizer, loaded and checked against each other."""

from __future__ import annotations

import dataclasses
import importlib.resources
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddtree_jax.capacity import CHECKED_CONTEXT, Capacity, estimate
from ddtree_jax.errors import CheckpointError
from ddtree_jax.hub import DEMO, DEMO_TARGETS
from ddtree_jax.models.folders import Opened, open_drafter, open_target
from ddtree_jax.models.kernels import with_kernels
from ddtree_jax.models.pair import Drafter, Target
from ddtree_jax.pallas.choice import AUTO, KernelChoice, choose_kernels
from ddtree_jax.tokenizer import Tokenizer

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
    """What `generate` runs on. Immutable but for what has been said once: `compiled`, the programs that have been
    announced as compiling, and `warned`.

    `drafter` is None for an engine that serves plain autoregressive decoding only; `tokenizer` is None for a target
    folder without tokenizer.json, which then takes and gives token ids alone.

    Raises ValueError where `allow_hybrid_unsafe` would be ignored: on a target that no tree can spoil.
    """

    target: Target
    drafter: Drafter | None = None
    tokenizer: Tokenizer | None = None
    name: str = "unnamed"
    allow_hybrid_unsafe: bool = False
    compiled: set = dataclasses.field(default_factory=set, repr=False)
    warned: set = dataclasses.field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        allow = self.allow_hybrid_unsafe
        if not isinstance(allow, bool):
            raise ValueError(f"allow_hybrid_unsafe: got {allow!r}, allowed are True and False")
        if allow and not self.slot_order_layers:
            raise ValueError(
                f"allow_hybrid_unsafe: got True, but {self.name} has no recurrent layers that a branching tree could "
                "spoil; allowed is False"
            )

    @property
    def max_positions(self) -> int:
        """Tokens that a sequence may have, prompt and output together."""
        return self.target.config.max_position_embeddings

    @property
    def slot_order_layers(self) -> tuple[int, ...]:
        """Recurrent layers that run over a block in slot order, so that siblings of a tree would share one state."""
        layers = self.target.config.recurrent_layers
        return () if layers and self.target.tree_states else layers

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The model's own end tokens (generation_config.json, else config.json)."""
        return self.target.config.eos_token_ids


def demo_folder() -> Path:
    """Folder of the pair that ships with the package: target/, target-nvfp4/, drafter/, heldout.json."""
    return Path(str(importlib.resources.files("ddtree_jax") / DEMO))


def pair_names(target: str | Path, drafter: str | Path | None) -> tuple[str | Path, str | Path | None]:
    """Arguments of `load` with the names of shipped targets replaced by folders; ValueError for what is no name."""
    for name, value in (("target", target), ("drafter", drafter)):
        if not isinstance(value, (str, Path)) and not (name == "drafter" and value is None):
            raise ValueError(f"{name}: got {value!r}, allowed is the path of a folder")
        if isinstance(value, str) and not value:
            raise ValueError(f"{name}: got an empty string, allowed is the path of a folder")
    if target in DEMO_TARGETS:
        target = demo_folder() / DEMO_TARGETS[target]
        drafter = demo_folder() / "drafter" if drafter is None else drafter
    return target, drafter


def load(
    target: str | Path = DEMO,
    drafter: str | Path | None = None,
    *,
    dtype: Any = "auto",
    mesh: Any = None,
    kernels: str = AUTO,
    allow_hybrid_unsafe: bool = False,
    progress: Progress | None = None,
    check: Callable[[Engine], object] | None = None,
) -> Engine:
    """Loads a pair of model folders: HF-format ones, or what `ddtree-jax convert` wrote.

    Args:
      target: a GLM-5 folder; the id `owner/name` of a repository on the Hugging Face hub; "demo" for the pair that
        ships with the package, "demo-nvfp4" for the same pair with the target's routed experts as NVFP4.
      drafter: a DFlash folder or repository id; None serves the algorithm `none` only.
      dtype: "auto" (float32 on CPU, bfloat16 on GPU; what a converted target holds), "float32" or "bfloat16".
      mesh: None for one device, or a mesh from `ddtree_jax.make_mesh`: experts, heads and widths are split over it.
      kernels: "auto", the kernels of a GPU on which they have been run (Hopper; `ddtree-jax doctor` lists them); "all",
        also where they have only been compiled (Blackwell) or checked on CPUs (a mesh, where each device runs them on
        its own part); "reference", plain JAX. Greedy tokens in float32 are the same. What runs on kernels cannot be
        saved.
      allow_hybrid_unsafe: True admits branching trees on a target whose recurrent layers run in slot order: siblings
        then spoil each other's state, the output is no longer that of plain decoding, and the first such request
        warns (`errors.HybridStateWarning`). An error where nothing would read it: every target that this version
        loads is attention-only.
      progress: called with one line of text now and then while weights load.
      check: called with the engine as it will be, but without its weights, before they are read; what it raises, such
        as `requests.check_request` of a request, comes before the wait.

    Raises:
      CheckpointError: a folder, file, tensor or pairing that does not fit; nothing half-loaded remains.
      ValueError: a bad argument.
    """
    pair = open_pair(target, drafter, dtype=dtype, mesh=mesh, kernels=kernels, allow_hybrid_unsafe=allow_hybrid_unsafe)
    outline = pair.outline()
    if check is not None:
        check(outline)
    return pair.read(progress)


@dataclasses.dataclass(frozen=True)
class OpenedPair:
    """Folders that have been checked, also against each other, and whose weights have not been read."""

    target: Opened
    drafter: Opened | None
    tokenizer: Tokenizer | None
    name: str
    allow_hybrid_unsafe: bool = False
    kernels: KernelChoice = KernelChoice()
    warned: set = dataclasses.field(default_factory=set, repr=False)

    def outline(self) -> Engine:
        """An engine without weights, on which `requests.check_request` works as on the one that `read` returns."""
        return self._engine(self.target, self.drafter)

    def read(self, progress: Progress | None = None, *, capacity: Capacity | None = None) -> Engine:
        """The engine. Raises `CheckpointError` if the pair cannot fit into memory, before anything is allocated.

        capacity: what it will need with its caches; None: with those of one sequence of `CHECKED_CONTEXT` tokens.
        """
        if capacity is None:
            context = min(CHECKED_CONTEXT, self.target.config.max_position_embeddings)
            capacity = estimate(self.target, self.drafter, context=context, kernels=self.kernels.any)
        for line in capacity.table().splitlines() if progress is not None else ():
            progress(line)
        capacity.require(self.name)
        opened = (self.target, self.drafter)
        return self._engine(
            *(None if o is None else with_kernels(o.read(progress), self.kernels, free=True) for o in opened)
        )

    def _engine(self, target: Any, drafter: Any) -> Engine:
        # One `warned` for all: what was said about the outline is not said again about the engine.
        return Engine(target, drafter, self.tokenizer, self.name, self.allow_hybrid_unsafe, warned=self.warned)


def open_pair(
    target: str | Path = DEMO,
    drafter: str | Path | None = None,
    *,
    dtype: Any = "auto",
    mesh: Any = None,
    kernels: str = AUTO,
    allow_hybrid_unsafe: bool = False,
) -> OpenedPair:
    """Opens what `load` loads, with the same arguments and errors, from configs and headers alone."""
    name = str(target)
    choice = choose_kernels(kernels, split=mesh is not None)
    target, drafter = pair_names(target, drafter)
    opened = open_target(target, dtype=dtype, mesh=mesh)
    tokenizer = Tokenizer.from_folder(opened.folder)
    size = opened.config.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > size:
        raise CheckpointError(
            f"{opened.folder}/tokenizer.json: {tokenizer.vocab_size} tokens, the model has vocab_size {size}"
        )
    if drafter is None:
        return OpenedPair(opened, None, tokenizer, name, allow_hybrid_unsafe, choice)
    opened_drafter = open_drafter(drafter, opened.config, dtype=dtype, mesh=mesh, auto_dtype=opened.dtype)
    _check_mask_token(opened_drafter.folder, opened_drafter.config.mask_token_id, tokenizer)
    return OpenedPair(opened, opened_drafter, tokenizer, name, allow_hybrid_unsafe, choice)


def _check_mask_token(folder: Path, mask: int, tokenizer: Tokenizer | None) -> None:
    """The mask id must be a special token or a reserved row: an ordinary token there means another vocabulary."""
    if tokenizer is not None and mask < tokenizer.vocab_size and not tokenizer.is_special(mask):
        raise CheckpointError(
            f"{folder}/config.json: mask_token_id {mask} is the ordinary token {tokenizer.token_text(mask)!r} of the "
            "target's tokenizer; expected a special token or a reserved row: made for another target"
        )
