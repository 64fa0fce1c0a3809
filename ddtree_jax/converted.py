"""Converting: loaded models written in the layout of their parameters, so that loading them again only copies."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ddtree_jax.capacity import estimate
from ddtree_jax.engine import pair_names
from ddtree_jax.errors import CheckpointError
from ddtree_jax.models.folders import Opened, layout_of, open_drafter, open_target, write_target_config
from ddtree_jax.models.orbax_files import Manifest, leaf_name, partial_name, write_leaves, write_manifest
from ddtree_jax.models.pair import Drafter, Target, flat_leaves
from ddtree_jax.safetensors_files import write_json

Progress = Callable[[str], None]

COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    "chat_template.jinja",
)


def save_converted(model: Target | Drafter, folder: str | Path) -> None:
    """Writes a loaded model so that `load_target` or `load_drafter` reads it back bit for bit, on any mesh.

    The folder appears whole or not at all: it is written under the name `FOLDER.partial-...` beside it and renamed.

    Args:
      model: from `load_target`, `load_drafter` or `make_*`; tokenizer files are copied from the folder it came from.
      folder: must not exist, or be empty.

    Raises:
      ValueError: `folder` cannot be written to.
      CheckpointError: writing failed; nothing is left behind.
    """
    with appears_whole(output_path(folder)) as temporary:
        _write(model, temporary)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """One folder that `convert` wrote.

    num_bytes: of the folder; source_bytes: of the weights that it was made from.
    load_s, write_s: seconds.
    """

    folder: Path
    dtype: str
    num_bytes: int
    source_bytes: int
    load_s: float
    write_s: float

    def line(self) -> str:
        """The facts in one line."""
        return (
            f"{self.folder}: {self.num_bytes / 1e6:.1f} MB in {self.dtype} from {self.source_bytes / 1e6:.1f} MB"
            f" | loaded in {self.load_s:.1f} s, written in {self.write_s:.1f} s"
        )


def convert(
    target: str | Path,
    drafter: str | Path | None,
    output: str | Path,
    *,
    dtype: Any = "auto",
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> list[Conversion]:
    """Converts a target into `output`, or a pair into `output`/target and `output`/drafter.

    Args:
      target, drafter: as for `load`; "demo" is the pair that ships with the package.
      output: must not exist, or be an empty folder; it appears whole or not at all.
      dtype: as for `load_target`; what is written has this dtype for good.
      mesh: over which the models are loaded meanwhile.
      progress: called with a line of text now and then.

    Raises:
      ValueError: a bad argument, or an output that is in use.
      CheckpointError: a folder that cannot be read or written, or no room for it.
    """
    target, drafter = pair_names(target, drafter)
    output = output_path(output)
    check_output(output)
    opened = open_target(target, dtype=dtype, mesh=mesh)
    folders: list[tuple[Opened, str]] = [(opened, "target" if drafter is not None else "")]
    if drafter is not None:
        second = open_drafter(drafter, opened.config, dtype=dtype, mesh=mesh, auto_dtype=opened.dtype)
        folders.append((second, "drafter"))
    for one, _ in folders:
        estimate(one, None, context=1).require(str(one.folder))  # one of them is loaded at a time
    check_room(output, sum(_num_bytes(one) for one, _ in folders))
    done = []
    with appears_whole(output) as temporary:
        for one, name in folders:
            started = time.perf_counter()
            model = one.read(progress)
            loaded = time.perf_counter()
            (temporary / name).mkdir(exist_ok=True)
            _write(model, temporary / name)
            del model  # before the next one is loaded
            written = time.perf_counter()
            size = sum(file.stat().st_size for file in (temporary / name).rglob("*") if file.is_file())
            times = (loaded - started, written - loaded)
            done.append(Conversion(output / name, one.dtype.name, size, one.bytes_on_disk, *times))
    return done


def _write(model: Target | Drafter, folder: Path) -> None:
    leaves = flat_leaves(model.params)
    if isinstance(model, Target):
        kind, dtype, (scan, packed) = "target", model.dtype, layout_of(model)
        write_target_config(model.config, folder, dtype)
    else:
        kind, dtype, scan, packed = "drafter", leaves["fc", "kernel"].dtype, True, None
        write_json(folder / "config.json", model.config.to_hf() | {"dtype": jnp.dtype(dtype).name})
    for name in COPIED:
        source = None if model.folder is None else model.folder / name
        if source is not None and source.is_file():
            shutil.copyfile(source, folder / name)
    files = write_leaves(folder, leaves)
    table = {leaf_name(path): (tuple(leaf.shape), np.dtype(leaf.dtype).name) for path, leaf in leaves.items()}
    write_manifest(folder, Manifest(kind, jnp.dtype(dtype).name, scan, packed, table, files))


def _num_bytes(opened: Opened) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in opened.leaves.values())


def output_path(value: Any) -> Path:
    if not isinstance(value, (str, Path)) or "\0" in str(value) or not Path(value).name:
        raise ValueError(f"output: got {value!r}, allowed is the name of a folder to make")
    return Path(value)


def check_output(folder: Path) -> None:
    try:
        used = os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise ValueError(f"output: {str(folder)!r} cannot be used: {error}") from None
    if used:
        raise ValueError(f"output: {folder} exists and is not an empty folder; give a new name or remove it first")


def check_room(folder: Path, needed: int) -> None:
    parent = next(parent for parent in folder.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError(
            f"{folder}: needs {needed / 1e9:.2f} GB of disk, {parent} has {free / 1e9:.2f} GB free; make room or "
            "convert elsewhere"
        )


@contextlib.contextmanager
def appears_whole(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name in the end, and is removed if anything fails."""
    check_output(folder)
    temporary = partial_name(folder.absolute(), secrets.token_hex(4))
    try:
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            raise ValueError(f"output: {folder} cannot be made: {error.strerror}") from None
        try:
            yield temporary
            check_output(folder)  # again: loading may have taken an hour
            os.replace(temporary, folder.absolute())
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be written: {error}") from error
        _sync(folder.absolute().parent)
    except BaseException:  # an interruption by the user too
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sync(folder: Path) -> None:
    """Makes a rename last, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
