"""The word grid: every code under every scale comes back exactly, and activations are split without loss."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ddtree_jax.pallas.nvfp4_fragments import SPREAD
from ddtree_jax.pallas.nvfp4_grid import (
    BYTES,
    FRAGMENTS,
    GROUPS,
    ROWS,
    SHIFTED,
    STEP,
    decode_grid,
    make_grid,
    num_parts,
    prepare_rows,
    split_float32,
)
from ddtree_jax.pallas.nvfp4_kernel import shifted
from tests.pallas.nvfp4_weights import E2M1, E4M3, pack, values

ARRANGEMENTS = pytest.mark.parametrize("arrangement", [SHIFTED, BYTES, FRAGMENTS])
# 17 groups, so that the last step of 16 is padded; 70 columns, so that the last block of 64 is.
K, PARTS, WIDTH = 272, 2, 70


def every_pair(rng):
    """Codes [K, PARTS, WIDTH] and scales of which every group holds all 16 codes, and every byte is a scale."""
    codes = rng.permuted(np.tile(np.arange(16, dtype=np.uint8), (K // 16, PARTS, WIDTH, 1)), axis=-1)
    count = K // 16 * PARTS * WIDTH
    scales = rng.permutation(np.resize(np.arange(256, dtype=np.uint8), count)).reshape(K // 16, PARTS, WIDTH)
    return np.moveaxis(codes, -1, 1).reshape(K, PARTS, WIDTH), scales.view(E4M3)


@ARRANGEMENTS
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_code_under_every_scale_comes_back_exactly(arrangement, dtype):
    codes, scales = every_pair(np.random.default_rng())
    with np.errstate(invalid="ignore"):
        want = values(codes, scales)
    seen = np.zeros((16, 256), bool)
    seen[codes, np.repeat(scales.view(np.uint8), 16, axis=0)] = True
    assert seen.all()
    grid = make_grid(pack(codes), scales, np.float32(1), arrangement=arrangement)
    assert (grid.k, grid.parts, grid.width, grid.lead, grid.arrangement) == (K, PARTS, WIDTH, (), arrangement)
    assert grid.words.shape == (4, 2, 2, ROWS, GROUPS) and grid.scales.shape == (4, 2, ROWS, GROUPS)
    assert grid.nbytes == grid.words.size * 4 + grid.scales.size + 4 * 4
    got = np.asarray(decode_grid(grid, dtype)).astype(np.float64)
    np.testing.assert_array_equal(got, want)  # NaN equals NaN
    assert np.isnan(got).any() and (got[np.repeat(scales.view(np.uint8), 16, axis=0) & 127 == 0] == 0).all()


@ARRANGEMENTS
def test_stacks_and_factors_of_their_own(arrangement):
    rng = np.random.default_rng()
    lead = (2, 3)
    codes = rng.integers(0, 16, (*lead, 48, PARTS, 20), dtype=np.uint8)
    scales = rng.choice(np.arange(127, dtype=np.uint8), (*lead, 3, PARTS, 20)).view(E4M3)
    factors = rng.uniform(0.01, 1, (*lead, PARTS)).astype(np.float32)
    grid = make_grid(pack(codes), scales, factors, arrangement=arrangement)
    assert grid.lead == lead and grid.num_blocks == 2 and grid.num_steps == 1
    # Code times scale is exact in float32, so each weight is rounded once.
    want = values(codes, scales).astype(np.float32) * factors[..., None, :, None]
    np.testing.assert_array_equal(decode_grid(grid, jnp.float32), want)
    one = dataclasses.replace(grid, words=grid.words[1, 2], scales=grid.scales[1, 2], factors=grid.factors[1, 2])
    np.testing.assert_array_equal(decode_grid(one, jnp.float32), want[1, 2])


@ARRANGEMENTS
def test_padding_is_zero(arrangement):
    rng = np.random.default_rng()
    codes = rng.integers(0, 16, (K, PARTS, WIDTH), dtype=np.uint8)
    scales = np.full((K // 16, PARTS, WIDTH), 1.5, E4M3)
    grid = make_grid(pack(codes), scales, np.float32(1), arrangement=arrangement)
    whole = dataclasses.replace(grid, k=grid.num_steps * STEP, width=grid.num_blocks // PARTS * ROWS)
    plain = np.asarray(decode_grid(whole, jnp.float32))
    assert plain.shape == (512, PARTS, 128)
    assert not plain[K:].any() and not plain[:, :, WIDTH:].any() and plain[:K, :, :WIDTH].any()


@pytest.mark.parametrize("arrangement", [SHIFTED, BYTES])
def test_where_codes_lie_in_the_words(arrangement):
    """Code i of an even and an odd group: as documented, so that a kernel's bit arithmetic may be checked by hand."""
    for i, (even, odd) in itertools.product(range(16), [(11, 0), (0, 6), (13, 2)]):
        codes = np.zeros((32, 1, 1), np.uint8)
        codes[i], codes[16 + i] = even, odd
        grid = make_grid(pack(codes), np.ones((2, 1, 1), E4M3), np.float32(1), arrangement=arrangement)
        words = np.asarray(grid.words).view(np.uint32)[0, 0, :, 0, :2]  # [half of i, element of the pair]
        word = int(words[i // 8, i // 4 % 2])
        assert words.sum() == word  # nothing in the other three
        position = i % 4
        if arrangement == BYTES:
            assert word == (even | odd << 4) << 8 * position
            continue
        want = [(code >> 3) << 15 | (code & 7) << 6 for code in (even, odd)]
        assert run_ptx(shifted("$1", position), word) == want[0] | want[1] << 16


def test_where_fragments_lie():
    """Words and scales are those that a thread of a warpgroup needs of wgmma's left operand, in the order of threads.

    PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16", matrix A: register 2 q + h of thread 32 w + 4 g + c
    holds row 16 w + g + 8 h at inputs 8 q + 2 c and, in its upper half, 8 q + 2 c + 1.
    """
    rng = np.random.default_rng()
    codes = rng.integers(0, 16, (K, PARTS, WIDTH), dtype=np.uint8)
    scales = rng.integers(8, 127, (K // 16, PARTS, WIDTH), dtype=np.uint8)  # normal ones, positive
    grid = make_grid(pack(codes), scales.view(E4M3), np.float32(1), arrangement=FRAGMENTS)
    # What a kernel reads, of every tile: 4 words of each thread for each 64 inputs, 8 scales of each four threads.
    words = np.asarray(grid.words).view(np.uint32).reshape(PARTS, 2, 2, 4, 128, 4)
    scale_bytes = np.asarray(grid.scales).reshape(PARTS, 2, 2, 4, 32, 8)
    seen = np.zeros(words.shape, np.uint32)  # of each word, how many codes lie in it
    for k, part in itertools.product(range(K), range(PARTS)):
        column = np.arange(WIDTH)
        block, row = column // 64, column % 64
        step, chunk, group, q, c, upper = k // 256, k % 256 // 64, k % 64 // 16, k % 16 // 8, k % 8 // 2, k % 2
        warp, h, g = row // 16, row % 16 // 8, row % 8
        at = part, block, step, chunk, 32 * warp + 4 * g + c, group
        np.add.at(seen, at, 1)
        taken = [run_ptx(shifted("$1", 2 * q + half), words[at]) >> 16 * upper & 0xFFFF for half in range(2)]
        code = codes[k, part].astype(np.uint32)
        np.testing.assert_array_equal(np.where(h == 0, *taken), (code >> 3) << 15 | (code & 7) << 6)
        # Five bits of exponent, whose bias is 10 where e4m3 has 7.
        stored = scale_bytes[part, block, step, chunk, 8 * warp + g, 4 * h + group]
        np.testing.assert_array_equal(stored, scales[k // 16, part] + 3 * 8)
    assert set(np.unique(seen)) == {0, 4, 8} and not words[seen == 0].any()


def test_scale_bytes_are_taken_apart():
    """Each byte as a positive bfloat16, in both halves of a product's operand: 2^e times what the byte means."""
    rng = np.random.default_rng()
    scales = rng.integers(0, 151, (100, 4), dtype=np.uint8)  # up to the largest of e4m3, whose bias is 3 less
    pairs = [run_ptx(text, scales.view(np.uint32)[:, 0]) for text in SPREAD]
    found = np.stack([pairs[group % 2] >> 16 * (group // 2) & 0xFFFF for group in range(4)], axis=1)
    values = found.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    mantissa = 1 + (scales & 7) / 8
    np.testing.assert_array_equal(values, mantissa * np.exp2((scales >> 3).astype(np.float64) + 0xEC - 127))


def run_ptx(text, word):
    """What the instructions leave in `a`, or in the result $0, for words in $1: uint32 arrays, or numbers.

    PTX ISA: integer, logic and shift instructions, `prmt` without modes.
    """
    word = np.asarray(word, np.uint32)
    known = {"$1": word}

    def value(name):
        return known[name] if name in known else np.uint32(int(name, 0))

    def permuted(a, b, selector):
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        bytes_ = [both >> np.uint64(8 * (int(selector) >> 4 * i & 7)) & np.uint64(255) for i in range(4)]
        return sum(byte << np.uint64(8 * i) for i, byte in enumerate(bytes_)).astype(np.uint32)

    operations = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "add.u32": lambda a, b: a + b,
        "shl.b32": lambda a, b: a << b,
        "shr.u32": lambda a, b: a >> b,
        "shf.l.wrap.b32": lambda low, high, n: high << n | low >> np.uint32(32) - n,
        # 0xEA: a and b, or c
        "lop3.b32": lambda a, b, c, table: {0xEA: a & b | c}[int(table)],
        "prmt.b32": permuted,
    }
    for line in text.split(";"):
        name, _, rest = line.strip().partition(" ")
        if name not in ("", ".reg"):
            into, *given = (part.strip() for part in rest.split(","))
            known[into] = operations[name](*map(value, given))
    return known["$0"] if "$0" in known else known["a"]


def random_float32(rng, shape):
    """All signs, exponents down to where the third part is still normal, and mantissas of all 24 bits."""
    mantissa = rng.integers(2**23, 2**24, shape).astype(np.float64)
    x = rng.choice([-1, 1], shape) * mantissa * np.exp2(rng.integers(-120, 103, shape).astype(np.float64))
    x.flat[:4] = [0.0, -1.0, 1 + 2.0**-23, 1.5]
    return x.astype(np.float32)


@pytest.mark.parametrize("jit", [False, True])
def test_three_parts_sum_to_the_float32(jit):
    x = random_float32(np.random.default_rng(), (4096,))
    parts = (jax.jit(split_float32) if jit else split_float32)(x)
    assert len(parts) == num_parts(jnp.float32) == 3 and all(part.dtype == jnp.bfloat16 for part in parts)
    parts = [np.asarray(part).astype(np.float64) for part in parts]
    np.testing.assert_array_equal(sum(parts), x.astype(np.float64))
    assert all(np.all(np.abs(b) <= np.abs(a) * 2.0**-8) for a, b in itertools.pairwise(parts))
    assert np.mean(parts[2] != 0) > 0.5


@pytest.mark.parametrize("join", [1, 2, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_lie_as_documented(dtype, join):
    rng = np.random.default_rng()
    m, steps = 3, 2
    x = jnp.asarray(random_float32(rng, (m, K)), dtype)
    got = np.asarray(jax.jit(prepare_rows, static_argnums=(1, 2))(x, steps, join))
    assert got.dtype == jnp.bfloat16
    parts = num_parts(dtype)
    assert got.shape == (parts, steps, 16 // join, m, join * GROUPS)
    pieces = [x] if parts == 1 else split_float32(x)
    for p, s, n, g, j in itertools.product(range(parts), range(steps), range(16 // join), range(GROUPS), range(join)):
        k = 256 * s + 16 * g + join * n + j
        want = np.asarray(pieces[p])[:, k] if k < K else np.zeros(m)
        np.testing.assert_array_equal(got[p, s, n, :, join * g + j].astype(np.float32), want.astype(np.float32))


def test_the_table_of_values():
    np.testing.assert_array_equal(E2M1, np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn.dtype).astype(np.float64))
