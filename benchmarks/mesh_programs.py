"""The programs of a generation, compiled from shapes alone: in threads, before anything runs.

Running them is for one thread: two that launch programs with collectives may do so in another order on each device,
and both would wait for ever.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax import decoding
from ddtree_jax.abstract import abstract_prefill, abstract_round
from ddtree_jax.algorithm import SpeculativeAlgorithm
from ddtree_jax.engine import Engine
from ddtree_jax.models.sharding import placements
from ddtree_jax.pallas.compile_programs import kernels_in
from ddtree_jax.pallas.measure import traced_times_by_device
from ddtree_jax.sampling import SamplingParams

# As the profiler calls them: NCCL's kernels, those of XLA itself, and copies between devices.
COLLECTIVE_KERNEL = re.compile(
    r"nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|collective|memcpy_?p2p", re.IGNORECASE
)
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-\w+)(?:-start)?\("
)
STOP = jnp.zeros((0,), jnp.int32)


class Programs:
    """Greedy `ddtree` generation for one shape of batch.

    Args:
      engine: on one device or over a mesh.
      budget: of the tree.
      batch: prompts.
      longest: tokens of the longest of them.
      new_tokens: for each.
      prompts: also compile what runs prompts; without it there is `random_state` alone.
      loop: compile the loop of rounds (`generate`), else one round (`step`).
    """

    def __init__(
        self,
        engine: Engine,
        budget: int,
        batch: int,
        longest: int,
        new_tokens: int,
        *,
        prompts: bool = True,
        loop: bool = False,
    ):
        self.plan, self.weights = decoding.make_plan(engine, SpeculativeAlgorithm.DDTREE, budget, "greedy")
        shared, mesh = self.plan.for_prefill(), self.plan.target.mesh
        capacity = decoding.cache_capacity(longest, new_tokens, self.plan.draft_depth)
        self.mesh, self.vocab, self.chunk = mesh, engine.target.config.vocab_size, decoding.chunk_tokens(longest)
        self.sampling, self.limits = SamplingParams.create(batch), jnp.full((batch,), new_tokens, jnp.int32)
        state, _, counts = abstract_prefill(shared, self.weights, batch, capacity)
        self.state = abstract_round(self.plan, state)[0]
        if prompts:
            ids = jax.ShapeDtypeStruct((batch, self.chunk), jnp.int32)
            caches = (state.cache, state.draft_cache, state.hidden)
            self.start = decoding.start_prefill.lower(shared, self.weights, batch, capacity).compile()
            self.fill = decoding.prefill_chunk.lower(shared, self.weights, state, ids, counts).compile()
            self.first = decoding.first_token.lower(
                shared, self.weights, *caches, self.sampling, STOP, self.limits
            ).compile()
        rest = (self.plan, self.weights, self.state, self.sampling, STOP)
        lowered = decoding.decode_loop.lower(*rest, capacity=new_tokens) if loop else decoding.round_step.lower(*rest)
        self.program = lowered.compile()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Any:
        """The state before the first round."""
        lengths = np.array([len(ids) for ids in prompts])
        padded = np.zeros((len(prompts), -(-int(lengths.max()) // self.chunk) * self.chunk), np.int32)
        for row, ids in zip(padded, prompts, strict=True):
            row[: len(ids)] = ids
        state = self.start(self.weights)
        for at in range(0, padded.shape[1], self.chunk):
            counts = np.clip(lengths - at, 0, self.chunk).astype(np.int32)
            state = self.fill(self.weights, state, padded[:, at : at + self.chunk], counts)
        caches = (state.cache, state.draft_cache, state.hidden)
        return self.first(self.weights, *caches, self.sampling, STOP, self.limits)

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """New tokens of each prompt, the one from prefill included."""
        state = self.prefill(prompts)
        first = np.asarray(state.root_token_ids)
        found = jax.device_get(self.program(self.weights, state, self.sampling, STOP)[1])
        rows = zip(first, found.token_ids, found.counts, strict=True)
        return [[int(root), *map(int, ids[:count])] for root, ids, count in rows]

    def step(self, state: Any) -> tuple[Any, Any]:
        """One round; uses `state` up."""
        return self.program(self.weights, state, self.sampling, STOP)

    def put(self, state: Any) -> Any:
        """A state of the host (`jax.device_get`) where this engine has its own."""
        return jax.device_put(state) if self.mesh is None else jax.device_put(state, placements(state, self.mesh))

    def random_state(self, context: int, new_tokens: int) -> Any:
        """On the host: caches of normal random rows, `context` of them valid. The same for every engine of a pair."""
        rng = np.random.default_rng(0)
        noise = rng.standard_normal(1 << 20, np.float32)
        batch = self.limits.shape[0]
        roots = rng.integers(0, self.vocab // 2, batch).astype(np.int32)
        values = {"root_token_ids": roots, "emitted": 1, "remaining": new_tokens - 1, "finished": False}

        def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
            name = path[-1].name if hasattr(path[-1], "name") else ""
            if name == "lengths":
                return np.full(leaf.shape, context, np.int32)
            if name in values:
                return np.broadcast_to(np.asarray(values[name], leaf.dtype), leaf.shape).copy()
            return np.resize(noise.astype(leaf.dtype), leaf.shape)

        return jax.tree_util.tree_map_with_path(fill, self.state)

    def milliseconds(self, state: Any, repeats: int) -> tuple[float, Any]:
        """Median of a round by itself, its launch included, each on what the one before left; and the last state."""
        times = []
        for _ in range(repeats + 2):
            start = time.perf_counter()
            state, _ = jax.block_until_ready(self.step(state))
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:]) * 1e3, state

    def kernel_ms(self, state: Any, repeats: int) -> dict[str, tuple[float, float]]:
        """Device -> milliseconds a round in kernels, and of these in collectives; empty where nothing is traced."""
        left = state

        def one(_: int) -> Any:
            nonlocal left
            left, out = self.step(left)
            return out

        found = {}
        for device, times in traced_times_by_device(one, repeats=repeats).items():
            collectives = sum(us for name, us in times.items() if COLLECTIVE_KERNEL.search(name))
            found[device] = (sum(times.values()) / 1e3, collectives / 1e3)
        return dict(sorted(found.items()))

    @property
    def kernels(self) -> int:
        """Different kernels of this package that the program calls; 0 is plain JAX."""
        return len(set(kernels_in(self.program.as_text())))

    @property
    def collectives(self) -> int:
        """Collective operations in the program's text; what stands in a loop runs more often."""
        return len(COLLECTIVE.findall(self.program.as_text()))


def compiled(jobs: Mapping[Hashable, Callable[[], Any]], deadline: float) -> tuple[dict[Any, Any], dict[Any, str]]:
    """Runs every job in a thread; what each gives, and why some give nothing. deadline: of `time.perf_counter`."""
    done, failed = {}, {}
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1)
    futures = {key: pool.submit(job) for key, job in jobs.items()}
    for key, future in futures.items():
        try:
            done[key] = future.result(max(0.0, deadline - time.perf_counter()))
        except TimeoutError:
            failed[key] = "left out: not compiled in time"
        except Exception as error:  # a row of the report, not its end
            failed[key] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    pool.shutdown(wait=not failed, cancel_futures=True)
    return done, failed
