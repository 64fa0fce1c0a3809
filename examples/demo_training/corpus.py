"""Where the training text comes from: Python sources on this machine under permissive licences."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

MIN_FILE_BYTES = 200
MAX_FILE_BYTES = 400_000
MAX_LINE_CHARS = 2000
HELDOUT_PER_MILLE = 20

# Folders whose files may come from elsewhere under another licence, or that are no sources.
_SKIPPED_FOLDERS = frozenset(
    "_vendor vendor vendored _vendored third_party thirdparty extern externals node_modules site-packages "
    "dist-packages __pycache__".split()
)

# Import name -> SPDX identifier. Only packages named here are read: no copyleft or unclear licence.
PACKAGE_LICENSES: dict[str, str] = {
    name: license_id
    for license_id, names in {
        "Apache-2.0": (
            "absl accelerate aiofiles aiohttp aiosignal asttokens async_timeout chex coverage Cython "
            "diffrax equinox etils flax frozenlist grpc huggingface_hub jax jaxlib lightning "
            "lightning_utilities lineax mesonbuild msgpack multidict numpyro onnx optax optimistix "
            "orbax peft propcache pyarrow pytorch_lightning requests sacrebleu safetensors "
            "sentence_transformers sentencepiece sortedcontainers tensorboard tensorstore timm "
            "tokenizers torchmetrics transformers treescope tzdata wadler_lindig xarray yarl"
        ),
        "MIT": (
            "_pytest annotated_doc annotated_types anyio attr attrs botorch build charset_normalizer "
            "cupy cupyx e3nn einops executing fontTools formulaic gpytorch h11 humanize iniconfig "
            "interface_meta jaxtyping linear_operator markdown_it mdurl mypy_extensions narwhals "
            "onnx_ir onnxruntime onnxscript opt_einsum opt_einsum_fx pip platformdirs pluggy pyparsing "
            "pyproject_hooks pytest rich setuptools six tabulate tiktoken torch_geometric torchdiffeq "
            "triton typeguard typer urllib3 virtualenv wheel yaml"
        ),
        "BSD-3-Clause": (
            "click colorama contourpy cycler dill fsspec functorch h5py httpcore httpx idna jinja2 "
            "joblib kiwisolver lazy_loader markdown markupsafe mpi4py mpmath multipledispatch nanobind "
            "nbformat networkx numpy pandas patsy portalocker prompt_toolkit psutil pybind11 scipy "
            "seaborn skimage sklearn statsmodels sympy threadpoolctl tifffile toolz torch torchgen "
            "torchvision werkzeug"
        ),
        "BSD-2-Clause": "imageio llvmlite numba packaging pygments torchaudio wrapt xxhash",
        "MIT-CMU": "PIL",
        "PSF-2.0": "typing_extensions",
    }.items()
    for name in names.split()
}
STDLIB_LICENSE = "PSF-2.0"
STDLIB_PREFIX = "python/"  # of the names of standard library files


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """One file of the corpus.

    `name` is its path below the folder that holds the package, such as `numpy/linalg/linalg.py`; it and not
    the place on disk decides the split, so every machine splits alike.
    """

    path: str
    name: str
    package: str
    license: str
    heldout: bool


def is_heldout(name: str, per_mille: int = HELDOUT_PER_MILLE) -> bool:
    """Whether a file belongs to the held-out part: a fixed function of its name and of the share held out."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < per_mille


def library_folders() -> tuple[Path, list[Path]]:
    """The standard library's folder, and the folders that may hold installed packages."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    folders = [Path(sysconfig.get_paths()["purelib"]), Path(sysconfig.get_paths()["platlib"])]
    folders += [Path(folder) for folder in site.getsitepackages()]
    folders += [Path(folder) for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    for root in ("/usr/lib/python3", "/usr/local/lib", "/usr/lib", "/opt"):
        for pattern in ("dist-packages", "python3*/dist-packages", "python3*/site-packages"):
            folders += sorted(Path(root).glob(pattern))
        if root == "/opt":
            folders += sorted(Path(root).glob("*/.venv/lib/python3*/site-packages"))
            folders += sorted(Path(root).glob("*/lib/python3*/site-packages"))
    unique = {folder.resolve(): None for folder in folders if folder.is_dir()}
    return stdlib.resolve(), list(unique)


def _python_files(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(parent) / name


def _readable(data: bytes) -> str | None:
    if not MIN_FILE_BYTES <= len(data) <= MAX_FILE_BYTES or b"\0" in data:
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if max(map(len, text.split("\n"))) > MAX_LINE_CHARS:
        return None
    return text.replace("\r\n", "\n")


def read_text(path: str | Path) -> str | None:
    """A file's text, or None where the rules of the corpus leave the file out."""
    try:
        return _readable(Path(path).read_bytes())
    except OSError:
        return None


def _candidates(folders: Iterable[tuple[Path, str, str, str]], per_mille: int) -> Iterator[SourceFile]:
    for folder, prefix, package, license_id in folders:
        paths = [folder] if folder.is_file() else _python_files(folder)
        for path in paths:
            name = prefix if folder.is_file() else f"{prefix}/{path.relative_to(folder).as_posix()}"
            yield SourceFile(str(path), name, package, license_id, is_heldout(name, per_mille))


def installed_sources(per_mille: int = HELDOUT_PER_MILLE) -> Iterator[SourceFile]:
    """Files of the running Python's standard library and of the packages in `PACKAGE_LICENSES`."""
    stdlib, folders = library_folders()
    places = [(stdlib, "python", "python", STDLIB_LICENSE)]
    for folder in folders:
        for name, license_id in sorted(PACKAGE_LICENSES.items()):
            if (folder / name).is_dir():
                places.append((folder / name, name, name, license_id))
            elif (folder / f"{name}.py").is_file():
                places.append((folder / f"{name}.py", f"{name}.py", name, license_id))
    yield from _candidates(places, per_mille)


def folder_sources(
    folder: Path, per_mille: int = HELDOUT_PER_MILLE, license_id: str = "NOASSERTION"
) -> Iterator[SourceFile]:
    """Every Python file below a folder of the user's own."""
    yield from _candidates([(folder, folder.name, folder.name, license_id)], per_mille)


def select(sources: Iterable[SourceFile], max_bytes: int | None = None) -> list[SourceFile]:
    """The files to use: readable by the rules of the corpus, each text once.

    A text that occurs in both parts of the split stays in the held-out part alone.

    Args:
      sources: candidates.
      max_bytes: upper limit of the total size, reached in the order of the result.

    Returns:
      Files in the order of their names' hashes (a fixed shuffle).
    """
    found: list[tuple[SourceFile, bytes]] = []
    heldout_texts: set[bytes] = set()
    total = 0
    for item in sorted(sources, key=lambda item: hashlib.sha256(item.name.encode()).digest()):
        text = read_text(item.path)
        if text is None:
            continue
        data = text.encode()
        digest = hashlib.sha256(data).digest()
        found.append((item, digest))
        if item.heldout:
            heldout_texts.add(digest)
        total += len(data)
        if max_bytes is not None and total >= max_bytes:
            break
    seen: set[bytes] = set()
    chosen: list[SourceFile] = []
    for item, digest in found:
        if digest not in seen and (item.heldout or digest not in heldout_texts):
            seen.add(digest)
            chosen.append(item)
    return chosen


def describe(files: Iterable[SourceFile]) -> list[dict]:
    """Per package: name, licence, number of files and bytes on disk, largest first."""
    table: dict[str, dict] = {}
    for item in files:
        row = table.setdefault(item.package, {"package": item.package, "license": item.license, "files": 0, "bytes": 0})
        row["files"] += 1
        row["bytes"] += os.path.getsize(item.path)
    return sorted(table.values(), key=lambda row: -row["bytes"])
