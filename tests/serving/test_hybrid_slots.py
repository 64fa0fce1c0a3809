"""Slots of a target with recurrent layers: their states, too, are those of one sequence alone."""

import numpy as np
import pytest

import ddtree_jax
from ddtree_jax.algorithm import SpeculativeAlgorithm
from ddtree_jax.engine import Engine
from tests.engine.hybrid_target import HybridConfig, SlotOrderNet, make_hybrid

RNG = np.random.default_rng(0)


@pytest.mark.slow
def test_recurrent_states_start_anew_and_prefixes_are_not_reused(make_loop):
    engine = Engine(make_hybrid(SlotOrderNet, HybridConfig(), seed=1), None, None, "hybrid")
    loop = make_loop(engine, algorithm=SpeculativeAlgorithm.NONE, budget=0, max_running_requests=2, context_length=96)
    prompts = [RNG.integers(6, 23, size).tolist() for size in (40, 3, 20)]
    prompts.append(prompts[0] + [7])
    alone = ddtree_jax.generate(engine, prompts, 12, "none", stop_token_ids=[])
    for order in ((0, 1, 2, 3), (3, 2, 1, 0)):
        listeners = {i: loop.ask(prompts[i], max_new_tokens=12, stop_token_ids=[]) for i in order}
        for i, listener in listeners.items():
            assert listener.finished().num_cached_tokens == 0
            assert listener.token_ids == alone[i].token_ids, i
