"""Names in place of folders: of the shipped targets, and repository ids, whose models `huggingface_hub` finds or
downloads where it is installed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from pathlib import Path
from typing import Any

from ddtree_jax.errors import CheckpointError, one_line
from ddtree_jax.safetensors_files import INDEX_NAME, SINGLE_NAME

DEMO = "demo"
DEMO_TARGETS = {DEMO: "target", "demo-nvfp4": "target-nvfp4"}  # name -> folder beside the drafter that serves both

# One name before the slash and one after it, as the hub allows them; "./x", "../x" and "/x" are paths.
_PART = r"(?!.*(?:--|\.\.))[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}")
MAX_LENGTH = 96

WANTED = ["*.safetensors", "*.json", "*.jinja"]
UNWANTED = ["*/*"]  # subfolders hold the same weights for other programs
CONFIG = "config.json"


def is_repository_id(name: str | Path) -> bool:
    """Whether a name that is no folder can be meant as `owner/name` of the hub.

    False where the part before the slash is a folder here: then it is a path with a slip of the pen.
    """
    text = str(name)
    if len(text) > MAX_LENGTH or not _REPOSITORY.fullmatch(text):
        return False
    return not os.path.lexists(text.partition("/")[0])


def resolve(name: str | Path) -> Path:
    """The folder that a name stands for: a folder as it is, else a repository's snapshot in the hub's cache.

    A repository that the cache does not hold whole is downloaded, with the hub's own progress on stderr.

    Raises:
      CheckpointError: the repository is neither in the cache nor can it be downloaded; says what to do. A name that
        cannot be a repository's is returned as a path, for the caller to refuse.
    """
    path = Path(name)
    if _exists(path) or not is_repository_id(name):
        return path
    repository = str(name)
    by_hand = f"or download it by hand (`hf download {repository} --local-dir DIR`) and give that folder"
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{repository}: no such folder; to take it as a repository of the Hugging Face hub, install "
            f"huggingface_hub (pip install 'ddtree-jax[hub]'), {by_hand}"
        ) from None
    fetch = functools.partial(snapshot_download, repo_id=repository, allow_patterns=WANTED, ignore_patterns=UNWANTED)
    with contextlib.suppress(Exception):  # of many kinds; whatever it is, the cache does not serve
        cached = Path(fetch(local_files_only=True))
        if missing_file(cached) is None:
            return cached
    try:
        folder = Path(fetch())
    except Exception as error:  # of the hub, its HTTP library or the file system
        reason, advice = _explained(errors, error)
        raise CheckpointError(
            f"{repository}: no such folder, not whole in the cache of huggingface_hub, and it cannot be downloaded: "
            f"{reason}; {advice}, {by_hand}"
        ) from None
    missing = missing_file(folder)
    if missing is not None:
        # Where the hub cannot be reached, the package hands out what its cache has.
        raise CheckpointError(
            f"{repository}: no such folder, and its snapshot {folder} has no {missing}: the repository is no whole "
            "model, or the cache holds a part of it and the hub cannot be reached (offline, or HF_HUB_OFFLINE is set); "
            f"go online, {by_hand}"
        )
    return folder


def missing_file(folder: Path) -> str | None:
    """The first file without which a snapshot is only a part of a model; None if it is whole.

    A snapshot holds links: one whose file is gone counts as missing.
    """
    if not _exists(folder / CONFIG):
        return CONFIG
    if not os.path.lexists(folder / INDEX_NAME):
        return None if _exists(folder / SINGLE_NAME) else SINGLE_NAME
    try:
        shards = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))["weight_map"].values()
        return next((str(shard) for shard in shards if not _exists(folder / str(shard))), None)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return INDEX_NAME


def _explained(errors: Any, error: Exception) -> tuple[str, str]:
    """(what went wrong, what to do), each without a line break."""
    if isinstance(error, errors.GatedRepoError):  # before the next: it is one of those too
        return "access to it is restricted", "ask for access on its page and log in (`hf auth login`)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such repository, or it is private", "check its name, or log in (`hf auth login`)"
    if isinstance(error, (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)):
        return "the hub cannot be reached (offline, or HF_HUB_OFFLINE is set)", "go online"
    return one_line(error, 200), "try again"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
