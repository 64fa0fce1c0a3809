"""Runs pairs over meshes of virtual CPU devices and prints what came out, as one line of JSON.

A process of its own, as the number of devices is fixed before JAX starts:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.engine.mesh_worker REQUEST

REQUEST is JSON: {"folder": where targets may be written, "cache": folder of compiled programs, "cases": [case, ...]}; a
case is {"target": one of TARGETS, "mesh": one of MESHES, "batch": n, "runs": [[algorithm, budget, temperature], ...]},
with "loop" for the device loop as well, with "grammar" for constrained requests, with "serve" for the server's slots,
with "kernels" on the operations of the kernel table, each by its reference, where packed linear layers stay "packed" or
come "unpacked", with "gathers" for what a round gathers.
"""

import dataclasses
import functools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ddtree_jax
from ddtree_jax import decoding
from ddtree_jax.algorithm import SpeculativeAlgorithm
from ddtree_jax.models.folders import Opened, open_drafter, open_target
from ddtree_jax.models.kernels import PACKED_FROM, with_kernels
from ddtree_jax.models.pair import flat_leaves
from ddtree_jax.models.params import drafter_tensors, target_tensors
from ddtree_jax.models.sharding import EXPERT, TENSOR
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import INTERPRETED
from ddtree_jax.pallas.choice import KernelChoice
from ddtree_jax.profiling import random_state
from ddtree_jax.safetensors_files import write_json
from tests.engine.checkpoint_files import write_checkpoint
from tests.engine.conftest import DRAFTER, TARGET, text_tokenizer
from tests.serving.conftest import Loop

NEW_TOKENS = 8
FEW = dataclasses.replace(
    TARGET,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_attention_heads=8,
    v_head_dim=16,
    n_routed_experts=8,
    eos_token_ids=(),
)
# Widths of 128 are eight scale groups: packed kernels split eight ways too.
MANY = dataclasses.replace(FEW, n_routed_experts=40, moe_intermediate_size=128, hidden_size=128)
# Two heads and 33 experts divide over no axis, 2047 tokens over none either.
ODD = dataclasses.replace(FEW, n_routed_experts=33, num_attention_heads=2, vocab_size=2047, q_lora_rank=32)
TARGETS = {  # name -> config, kind of the expert weights, kind of the other linear weights
    "few plain": (FEW, "float32", "float32"),
    "few packed": (FEW, "nvfp4", "float32"),
    "many plain": (MANY, "bfloat16", "bfloat16"),
    "many packed": (MANY, "nvfp4", "bfloat16"),
    "all packed": (dataclasses.replace(MANY, q_lora_rank=32), "nvfp4_packed", "nvfp4"),
    "odd packed": (ODD, "nvfp4", "nvfp4"),
}
MESHES = {
    "none": None,
    "2x4": ((EXPERT, TENSOR), (2, 4)),
    "1x8": ((EXPERT, TENSOR), (1, 8)),
    "1x2": ((EXPERT, TENSOR), (1, 2)),
    "2x1": ((EXPERT, TENSOR), (2, 1)),
    "8x1": ((EXPERT, TENSOR), (8, 1)),
    "tensor alone": ((TENSOR,), (4,)),
    "swapped": ((TENSOR, EXPERT), (4, 2)),
}


def write_pair(folder: Path, name: str) -> None:
    """A random pair; the head is loud, as near-ties are no test."""
    config, experts, others = TARGETS[name]
    drafter = dataclasses.replace(DRAFTER, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    rng = np.random.default_rng(7)

    def draw(spec: Any) -> np.ndarray:
        values = rng.standard_normal(spec.shape)
        if len(spec.shape) == 1:
            return 1 + 0.2 * values if spec.name.endswith("norm.weight") else 0.2 * values
        return values * (1 if "embed" in spec.name else spec.shape[1] ** -0.5) * (20 if "lm_head" in spec.name else 1)

    def kind(name: str) -> str:
        linear = name.endswith("proj.weight") or name.endswith(("_mqa.weight", "wk.weight", "wq_b.weight"))
        return experts if ".experts." in name else others if linear else "bfloat16"

    write_checkpoint(folder / "target", {s.name: draw(s) for s in target_tensors(config)}, kind)
    specs = drafter_tensors(drafter, config.hidden_size)
    write_checkpoint(folder / "drafter", {s.name: draw(s) for s in specs}, "bfloat16")
    write_json(folder / "target" / "config.json", config.to_hf())
    write_json(folder / "drafter" / "config.json", drafter.to_hf())


def make_mesh(name: str) -> jax.sharding.Mesh | None:
    if MESHES[name] is None:
        return None
    axes, sizes = MESHES[name]
    return jax.sharding.Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), axes)


def prompts(batch: int, shift: int, vocab: int) -> list[list[int]]:
    """Different lengths, all within one prefill chunk."""
    rng = np.random.default_rng(batch + 100 * shift)
    return [rng.integers(0, vocab, 3 + 5 * row % 17).tolist() for row in range(batch)]


def placed(model: Any, opened: Opened) -> dict[str, Any]:
    """Bytes of parameters on each device, and what the headers said there would be."""
    held: dict[int, int] = {}
    whole = 0
    for leaf in flat_leaves(model.params).values():
        whole += leaf.nbytes
        for shard in leaf.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return {"held": sorted(held.values()), "said": opened.bytes_per_device(), "whole": whole}


def programs() -> int:
    """Programs that the decoding functions have compiled so far."""
    functions = (decoding.start_prefill, decoding.prefill_chunk, decoding.first_token, decoding.round_step)
    functions += (decoding.decode_loop, decoding.draft_step, decoding.verify_step, decoding.finish_step)
    return sum(function._cache_size() for function in functions)


def stream(engine: Any, ids: list[list[int]], algorithm: str, budget: int, temperature: float) -> dict[str, Any]:
    out: dict[str, Any] = {"tokens": [[] for _ in ids], "trees": [], "lengths": []}
    options = {"temperature": temperature, "seed": [11 + i for i in range(len(ids))], "with_tree": True}
    for chunk in ddtree_jax.stream(engine, ids, NEW_TOKENS, algorithm, budget, **options):
        out["tokens"][chunk.index] += chunk.token_ids
        if chunk.tree is not None:
            row = chunk.tree.batch_index
            tree, path = chunk.tree.tree, chunk.tree.path
            out["trees"].append([chunk.index, tree.token_ids[row].tolist(), tree.parents[row].tolist()])
            out["lengths"].append(int(path.length[row]))
    return out


def run_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    root = folder / case["target"].replace(" ", "-")
    if not root.exists():
        write_pair(root, case["target"])
    mesh = make_mesh(case["mesh"])
    engine = ddtree_jax.load(root / "target", root / "drafter", dtype="float32", mesh=mesh)
    opened = open_target(root / "target", dtype="float32", mesh=mesh)
    opened_drafter = open_drafter(root / "drafter", opened.config, dtype="float32", mesh=mesh)
    out: dict[str, Any] = {
        "target": placed(engine.target, opened),
        "drafter": placed(engine.drafter, opened_drafter),
        "runs": [],
        "again": 0,
    }
    if case.get("kernels"):
        engine = on_kernels(engine, {"packed": 0, "unpacked": PACKED_FROM}[case["kernels"]])
    if case.get("gathers"):
        out["gathers"] = gathers(engine, case["batch"])
    for algorithm, budget, temperature in case["runs"]:
        vocab = opened.config.vocab_size
        out["runs"].append(stream(engine, prompts(case["batch"], 0, vocab), algorithm, budget, temperature))
        before = programs()
        stream(engine, prompts(case["batch"], 1, vocab), algorithm, budget, temperature)
        out["again"] += programs() - before
    out["programs"] = programs()
    if case.get("loop"):  # the device loop of `generate` instead of rounds one by one
        results = ddtree_jax.generate(engine, prompts(case["batch"], 0, vocab), NEW_TOKENS, "ddtree", 6)
        out["loop"] = [result.token_ids for result in results]
        before = programs()
        ddtree_jax.generate(engine, prompts(case["batch"], 1, vocab), NEW_TOKENS, "ddtree", 6)
        out["again"] += programs() - before
    if case.get("grammar"):
        engine = dataclasses.replace(engine, tokenizer=text_tokenizer())
        out["grammar"] = {kind: constrained(engine, case["batch"], kind, 0) for kind in ("host", "table")}
        before = programs()
        for kind in ("host", "table"):
            constrained(engine, case["batch"], kind, 1)
        out["again"] += programs() - before
    if case.get("serve"):
        out["serve"] = served(dataclasses.replace(engine, tokenizer=text_tokenizer()))
    return out


def on_kernels(engine: Any, packed_from: int) -> Any:
    choice = KernelChoice(INTERPRETED, tuple((name, "reference") for name in OPS))
    move = functools.partial(with_kernels, choice=choice, free=True, packed_from=packed_from)
    models = {name: move(getattr(engine, name)) for name in ("target", "drafter")}
    return dataclasses.replace(engine, compiled=set(), warned=set(), **models)


def gathers(engine: Any, batch: int) -> dict[str, Any]:
    """Elements of each weight of which a device holds a part, and of each array that a round gathers."""
    plan, weights = decoding.make_plan(engine, SpeculativeAlgorithm.DDTREE, 6, "greedy")
    state, sampling = random_state(engine, plan, weights, batch, 5, 8)
    program = decoding.round_step.lower(plan, weights, state, sampling, jnp.zeros((0,), jnp.int32)).compile()
    leaves = [leaf for model in (engine.target, engine.drafter) for leaf in model.arrays]
    split = {leaf.size // stacked for leaf in leaves if not leaf.is_fully_replicated for stacked in (1, leaf.shape[0])}
    found = re.findall(r"= ([^=]*?) (?:all-gather|all-to-all|collective-permute)(?:-start)?\(", program.as_text())
    shapes = [shape for result in found for shape in re.findall(r"\w\[([\d,]*)\]", result)]
    return {"weights": sorted(split), "gathered": sorted({math.prod(map(int, s.split(","))) for s in shapes if s})}


def served(engine: Any) -> list[list[int]]:
    """Tokens of eight requests over four slots: the second is the first again, and every other one has a grammar."""
    loop = Loop(engine, max_running_requests=4, context_length=96, budget=6)
    loop.thread.start()
    try:
        assert loop.thread.wait_until_ready()
        ids = [list(range(10, 40)), *prompts(6, 0, engine.target.config.vocab_size)]
        grammars = [ddtree_jax.Grammar.regex("[a-f]{2}x[0-9]{2,8}") if row % 2 else None for row in range(7)]
        first = loop.ask(ids[0], max_new_tokens=NEW_TOKENS)
        first.finished()
        listeners = [
            loop.ask(prompt, max_new_tokens=NEW_TOKENS, grammar=grammar, stop_token_ids=[0])
            for prompt, grammar in zip(ids, grammars, strict=True)
        ]
        assert listeners[0].finished().num_cached_tokens == len(ids[0]) - 1
        return [first.token_ids] + [listener.finished() and listener.token_ids for listener in listeners]
    finally:
        loop.thread.stop()


def constrained(engine: Any, batch: int, kind: str, shift: int) -> list[list[int]]:
    """Tokens of `generate` with a grammar for every other prompt."""
    grammars = [ddtree_jax.Grammar.regex("[a-f]{2}x[0-9]{2,8}") if row % 2 == 0 else None for row in range(batch)]
    ids = prompts(batch, shift, engine.target.config.vocab_size)
    options = {"grammar": grammars, "grammar_implementation": kind, "stop_token_ids": [0]}
    return [r.token_ids for r in ddtree_jax.generate(engine, ids, NEW_TOKENS, "ddtree", 6, **options)]


def main() -> None:
    request = json.loads(sys.argv[1])
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_threefry_partitionable", True)
    jax.config.update("jax_compilation_cache_dir", request["cache"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    results = [run_case(Path(request["folder"]), case) for case in request["cases"]]
    print(json.dumps({"devices": jax.device_count(), "results": results}))


if __name__ == "__main__":
    main()
