"""What the commands share: options that name models and devices, and loading them."""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import ddtree_jax
from ddtree_jax.algorithm import ALLOW_HYBRID_UNSAFE
from ddtree_jax.errors import one_line

if TYPE_CHECKING:
    from ddtree_jax.engine import Engine


def add_model_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Options that say which folders, in what precision, over which devices."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target", metavar="DIR", help="target folder or repository id, demo or demo-nvfp4 (default: demo, shipped)"
    )
    group.add_argument("--drafter", metavar="DIR", help="drafter folder or repository id, for that target")
    group.add_argument(
        "--dtype",
        default="auto",
        metavar="TYPE",
        help="auto (default: float32 on CPU, bfloat16 on GPU), float32 or bfloat16",
    )
    group.add_argument("--mesh", metavar="ExT", help="split over E x T devices: experts E ways, heads and widths T")
    return group


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """`add_model_options`, kernels, the hybrid gate's flag, several hosts, and progress."""
    group = add_model_options(parser)
    group.add_argument(
        "--kernels",
        default="auto",
        choices=("auto", "all", "reference"),
        help="auto (default: the kernels of a GPU on which they have been run), all (also where they have only been "
        "compiled: Blackwell) or reference (plain JAX)",
    )
    group.add_argument(
        ALLOW_HYBRID_UNSAFE,
        dest="allow_hybrid_unsafe",
        action="store_true",
        help="let ddtree branch on a target whose recurrent layers cannot follow a tree: the text degrades",
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="several hosts: address of process 0")
    group.add_argument("--num-processes", type=int, metavar="N", help="several hosts: how many processes there are")
    group.add_argument("--process-id", type=int, metavar="I", help="several hosts: which one this is; only 0 prints")
    add_progress_option(parser)


def add_progress_option(parser: argparse.ArgumentParser) -> None:
    """--progress."""
    parser.add_argument(
        "--progress",
        action="store_true",
        help="say on stderr what is loading and compiling (default: where stderr is a terminal)",
    )


def progress_writer(wanted: bool) -> Callable[[str], None] | None:
    """Returns what writes progress to stderr, or None where nobody would read it."""
    if sys.stderr is None or not (wanted or sys.stderr.isatty()):  # None: closed
        return None

    def say(message: str) -> None:
        print(f"ddtree-jax: {message}", file=sys.stderr, flush=True)

    return say


def print_error(error: Exception | str) -> None:
    """One line on stderr."""
    # A name out of somebody's file may hold what a terminal would obey.
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in one_line(error, limit=10_000))
    print(f"ddtree-jax: error: {text}", file=sys.stderr)


def mesh_sizes(arguments: argparse.Namespace) -> tuple[int, int] | None:
    """(expert, tensor) of --mesh, None without it; ValueError."""
    if arguments.mesh is None:
        return None
    from ddtree_jax.cluster import parse_mesh

    return parse_mesh(arguments.mesh)


def load_engine(
    arguments: argparse.Namespace,
    progress: Callable[[str], None] | None,
    check: "Callable[[Engine], object] | None" = None,
) -> "Engine":
    """Joins the other hosts if there are any, then loads the pair over the mesh.

    check: as for `ddtree_jax.load`.
    """
    sizes = mesh_sizes(arguments)
    flags = (arguments.coordinator, arguments.num_processes, arguments.process_id)
    if flags != (None, None, None):
        if sizes is None:
            raise ValueError("mesh: got nothing beside a coordinator, allowed is the mesh that hosts share (--mesh)")
        from ddtree_jax.cluster import join_cluster

        join_cluster(*flags)
        progress = progress if arguments.process_id == 0 else None  # every process would say the same
    mesh = None if sizes is None else ddtree_jax.make_mesh(*sizes)
    target = "demo" if arguments.target is None else arguments.target
    return ddtree_jax.load(
        target,
        arguments.drafter,
        dtype=arguments.dtype,
        mesh=mesh,
        kernels=arguments.kernels,
        allow_hybrid_unsafe=arguments.allow_hybrid_unsafe,
        progress=progress,
        check=check,
    )
