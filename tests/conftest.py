"""Strict JAX settings for the whole suite, and the shipped pair loaded once."""

import gc
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import pytest

import ddtree_jax

if TYPE_CHECKING:
    from ddtree_jax.engine import Engine


def _gpu_chosen(config: pytest.Config) -> bool:
    """True where the marker expression asks for gpu tests (`-m gpu`, `-m "gpu and not slow"`)."""
    return re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")) is not None


def compiles_quickly(config: pytest.Config) -> bool:
    """True where slow and gpu tests are left out: most other tests run a program once or twice, so that compiling it is
    the time. A run with the slow ones optimises as users' programs are.
    """
    return re.search(r"\bnot slow\b", config.getoption("markexpr")) is not None and not _gpu_chosen(config)


def compilation_as_here() -> dict[str, str]:
    """Environment of a process on the CPU that optimises its programs as this one does."""
    return {"JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(jax.config.read("jax_disable_most_optimizations")))}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-compilers",
        metavar="DIR",
        help="folder of `sh .ci/gpu-compilers DIR`: kernels are compiled for three GPUs, of which none need be here",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Sets JAX up before any test module is imported: strict, and on the CPU unless gpu tests are chosen."""
    # Mosaic's interpreter keeps a thread of XLA waiting for each barrier; with the two of a small machine it hangs.
    os.environ.setdefault("PJRT_NPROC", "16")
    jax.config.update("jax_disable_most_optimizations", compiles_quickly(config))
    if not _gpu_chosen(config):
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_threefry_partitionable", True)
    if hasattr(config, "cache"):
        # Most of a run is compilation: with the programs of the run before, end-to-end tests take a third of
        # the time. A program is found by its whole text and the version of XLA: nothing stale is ever run.
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax-programs")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU chosen, gpu tests leave the run: on the CPU they would only fail."""
    if _gpu_chosen(config):
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True, scope="module")
def free_compiled_programs() -> Iterator[None]:
    """Drops a module's compiled programs when it is done.

    Each program on the CPU holds memory maps; a process that keeps those of the whole suite runs into the kernel's
    limit (65,530 by default), and the compiler then dies with a segmentation fault.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def demo_engine() -> "Engine":
    """The pair that ships with the package, loaded once for the session (float32 on the CPU)."""
    return ddtree_jax.load("demo")
