"""The vocabulary's operations: argmax with broken logits, the choice among levels, and candidates that are capped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.pallas import vocab_topk as module
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import HOST
from ddtree_jax.sampling import SamplingParams, choose_tokens
from ddtree_jax.tree import build, build_tree, draft_candidates
from ddtree_jax.tree.build import needs_no_more_candidates


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_argmax_of_broken_logits(dtype):
    rng = np.random.default_rng()
    logits = np.round(rng.normal(size=(2, 6, 300)) * 2).astype(np.float32)
    logits[0, 1] = np.nan
    logits[0, 2, ::2] = np.nan
    logits[0, 3, [40, 7]] = np.inf
    logits[0, 4] = -np.inf
    logits[0, 5] = np.nan
    logits[0, 5, 299] = -1.0
    clean = np.minimum(np.where(np.isnan(logits), -np.inf, logits), np.finfo(np.float32).max)
    want = np.argmax(clean, axis=-1)
    assert want[0, 3] == 7 and want[0, 5] == 299 and want[0, 1] == want[0, 4] == 0
    got = OPS["vocab_argmax"](jnp.asarray(logits, dtype), platform=HOST)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, want)
    greedy = choose_tokens(
        jnp.asarray(logits, dtype),
        np.zeros((2, 6), np.int32),
        np.zeros(2, np.int32),
        SamplingParams.create(2),
        mode="greedy",
    )
    np.testing.assert_array_equal(greedy, want)


def test_a_filter_that_one_sequence_uses_changes_no_other():
    rng = np.random.default_rng()
    logits = jnp.asarray(rng.normal(size=(3, 4, 200)) * 3, jnp.float32)
    depths, emitted = np.arange(4, dtype=np.int32)[None].repeat(3, 0), np.arange(3, dtype=np.int32)
    create = functools.partial(SamplingParams.create, temperature=0.9, seed=[1, 2, 3])
    plain = create(3)
    for field, value in (("top_k", 5), ("top_p", 0.5), ("min_p", 0.3)):
        column = getattr(plain, field)
        params = SamplingParams(
            **{name: getattr(plain, name) for name in ("temperature", "top_k", "top_p", "min_p", "keys")}
            | {field: column.at[1].set(value)}
        )
        for mode in ("filtered", "mixed"):
            got = choose_tokens(logits, depths, emitted, params, mode=mode)
            want = choose_tokens(logits, depths, emitted, plain, mode="sample")
            np.testing.assert_array_equal(np.asarray(got)[[0, 2]], np.asarray(want)[[0, 2]])


@pytest.mark.parametrize("rows", [1, 65, 10**6])
def test_descent_is_exact_whichever_way_a_level_is_chosen(rows, monkeypatch):
    """Heavy ties: `lax.top_k` at a level must keep the smaller id, which it does by position."""
    ways = set()
    chosen = module.counts_pairs

    def record(num_rows, n, k):
        ways.add(chosen(rows, n, k))
        return chosen(rows, n, k)

    monkeypatch.setattr(module, "counts_pairs", record)
    jax.clear_caches()
    logits = np.random.default_rng().integers(0, 3, size=(3, 2500)).astype(np.float32)
    got = OPS["vocab_topk"](logits, 40, implementation="block_descent", platform=HOST)
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :40]
    np.testing.assert_array_equal(got.token_ids, ids)
    np.testing.assert_array_equal(got.values, np.take_along_axis(logits, ids, axis=-1))
    assert ways == {1: {True}, 65: {True, False}, 10**6: {False}}[rows]


def test_table_serves_both_names():
    logits = np.random.default_rng().normal(size=(2, 3, 700)).astype(np.float32)
    outs = [OPS["vocab_topk"](logits, 9, implementation=name, platform=HOST) for name in ("reference", "block_descent")]
    jax.tree.map(np.testing.assert_array_equal, *outs)
    assert OPS["vocab_topk"].names(HOST) == ("reference",)


LOGITS = {
    "peaked": lambda rng, shape: rng.normal(size=shape) * 12,
    "flat": lambda rng, shape: rng.normal(size=shape) * 0.01,
    "equal": lambda rng, shape: np.zeros(shape),
    "tied": lambda rng, shape: np.round(rng.normal(size=shape)),
    "few": lambda rng, shape: np.where(rng.random(shape) < 0.9, -np.inf, rng.normal(size=shape)),
}


@pytest.mark.parametrize("cap, force_spine", [(1, False), (4, False), (4, True)])
def test_capped_candidates_build_the_same_tree(cap, force_spine):
    rng = np.random.default_rng()
    roots = np.arange(2, dtype=np.int32)
    build_with = functools.partial(build_tree, budget=16, force_spine=force_spine)
    proven, differs = set(), False
    for kind, draw in LOGITS.items():
        for _ in range(6):
            logits = draw(rng, (2, 4, 60)).astype(np.float32)
            capped, whole = (build_with(logits, roots, candidate_cap=value) for value in (cap, None))
            # A logsumexp may round apart in another program; the nodes must be the same ones.
            for field in ("token_ids", "parents", "num_nodes"):
                np.testing.assert_array_equal(getattr(capped, field), getattr(whole, field), err_msg=kind)
            np.testing.assert_allclose(capped.log_probs, whole.log_probs, rtol=1e-6)
            short = build_with(logits, roots, top_k=cap)
            differs |= not np.array_equal(short.token_ids, whole.token_ids)
            if not force_spine:
                log_probs, _ = draft_candidates(logits, cap)
                proven |= set(np.asarray(needs_no_more_candidates(log_probs, short.log_probs[:, -1])).tolist())
    assert differs  # the cap alone loses nodes here
    assert force_spine or False in proven
    assert force_spine or cap == 1 or True in proven


def test_the_proof_compares_with_what_was_chosen():
    def proof(rows, last):
        return bool(needs_no_more_candidates(np.array([rows], np.float32), np.array([last], np.float32))[0])

    row = [-0.5, -2.0]
    assert proof([row], -1.75)
    assert not proof([row], -2.0)  # a tie goes by ranks, which the proof does not know
    assert not proof([row], -2.25)
    assert not proof([row], -np.inf)  # the budget was not filled, and there may be more candidates
    assert proof([[-0.5, -np.inf]], -np.inf)
    # The second row comes below the chain: -0.5 - 1.0 there, where by itself it would be -1.0.
    assert proof([row, [-0.25, -1.0]], -1.25)
    assert not proof([row, [-0.25, -1.0]], -1.75)


def test_caps_are_for_wide_trees_on_a_gpu():
    assert build.default_candidate_cap(256, backend="cpu") is None
    assert build.default_candidate_cap(64, backend="gpu") is None
    assert build.default_candidate_cap(256, backend="gpu") == build.CANDIDATE_CAP


def test_wrong_cap_is_named():
    with pytest.raises(ValueError, match="candidate_cap"):
        build_tree(np.zeros((1, 2, 9), np.float32), np.zeros(1, np.int32), budget=4, candidate_cap=0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows, k", [(15, 64), (65, 32), (65, 64), (15, 256)])
def test_ties_on_the_gpu(rows, k):
    logits = np.random.default_rng(k).integers(0, 5, size=(rows, 154880)).astype(np.float32)
    got = OPS["vocab_topk"](jnp.asarray(logits), k, implementation="block_descent")
    np.testing.assert_array_equal(got.token_ids, np.argsort(-logits, axis=-1, kind="stable")[:, :k])
