"""Tree attention against float64: reference and kernels (interpreted here, compiled under `-m gpu`)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.pallas import tree_attention
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import B200, H200, HOST, INTERPRETED, RTX_PRO_6000
from ddtree_jax.pallas.cases import tree_attention as cases
from ddtree_jax.pallas.gqa_kernels import gqa_tiles, gqa_triton
from ddtree_jax.pallas.mla_kernels import mla_selected_tiles, mla_selected_triton, mla_tiles, mla_triton
from ddtree_jax.pallas.split_attention import Tiles, num_splits, split_range

PLATFORM = dataclasses.replace(INTERPRETED, cores=4)
SMALL = Tiles(16, 16, 16, num_warps=4, num_stages=1, min_tiles=1, splits=3)
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
LENGTHS = (0, 1, 15, 16, 17, 48)  # around the tiles of SMALL, and the whole capacity
RANK, ROPE, SLOTS, LAYERS, LAYER = 32, 16, 48, 2, 1
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def oracle(scores: np.ndarray, values: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """float64 softmax attention of one head: scores [T, M], values [M, N], visible bool[T, M]."""
    out = np.zeros((scores.shape[0], values.shape[1]))
    for t, seen in enumerate(visible):
        if seen.any():
            w = np.exp(scores[t, seen] - scores[t, seen].max())
            out[t] = w / w.sum() @ values[seen]
    return out


def exact_mla(q, cache, lengths, new, visible_block, rank, scale, visible_prefix=None) -> np.ndarray:
    q, cache, new = (np.asarray(x, np.float64) for x in (q, cache, new))
    b, t, heads, _ = q.shape
    out = np.zeros((b, t, heads, rank))
    for i in range(b):
        n = int(lengths[i])
        rows = np.concatenate([cache[LAYER, i, :n], new[i]])
        prefix = np.ones((t, n), bool) if visible_prefix is None else visible_prefix[i][:, :n]
        visible = np.concatenate([prefix, visible_block[i]], axis=1)
        for h in range(heads):
            out[i, :, h] = oracle(q[i, :, h] @ rows.T * scale, rows[:, :rank], visible)
    return out


def exact_gqa(q, k_cache, v_cache, lengths, new_k, new_v, mask, scale) -> np.ndarray:
    q, k_cache, v_cache, new_k, new_v = (np.asarray(x, np.float64) for x in (q, k_cache, v_cache, new_k, new_v))
    b, t, heads, hd = q.shape
    group = heads // (k_cache.shape[3] // hd)
    out = np.zeros(q.shape)
    for i in range(b):
        n = int(lengths[i])
        k, v = np.concatenate([k_cache[LAYER, i, :n], new_k[i]]), np.concatenate([v_cache[LAYER, i, :n], new_v[i]])
        visible = np.concatenate([np.ones((t, n), bool), mask[i]], axis=1)
        for h in range(heads):
            own = slice(h // group * hd, (h // group + 1) * hd)
            out[i, :, h] = oracle(q[i, :, h] @ k[:, own].T * scale, v[:, own], visible)
    return out


def error(out, exact) -> float:
    out = np.asarray(out, np.float64)
    assert out.shape == exact.shape
    return max(float(np.linalg.norm(a - e) / np.linalg.norm(e)) for a, e in zip(out, exact, strict=True))


def tree_mask(rng: np.random.Generator, batch: int, t: int) -> np.ndarray:
    """Ancestors of random trees; the last row of a block of several is padding and sees only itself."""
    mask = np.zeros((batch, t, t), bool)
    for i in range(batch):
        for row in range(t):
            if 0 < row < max(t - 1, 2):
                mask[i, row] = mask[i, rng.integers(0, row)]
            mask[i, row, row] = True
    return mask


def draw(rng: np.random.Generator, dtype: str, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), dtype)


def poison(cache: jax.Array, lengths) -> jax.Array:
    """NaN wherever a call for LAYER must not read."""
    past = jnp.arange(cache.shape[2])[None, :] >= jnp.asarray(lengths)[:, None]
    other = jnp.arange(cache.shape[0]) != LAYER
    return jnp.where((past[None] | other[:, None, None])[..., None], jnp.asarray(jnp.nan, cache.dtype), cache)


def mla_case(seed: int, dtype: str, *, lengths=LENGTHS, t=5, heads=4):
    rng, b = np.random.default_rng(seed), len(lengths)
    q, new = draw(rng, dtype, b, t, heads, RANK + ROPE), draw(rng, dtype, b, t, RANK + ROPE)
    cache = poison(draw(rng, dtype, LAYERS, b, SLOTS, RANK + ROPE), lengths)
    return rng, (q, cache, jnp.int32(LAYER), jnp.asarray(lengths, jnp.int32), new), tree_mask(rng, b, t)


def gqa_case(seed: int, dtype: str, *, lengths=LENGTHS, t=5, heads=6, kv_heads=2, hd=16):
    rng, b = np.random.default_rng(seed), len(lengths)
    caches = [poison(draw(rng, dtype, LAYERS, b, SLOTS, kv_heads * hd), lengths) for _ in range(2)]
    news = [draw(rng, dtype, b, t, kv_heads * hd) for _ in range(2)]
    args = (draw(rng, dtype, b, t, heads, hd), *caches, jnp.int32(LAYER), jnp.asarray(lengths, jnp.int32), *news)
    return args, tree_mask(rng, b, t)


def selections(rng: np.random.Generator, lengths, t: int, mask: np.ndarray, k: int) -> np.ndarray:
    """int32[B, T, k]: some visible columns in any order, with -1 between; fewer than k are visible to some rows."""
    out = np.full((len(lengths), t, k), -1, np.int32)
    for i, n in enumerate(lengths):
        for row in range(t):
            visible = np.concatenate([np.arange(n), SLOTS + np.flatnonzero(mask[i, row])])
            some = rng.permutation(visible)[: k - 3]
            out[i, row, rng.permutation(k)[: len(some)]] = some
    return out


KERNELS = {"mla": mla_triton, "selected": mla_selected_triton, "gqa": gqa_triton}
REFERENCES = {
    "mla": tree_attention.mla_attention_reference,
    "selected": tree_attention.mla_attention_selected_reference,
    "gqa": tree_attention.gqa_attention_reference,
}


@functools.lru_cache
def compiled(op: str, which: str, tiles: Tiles):
    """One program for all calls of a test: the compilation is what takes the time."""
    call = functools.partial(KERNELS[op], tiles=tiles) if which == "kernel" else REFERENCES[op]
    static = {"scale": 0.3} if op == "gqa" else {"scale": 0.3, "rank": RANK}
    return jax.jit(functools.partial(call, platform=PLATFORM, **static))


def run(op: str, which: str, args, last, tiles: Tiles = SMALL) -> np.ndarray:
    return np.asarray(compiled(op, which, tiles)(*args, jnp.asarray(last)), np.float64)


run_mla, run_selected, run_gqa = (functools.partial(run, op) for op in ("mla", "selected", "gqa"))


WHICH = pytest.mark.parametrize("which", ["reference", "kernel"])
KINDS = pytest.mark.parametrize(("which", "dtype"), [
    ("reference", "float32"), ("reference", "bfloat16"), ("kernel", "float32"),
    pytest.param("kernel", "bfloat16", marks=pytest.mark.slow),
])  # fmt: skip


@DTYPES
@WHICH
def test_mla_at_every_length(which: str, dtype: str):
    _, args, mask = mla_case(0, dtype)
    out = run_mla(which, args, mask)
    exact = exact_mla(args[0], args[1], LENGTHS, args[4], mask, RANK, 0.3)
    assert np.isfinite(out).all()
    assert error(out, exact) <= TOLERANCE[dtype]


@WHICH
@pytest.mark.parametrize(("t", "heads", "tiles"), [
    pytest.param(1, 4, SMALL, marks=pytest.mark.slow),  # only the root
    (3, 6, dataclasses.replace(SMALL, apart=True)),  # rows that do not fill their tiles
    (19, 2, dataclasses.replace(SMALL, splits=1)),  # two tiles of block columns, one split
])  # fmt: skip
def test_mla_block_sizes(which: str, t: int, heads: int, tiles: Tiles):
    _, args, mask = mla_case(t, "float32", lengths=(0, 31), t=t, heads=heads)
    exact = exact_mla(args[0], args[1], (0, 31), args[4], mask, RANK, 0.3)
    assert error(run_mla(which, args, mask, tiles), exact) <= 1e-5


@WHICH
def test_a_broken_block_row_reaches_only_rows_that_see_it(which: str):
    _, args, mask = mla_case(3, "float32", lengths=(17,))
    clean = run_mla(which, args, mask)
    for value in (np.nan, np.inf):
        new = args[4].at[0, -1].set(value)  # the padding row
        out = run_mla(which, (*args[:4], new), mask)
        np.testing.assert_array_equal(out[:, :-1], clean[:, :-1])
        assert not np.isfinite(out[:, -1]).all()


@KINDS
def test_selected(which: str, dtype: str):
    rng, args, mask = mla_case(4, dtype)
    selected = selections(rng, LENGTHS, 5, mask, 21)
    chosen = np.zeros((len(LENGTHS), 5, SLOTS + 5), bool)
    for i, row, place in zip(*np.nonzero(selected >= 0), strict=True):
        chosen[i, row, selected[i, row, place]] = True
    assert (chosen.sum(-1) < 21 - 3).any() and (selected[:, :, -1] >= 0).any()
    prefix, block = chosen[..., :SLOTS], chosen[..., SLOTS:]
    exact = exact_mla(args[0], args[1], LENGTHS, args[4], block, RANK, 0.3, visible_prefix=prefix)
    assert error(run_selected(which, args, selected), exact) <= TOLERANCE[dtype]


@WHICH
def test_selecting_everything_is_dense(which: str):
    lengths = (0, 17, 48)
    rng, args, mask = mla_case(5, "float32", lengths=lengths)
    selected = selections(rng, lengths, 5, mask, SLOTS + 5 + 3)
    dense = run_mla("reference", args, mask)
    assert error(run_selected(which, args, selected, dataclasses.replace(SMALL, splits=1)), dense) <= 1e-5


@WHICH
def test_a_row_without_selection_is_zero_and_stale_slots_count_as_nothing(which: str):
    _, args, mask = mla_case(6, "float32", lengths=(2,), t=2)
    selected = np.full((1, 2, 4), -1, np.int32)
    selected[0, 1] = [SLOTS + 1, 2, 1, 47]  # 2 and 47 lie beyond the length
    out = run_selected(which, args, selected)
    np.testing.assert_array_equal(out[0, 0], 0.0)
    selected[0, 1] = [-1, 1, -1, SLOTS + 1]
    np.testing.assert_allclose(out, run_selected(which, args, selected), rtol=1e-5, atol=1e-6)


@KINDS
def test_gqa_at_every_length(which: str, dtype: str):
    args, mask = gqa_case(7, dtype)
    out = run_gqa(which, args, mask)
    assert np.isfinite(out).all()
    exact = exact_gqa(*args[:3], LENGTHS, *args[5:], mask, 0.3)
    assert error(out, exact) <= TOLERANCE[dtype]


@WHICH
@pytest.mark.parametrize(("t", "heads", "kv_heads", "tiles"), [
    (1, 2, 1, SMALL),
    # Two query tiles and two block tiles a KV head.
    pytest.param(19, 4, 2, dataclasses.replace(SMALL, splits=1, apart=True), marks=pytest.mark.slow),
])  # fmt: skip
def test_gqa_block_sizes(which: str, t: int, heads: int, kv_heads: int, tiles: Tiles):
    args, mask = gqa_case(t, "float32", lengths=(0, 31), t=t, heads=heads, kv_heads=kv_heads)
    exact = exact_gqa(*args[:3], (0, 31), *args[5:], mask, 0.3)
    assert error(run_gqa(which, args, mask, tiles), exact) <= 1e-5


@WHICH
def test_gqa_broken_rows_stay_where_they_are_seen(which: str):
    args, mask = gqa_case(8, "float32", lengths=(17,))
    clean = run_gqa(which, args, mask)
    for place in (5, 6):
        broken = list(args)
        broken[place] = broken[place].at[0, -1].set(np.nan)
        out = run_gqa(which, tuple(broken), mask)
        np.testing.assert_array_equal(out[:, :-1], clean[:, :-1])
        assert np.isnan(out[:, -1]).all()


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("generation", [H200, B200, RTX_PRO_6000], ids=lambda p: p.generation)
def test_chosen_tiles(generation, dtype: str):
    platform = dataclasses.replace(generation, cores=4, interpret=True)
    lengths = (48, 3)
    rng, args, mask = mla_case(10, dtype, lengths=lengths, t=9)
    selected = selections(rng, lengths, 9, mask, 12)
    gqa, tree = gqa_case(10, dtype, lengths=lengths, t=9, heads=8)
    static = {"scale": 0.3, "rank": RANK}
    for op, given, statics in (
        ("mla_attention", (*args, jnp.asarray(mask)), static),
        ("mla_attention_selected", (*args, jnp.asarray(selected)), static),
        ("gqa_attention", (*gqa, jnp.asarray(tree)), {"scale": 0.3}),
    ):
        run = functools.partial(OPS[op], *given, platform=platform, **statics)
        assert "triton" in OPS[op].names(platform)
        exact = np.asarray(run(implementation="reference"), np.float64)
        assert error(run(implementation="triton"), exact) <= TOLERANCE[dtype]


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_splits_cover_every_tile_once(splits: int):
    tiles = dataclasses.replace(SMALL, min_tiles=2)
    for length in (0, 1, 16, 17, 100, 160):
        for block_tiles in (1, 3):
            prefix, block = [], []
            for split in range(splits):
                span = split_range(jnp.int32(length), jnp.int32(split), tiles, splits, block_tiles)
                mine = [range(*map(int, span.prefix)), range(*map(int, span.block))]
                assert bool(span.some) == any(mine)
                prefix += mine[0]
                block += mine[1]
            assert (prefix, block) == (list(range(-(-length // 16))), list(range(block_tiles)))


def test_splits_fill_the_cores():
    tiles = Tiles(64, 64, 32, 8, 2)
    for rows, low in ((1, 64), (17, 7), (65, 2), (130, 1)):
        splits = num_splits(tiles, query_tiles=rows, key_tiles=1024, platform=H200)
        waves = -(-rows * splits // 132)
        assert splits >= low and rows * splits / (132 * waves) >= 0.45, (rows, splits)
    assert num_splits(tiles, query_tiles=1, key_tiles=3, platform=H200) == 1


@pytest.mark.parametrize("platform", [H200, B200, RTX_PRO_6000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tiles_are_powers_of_two_and_fit(platform, dtype: str):
    for t in (1, 2, 17, 65, 257):
        for heads, rank, rope in ((64, 512, 64), (4, 64, 32)):
            q = jax.ShapeDtypeStruct((1, t, heads, rank + rope), dtype)
            for tiles in (mla_tiles(q, rank, platform), mla_selected_tiles(q, rank, platform)):
                for size in (tiles.rows, tiles.keys, tiles.block_keys):
                    assert size >= 16 and size & (size - 1) == 0
                if dtype == "bfloat16":
                    # Queries lie in shared memory where the tensor cores read them from there.
                    queries = 0 if platform is RTX_PRO_6000 else tiles.rows
                    held = (queries + tiles.num_stages * tiles.keys) * (rank + rope) * 2
                    assert held <= platform.shared_memory
        tiles = gqa_tiles(jax.ShapeDtypeStruct((1, t, 32, 128), dtype), 8, platform)
        assert all(size & (size - 1) == 0 for size in (tiles.rows, tiles.keys, tiles.block_keys))


def test_what_is_refused():
    _, args, mask = mla_case(9, "float32", lengths=(3,))
    mask = jnp.asarray(mask)
    mla = functools.partial(OPS["mla_attention"], rank=RANK, scale=0.3)
    with pytest.raises(NotImplementedError, match="CPU"):
        mla(*args, mask, implementation="triton", platform=HOST)
    with pytest.raises(NotImplementedError, match="powers of two"):
        OPS["mla_attention"](*args, mask, rank=24, scale=0.3, implementation="triton", platform=PLATFORM)
    with pytest.raises(ValueError, match="mask"):
        mla(*args, mask[:, :2], platform=HOST)
    with pytest.raises(ValueError, match="lengths"):
        mla(*args[:3], args[3][None], args[4], mask, platform=HOST)
    with pytest.raises(ValueError, match="layer"):
        mla(*args[:2], jnp.zeros((1,), jnp.int32), *args[3:], mask, platform=HOST)
    with pytest.raises(ValueError, match="dtypes"):
        mla(args[0], args[1].astype(jnp.bfloat16), *args[2:], mask, platform=HOST)
    with pytest.raises(ValueError, match="selected"):
        OPS["mla_attention_selected"](*args, mask, rank=RANK, scale=0.3, platform=HOST)
    gqa, tree = gqa_case(9, "float32", lengths=(3,))
    with pytest.raises(ValueError, match="KV heads"):
        OPS["gqa_attention"](gqa[0][:, :, :5], *gqa[1:], jnp.asarray(tree), scale=0.3, platform=HOST)
    wide = jax.ShapeDtypeStruct((1, 5, 4, 576), jnp.float32)
    rows = jax.ShapeDtypeStruct((1, 1, 64, 576), jnp.float32), jax.ShapeDtypeStruct((1, 5, 576), jnp.float32)
    tail = jax.ShapeDtypeStruct((1, 5, 5), jnp.bool_)
    found = OPS["mla_attention"].explain(
        wide, rows[0], *args[2:4], rows[1], tail, rank=512, scale=0.3, platform=PLATFORM
    )
    assert found["reference"] is None and "float32" in found["triton"]


@pytest.mark.parametrize("case", [c for c in cases.CASES if "8k" in c.name], ids=lambda case: case.name)
def test_cases_trace(case):
    """A case of the benchmark is a call that the reference takes, with a result of the query's rows."""
    made = jax.eval_shape(case.make, jax.random.key(0))
    out = jax.eval_shape(lambda *a: OPS[case.op](*a, platform=HOST, **case.static), *made)
    assert out.shape[:3] == made[0].shape[:3] and out.dtype == made[0].dtype
    for baseline in case.baselines.values():
        assert jax.eval_shape(baseline, *made).shape == out.shape


@pytest.mark.parametrize(("platform", "fits", "wide"), [(H200, 256, 512), (RTX_PRO_6000, 128, 256)])
def test_heads_too_wide_for_shared_memory_are_refused_before_the_compiler_is(platform, fits, wide):
    def shapes(head_dim):
        row = jax.ShapeDtypeStruct((1, 2, 2 * head_dim), jnp.bfloat16)
        cache = jax.ShapeDtypeStruct((1, 1, 64, 2 * head_dim), jnp.bfloat16)
        q = jax.ShapeDtypeStruct((1, 2, 4, head_dim), jnp.bfloat16)
        numbers = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        return q, cache, cache, *numbers, row, row, jax.ShapeDtypeStruct((1, 2, 2), jnp.bool_)

    explain = functools.partial(OPS["gqa_attention"].explain, scale=0.1, platform=platform)
    assert explain(*shapes(fits))["triton"] is None
    assert explain(*shapes(wide))["triton"].startswith(f"head dim {wide};")


@pytest.mark.parametrize(("rank", "rope"), [(1024, 64), (512, 128)])
def test_latents_too_wide_are_refused_before_the_compiler_is(rank, rope):
    c = rank + rope
    q, cache = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 2, 64, c), (1, 1, 64, c)))
    row, mask = jax.ShapeDtypeStruct((1, 2, c), jnp.bfloat16), jax.ShapeDtypeStruct((1, 2, 2), jnp.bool_)
    numbers = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    reasons = OPS["mla_attention"].explain(q, cache, *numbers, row, mask, rank=rank, scale=0.1, platform=H200)
    assert f"rank {rank} and rope {rope}" in reasons["triton"] and reasons["mosaic"] and reasons["reference"] is None
