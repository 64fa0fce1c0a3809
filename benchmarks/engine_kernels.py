"""The engine on the kernels of this device, beside plain JAX: same tokens, time of a round, and what the program holds.

    python benchmarks/engine_kernels.py [--pairs demo,demo-nvfp4,slice] [--budget 16] [--repeats 10] [--json FILE]

For each pair: greedy tokens of some prompts in float32 with both (they must be equal; status 1 if not), then the
median time of one `ddtree` round in bfloat16 with both, and the kernels that the compiled round calls. `slice` is a
random GLM-5 of true layer shapes (3 dense and 4 MoE layers, NVFP4 experts) with a random DFlash drafter; its second
prompt is longer than `index_topk`, so that the selection of keys runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import ddtree_jax
from ddtree_jax import decoding
from ddtree_jax.abstract import packed_experts
from ddtree_jax.algorithm import SpeculativeAlgorithm
from ddtree_jax.engine import Engine
from ddtree_jax.models.config import DFlashConfig, Glm5Config
from ddtree_jax.models.glm5 import Glm5
from ddtree_jax.models.kernels import with_kernels
from ddtree_jax.models.pair import Target, make_drafter
from ddtree_jax.models.published import GLM_5, GLM_5_3_DFLASH2
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.choice import AUTO, KERNELS, choose_kernels
from ddtree_jax.profiling import random_state, round_breakdown

DENSE_LAYERS, MOE_LAYERS, DRAFT_LAYERS = 3, 4, 5


def slice_engine(dtype: str) -> Engine:
    """A few layers of GLM-5 at true shapes with random weights, routed experts NVFP4, and a random drafter."""
    layers = DENSE_LAYERS + MOE_LAYERS
    config = Glm5Config.from_hf({**GLM_5, "num_hidden_layers": layers, "first_k_dense_replace": DENSE_LAYERS})
    make = functools.partial(Glm5, config, dtype=jnp.dtype(dtype), packed=packed_experts(config))
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    # In one program: drawn one by one, the random bits of the experts would not fit as the integers that they start as.
    params = jax.jit(lambda: nnx.split(make(rngs=nnx.Rngs(0)))[1])()
    target = Target(config, graphdef, params)
    own = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": DRAFT_LAYERS,
        "num_target_layers": layers,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
        "sliding_window": None,
        "dflash_config": {"block_size": 8, "mask_token_id": 154856, "target_layer_ids": [1, 3, 5]},
    }
    drafter = make_drafter(DFlashConfig.from_hf({**GLM_5_3_DFLASH2, **own}), target)
    return Engine(target, drafter, None, "slice")


def load_pair(name: str, dtype: str) -> dict[str, Engine]:
    """Kernels -> engine. The slice is drawn once: both have the same weights."""
    if name != "slice":
        return {kernels: ddtree_jax.load(name, dtype=dtype, kernels=kernels) for kernels in KERNELS}
    engine, choice = slice_engine(dtype), choose_kernels(AUTO)
    models = {field: with_kernels(getattr(engine, field), choice) for field in ("target", "drafter")}
    return {"reference": engine, AUTO: dataclasses.replace(engine, compiled=set(), warned=set(), **models)}


def prompts_of(name: str, engine: Engine) -> list[list[int]]:
    draw = np.random.default_rng(0).integers(0, engine.target.config.vocab_size - 256, 4096)
    lengths = (96, engine.target.config.index_topk + 200) if name == "slice" else (48, 200, 700)
    return [draw[:length].tolist() for length in lengths]


def kernels_in_round(engine: Engine, budget: int) -> list[str]:
    """Names of the kernels that the compiled round calls, without their tile sizes."""
    plan, weights = decoding.make_plan(engine, SpeculativeAlgorithm.DDTREE, budget, "greedy")
    state, sampling = random_state(engine, plan, weights, 1, 128, 32)
    program = decoding.round_step.lower(plan, weights, state, sampling, jnp.zeros((0,), jnp.int32)).compile().as_text()
    lines = [line for line in program.splitlines() if 'custom_call_target="__gpu$xla.gpu.triton"' in line]
    words = [word for line in lines for word in re.findall(r'\bname = \\*"([A-Za-z]\w*)', line)]
    # Without the tile sizes that end a name: moe_down_r16_xw_..., nvfp4_matmul_4096_...
    return sorted({re.sub(r"_[a-z]?\d.*", "", word) for word in words})


def measure_pair(name: str, args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"pair": name, "budget": args.budget}
    engines = load_pair(name, "float32")
    prompts = prompts_of(name, engines[AUTO])
    tokens = {}
    for kernels, engine in engines.items():
        outputs = [
            ddtree_jax.generate(engine, prompt, max_new_tokens=args.tokens, budget=args.budget, stop_token_ids=[])
            for prompt in prompts
        ]
        tokens[kernels] = [output.token_ids for output in outputs]
        result[f"acceptance_{kernels}"] = [output.stats.mean_acceptance_length for output in outputs]
    result["same"] = [a == b for a, b in zip(tokens[AUTO], tokens["reference"], strict=True)]
    del engines, engine
    jax.clear_caches()
    engines = load_pair(name, "bfloat16")
    result["kernels"] = kernels_in_round(engines[AUTO], args.budget)
    for kernels, engine in engines.items():
        for context in args.contexts:
            times = round_breakdown(
                engine, "ddtree", args.budget, prompt_tokens=context, max_new_tokens=32, repeats=args.repeats
            )
            result[f"round_ms_{kernels}_{context}"] = times["round"]
            result[f"verify_ms_{kernels}_{context}"] = times["verify"]
    return result


def show(result: dict[str, Any]) -> str:
    lines = [
        f"{result['pair']}: greedy tokens in float32 equal for {sum(result['same'])} of {len(result['same'])} prompts"
    ]
    lines.append("    kernels in the round: " + (", ".join(result["kernels"]) or "none"))
    for key, value in result.items():
        if key.startswith("round_ms_auto_"):
            context = key.rsplit("_", 1)[1]
            other = result[f"round_ms_reference_{context}"]
            lines.append(f"    round, context {context}: {value:.2f} ms with kernels, {other:.2f} ms in plain JAX")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", default="demo,demo-nvfp4,slice")
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24, help="new tokens a prompt")
    parser.add_argument("--contexts", type=lambda text: [int(n) for n in text.split(",")], default=[128, 1024])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", help="also write the numbers here")
    args = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}; operations: {', '.join(OPS)}")
    results = []
    for name in args.pairs.split(","):
        results.append(measure_pair(name, args))
        print(show(results[-1]), flush=True)
        jax.clear_caches()
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n")
    return 0 if all(all(result["same"]) for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
