"""Top-K and logsumexp in two kernels, interpreted: ids and values bit for bit those of a stable sort."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.pallas import vocab_kernels
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import B200, H200, HOST, INTERPRETED, OTHER_GPU, RTX_PRO_6000, Platform
from ddtree_jax.pallas.choice import KernelChoice
from ddtree_jax.pallas.compile_programs import kernel_equations, pallas_name
from ddtree_jax.pallas.vocab_kernels import Tiles, topk_logsumexp
from ddtree_jax.pallas.vocab_topk import VocabTopK, vocab_topk
from ddtree_jax.tree import build_tree

KERNELS = ["vocab_topk_read", "vocab_topk_choose"]
LARGEST = np.finfo(np.float32).max

# Each draws one row. What makes a level of the descent keep more than a bound lets through: many equal maxima, and
# all of the best in few blocks.
ROWS = {
    "normal": lambda rng, n: rng.normal(size=n) * 4,
    "tied": lambda rng, n: np.round(rng.normal(size=n)),
    "equal": lambda rng, n: np.full(n, -1.5),
    "two values": lambda rng, n: rng.integers(0, 2, n),
    "signed zeros": lambda rng, n: rng.choice([0.0, -0.0], n),
    "zeros above": lambda rng, n: np.where(rng.random(n) < 0.1, rng.choice([0.0, -0.0], n), -rng.random(n)),
    "ascending": lambda rng, n: np.sort(rng.normal(size=n)),
    "descending": lambda rng, n: -np.sort(rng.normal(size=n)),
    "one block": lambda rng, n: rng.normal(size=n) + 50 * (np.arange(n) // 256 == rng.integers(0, n // 256 + 1)),
    "near": lambda rng, n: np.nextafter(np.float32(8), np.float32(9)) + rng.integers(0, 40, n) * np.float32(1e-6),
    "negative": lambda rng, n: -np.exp(rng.normal(size=n) * 8),
    "wide": lambda rng, n: rng.choice([-1, 1], n) * LARGEST * rng.random(n),
    "masked": lambda rng, n: np.where(rng.random(n) < 0.995, -np.inf, rng.normal(size=n)),
    "all masked": lambda rng, n: np.full(n, -np.inf),
    "nan": lambda rng, n: np.where(rng.random(n) < 0.5, np.nan, rng.normal(size=n)),
    "all nan": lambda rng, n: np.full(n, np.nan),
    "infinite": lambda rng, n: np.where(rng.random(n) < 0.1, np.inf, rng.normal(size=n)),
    "last alone": lambda rng, n: np.where(np.arange(n) == n - 1, -3.0, -np.inf),
}


def draw(vocab: int) -> np.ndarray:
    """float32[kinds of rows, vocab]."""
    rng = np.random.default_rng()
    return np.stack([row(rng, vocab).astype(np.float32) for row in ROWS.values()])


def assert_exact(logits, k, got):
    """logits: [R, V] as the operation took them."""
    with np.errstate(over="ignore"):
        clean = np.asarray(logits).astype(np.float64)
    clean = np.where(np.isfinite(clean), clean, -np.inf) + 0.0  # -0.0 + 0.0 = 0.0
    ids = np.argsort(-clean, axis=-1, kind="stable")[:, :k]
    values = np.take_along_axis(clean, ids, axis=-1).astype(np.float32)
    peak = np.max(clean, axis=-1, keepdims=True)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    with np.errstate(divide="ignore"):
        want = np.log(np.sum(np.exp(clean - peak), axis=-1)) + peak[:, 0]
    np.testing.assert_array_equal(got.token_ids, ids)
    np.testing.assert_array_equal(np.asarray(got.values).view(np.int32), values.view(np.int32))
    np.testing.assert_allclose(got.logsumexp, want, rtol=1e-6)
    assert (got.token_ids.dtype, got.values.dtype, got.logsumexp.dtype) == (jnp.int32, jnp.float32, jnp.float32)


def run(logits, k, platform=INTERPRETED):
    return OPS["vocab_topk"](logits, k, implementation="triton", platform=platform)


SIZES = [
    (20, 30),
    (4096, 64),
    (5003, 16),
    *(pytest.param(*size, marks=pytest.mark.slow) for size in ((1, 1), (1000, 1), (257, 16), (3001, 32), (9001, 128))),
]


@pytest.mark.parametrize("vocab, k", SIZES)
def test_equals_stable_sort(vocab, k):
    logits = draw(vocab)
    assert_exact(logits, min(k, vocab), run(logits, k))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
def test_narrow_logits_rank_as_their_float32_values(dtype):
    logits = jnp.asarray(draw(2500)).astype(dtype)
    assert_exact(logits.astype(jnp.float32), 32, run(logits, 32))


@pytest.mark.parametrize(
    "tiles",
    [
        Tiles(columns=256, digit=1, short_digit=1, enough=1.0),
        pytest.param(Tiles(columns=1024, digit=2, short_digit=4, enough=2.0), marks=pytest.mark.slow),
        pytest.param(Tiles(columns=8192, digit=8, short_digit=8, enough=1.0), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_choice_of_tiles_changes_the_answer(tiles):
    logits = draw(5000)
    call = jax.jit(functools.partial(topk_logsumexp, k=70, platform=INTERPRETED, tiles=tiles))
    assert_exact(logits, 70, VocabTopK(*call(logits)))


@pytest.mark.parametrize(
    "tiles", [Tiles(columns=128), Tiles(columns=3000), Tiles(digit=3), Tiles(enough=0.5), Tiles(enough=3.0)], ids=str
)
def test_wrong_tiles_are_refused(tiles):
    with pytest.raises(ValueError, match="tiles"):
        topk_logsumexp(jnp.zeros((2, 500)), 4, platform=INTERPRETED, tiles=tiles)


def test_leading_axes_and_the_same_logsumexp_for_every_k():
    logits = np.random.default_rng().normal(size=(2, 3, 700)).astype(np.float32)
    got = run(logits, 9)
    assert got.values.shape == got.token_ids.shape == (2, 3, 9) and got.logsumexp.shape == (2, 3)
    flat = jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), got)
    assert_exact(logits.reshape(6, 700), 9, flat)
    np.testing.assert_array_equal(run(logits, 1).logsumexp, got.logsumexp)
    np.testing.assert_array_equal(run(logits, 1).token_ids, got.token_ids[..., :1])
    row = jax.eval_shape(lambda x: run(x, 9), logits[1, 2])
    assert row.values.shape == row.token_ids.shape == (9,) and row.logsumexp.shape == ()


def kernels(function, *args) -> list[str | None]:
    return [pallas_name(equation) for equation in kernel_equations(jax.make_jaxpr(function)(*args).jaxpr)]


def test_what_the_kernels_do_not_serve_goes_to_the_next():
    def served(shape, k, platform: Platform, dtype=jnp.float32):
        logits = jax.ShapeDtypeStruct(shape, dtype)
        return OPS["vocab_topk"].explain(logits, platform=platform, k=k)["triton"] is None

    for platform in (H200, B200, RTX_PRO_6000):
        assert OPS["vocab_topk"].names(platform) == ("triton", "block_descent", "reference")
        assert served((15, 154880), 128, platform)
    assert OPS["vocab_topk"].names(Platform(OTHER_GPU)) == ("block_descent", "reference")
    assert not served((15, 154880), 128, HOST) and not served((15, 154880), 128, Platform(OTHER_GPU))
    assert not served((15, 154880), 129, H200)
    assert served((15, vocab_kernels.MAX_VOCAB), 8, H200) and not served((15, vocab_kernels.MAX_VOCAB + 1), 8, H200)
    with pytest.raises(NotImplementedError, match="row"):
        run(np.zeros((0, 500), np.float32), 8)
    assert not served((2, 500), 8, H200, jnp.float8_e4m3fn)
    assert served((2, 100), 500, H200)  # k is cut to the vocabulary first

    logits = np.random.default_rng().normal(size=(2, 400)).astype(np.float32)
    call = functools.partial(OPS["vocab_topk"], platform=INTERPRETED)
    assert kernels(lambda x: call(x, 129), logits) == []
    assert kernels(lambda x: call(x, 128), logits) == KERNELS
    assert_exact(logits, 129, call(logits, 129))


@pytest.mark.parametrize("k", [0, -3, 2.0, True])
def test_wrong_k_is_named(k):
    with pytest.raises(ValueError, match="k:"):
        run(np.zeros((2, 4), np.float32), k)


def test_wrong_logits_are_named():
    for logits in (np.zeros((2, 0), np.float32), np.zeros((2, 4), np.int32)):
        with pytest.raises(ValueError, match="logits"):
            run(logits, 1)


def test_a_choice_of_kernels_reaches_the_tree():
    logits = np.random.default_rng().normal(size=(2, 4, 900)).astype(np.float32)
    roots = np.arange(2, dtype=np.int32)
    choice = KernelChoice(INTERPRETED)
    build = functools.partial(build_tree, budget=12)
    assert kernels(functools.partial(build, topk_implementation=choice), logits, roots) == KERNELS
    for plain in ("auto", KernelChoice()):
        assert kernels(functools.partial(build, topk_implementation=plain), logits, roots) == []
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-6),
            build(logits, roots, topk_implementation=choice),
            build(logits, roots, topk_implementation=plain),
        )
    assert kernels(lambda x: vocab_topk(x, 4, implementation=choice), logits) == KERNELS
    assert kernels(lambda x: vocab_topk(x, 4, implementation=KernelChoice()), logits) == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    "vocab, k, dtype",
    [
        *((154880, k, jnp.float32) for k in (1, 16, 32, 64, 128)),
        (154880, 32, jnp.bfloat16),
        (100003, 64, jnp.float32),
        (100003, 64, jnp.bfloat16),
        (2**18, 100, jnp.float32),
        (777, 100, jnp.float32),
    ],
)
def test_on_the_gpu(vocab, k, dtype):
    logits = jnp.asarray(draw(vocab)).astype(dtype)
    assert_exact(logits.astype(jnp.float32), k, OPS["vocab_topk"](logits, k, implementation="triton"))
