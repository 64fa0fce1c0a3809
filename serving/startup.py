"""What is checked before the server starts, from configs and headers alone: `--dry-run` is this and no more."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
from pathlib import Path

import jax

from ddtree_jax.algorithm import capabilities, require, require_recurrent
from ddtree_jax.capacity import Capacity, estimate
from ddtree_jax.engine import OpenedPair, demo_folder, open_pair
from ddtree_jax.errors import CheckpointError, HybridStateWarning
from ddtree_jax.hub import DEMO_TARGETS
from ddtree_jax.models.sharding import make_mesh
from ddtree_jax.slots import pool_capacity
from serving.config import ServerConfig
from serving.jobs import LoopSettings

DEFAULT_CONTEXT = 4096  # tokens, where the model has more positions
# Where verification of one row is bound by reading the weights, more rows are almost free; on a CPU they are not, and 8
# nodes are the fastest (benchmarks/RESULTS.md).
DEFAULT_BUDGET = 32
DEFAULT_BUDGET_ON_CPU = 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """A start that has passed every check, and whose weights have not been read."""

    config: ServerConfig
    settings: LoopSettings
    pair: OpenedPair
    capacity: Capacity
    remarks: tuple[str, ...] = ()

    def report(self) -> str:
        """What would be started, in a few lines."""
        config, settings = self.config, self.settings
        shape = f", budget {settings.budget}" if capabilities(settings.algorithm).branching else ""
        security = "plaintext" if config.ssl_certfile is None else "TLS"
        metrics = "no metrics" if config.metrics_port is None else f"metrics at port {config.metrics_port}"
        lines = [
            f"model: {config.model_name} ({self.pair.name}), {self.pair.target.dtype.name}",
            f"algorithm: {settings.algorithm.name}{shape}",
            f"requests: {settings.max_running_requests} together, {settings.max_queued_requests} waiting, "
            f"{settings.context_length} tokens each",
            f"address: {config.host} port {config.port}, {security}; {metrics}",
            *self.capacity.table().splitlines(),
            *self.remarks,
        ]
        return "\n".join(lines)


def check_start(config: ServerConfig) -> Plan:
    """Everything that can be told to be wrong before the weights are read.

    Raises:
      ValueError: a flag that does not fit this model, machine or network.
      CheckpointError: folders that do not fit, or do not fit into memory.
      UnsupportedRequestError: an algorithm that the target does not allow.
    """
    config.tls.credentials()
    check_address(config)
    check_cache_folder(config.compilation_cache_dir)
    pair = _open(config)
    settings, remarks = loop_settings(config, pair)
    capacity = _check_memory(settings, pair)
    return Plan(config, settings, pair, capacity, remarks)


def _open(config: ServerConfig) -> OpenedPair:
    sizes = config.mesh_sizes
    target: str | Path = config.model_path
    drafter = config.speculative_draft_model_path
    if not capabilities(config.algorithm).needs_drafter and target in DEMO_TARGETS:
        target = demo_folder() / DEMO_TARGETS[target]  # by its folder: by its name it would bring its drafter
    return open_pair(
        target,
        drafter,
        dtype=config.dtype,
        mesh=None if sizes is None else make_mesh(*sizes),
        kernels=config.kernels,
        allow_hybrid_unsafe=config.speculative_ddtree_allow_hybrid_unsafe,
    )


def loop_settings(config: ServerConfig, pair: OpenedPair) -> tuple[LoopSettings, tuple[str, ...]]:
    """The settings of the device thread for a pair, and what has to be said about them."""
    engine = pair.outline()  # refuses allow_hybrid_unsafe where nothing would read it
    member = config.algorithm
    wanted = config.speculative_num_draft_tokens
    if wanted is not None and pair.drafter is not None and wanted != pair.drafter.config.block_size:
        raise ValueError(
            f"speculative-num-draft-tokens: got {wanted}, allowed is the drafter's block size, "
            f"{pair.drafter.config.block_size}"
        )
    positions = engine.max_positions
    context = min(positions, DEFAULT_CONTEXT) if config.context_length is None else config.context_length
    if context > positions:
        raise ValueError(f"context-length: got {context}, allowed are at most the model's {positions} positions")
    budget = 0
    if capabilities(member).branching:
        default = DEFAULT_BUDGET_ON_CPU if jax.default_backend() == "cpu" else DEFAULT_BUDGET
        budget = default if config.speculative_ddtree_budget is None else config.speculative_ddtree_budget
    if config.max_running_requests > 1:
        require(member, "ragged_batch")
    allowed = engine.allow_hybrid_unsafe
    layers = engine.slot_order_layers
    remarks = []
    if require_recurrent(member, budget, layers, allow_unsafe=allowed, name=engine.name):
        remarks.append(
            f"warning: a branching tree on recurrent layers {', '.join(map(str, layers))}, which run in slot order: "
            "the output may differ from plain decoding"
        )
        pair.warned.add(HybridStateWarning)
    settings = LoopSettings(
        algorithm=member,
        budget=budget,
        max_running_requests=config.max_running_requests,
        max_queued_requests=config.max_queued_requests,
        context_length=context,
        chunked_prefill_size=config.chunked_prefill_size,
        prefix_reuse=not config.disable_radix_cache,
        compact_json=config.constrained_json_disable_any_whitespace,
    )
    return settings, tuple(remarks)


def _check_memory(settings: LoopSettings, pair: OpenedPair) -> Capacity:
    depth = 0 if pair.drafter is None else pair.drafter.config.draft_depth
    tokens = pool_capacity(settings.context_length, settings.chunked_prefill_size, depth)
    need = functools.partial(estimate, pair.target, pair.drafter, kernels=pair.kernels.any)
    capacity = need(context=tokens, batch=settings.max_running_requests)
    if capacity.fits:
        return capacity
    alone = need(context=DEFAULT_BUDGET, batch=1)
    alone.require(pair.name)
    needed, free = capacity.needed / 1e9, (capacity.available or 0) / 1e9
    raise CheckpointError(
        f"{pair.name}: needs {needed:.2f} GB with caches for {settings.max_running_requests} requests of "
        f"{settings.context_length} tokens, and {free:.2f} GB are free; expected a smaller max-running-requests or "
        "context-length, or more devices (mesh)"
    )


def check_address(config: ServerConfig) -> None:
    """Binds both ports for a moment; ValueError where that cannot be done."""
    with contextlib.ExitStack() as stack:  # together: two ports that are one would not pass
        _bind(stack, config.host, config.port, "port")
        if config.metrics_port is not None:
            _bind(stack, config.host, config.metrics_port, "metrics-port")


def _bind(stack: contextlib.ExitStack, host: str, port: int, name: str) -> None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"host: got {host!r}, which is not known ({error}); allowed is an address of here") from None
    family, kind, protocol, _, address = found[0]
    try:
        own = stack.enter_context(socket.socket(family, kind, protocol))
        # As servers do: the port of a server that has just ended counts as free.
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(address)
        own.listen(1)
    except OSError as error:
        raise ValueError(
            f"{name}: got {port}, which cannot be used at {host} ({error.strerror or error}); give another one"
        ) from None


def check_cache_folder(path: str | None) -> None:
    """ValueError unless programs can be kept in the folder, which need not be there yet."""
    if path is None:
        return
    folder = Path(path).absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"compilation-cache-dir: got {path}, allowed is a folder that can be written")
