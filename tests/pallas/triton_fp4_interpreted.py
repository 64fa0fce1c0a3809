"""Runs the kernel of `triton_fp4` on the CPU, in Triton's interpreter, against float64; exits 1 where it is wrong.

A process of its own: it needs TRITON_INTERPRET=1 before triton is imported, and triton need not be in the environment
of the tests. It shows that the kernel's source addresses, splits and stores what it should; what a compiler makes of
`tl.dot_scaled` is another matter. The interpreter knows only e8m0 scales, so its decoder of scales is replaced.
"""

import sys
import warnings

import ml_dtypes
import numpy as np

warnings.simplefilter("ignore")

from triton.runtime import interpreter  # noqa: E402

from ddtree_jax.pallas.triton_fp4_kernel import w4a4_kernel  # noqa: E402

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
GUARD = 64  # elements after an array that must stay as they are


class Array:
    """The little of a torch tensor that Triton's interpreter asks for, over numpy memory."""

    def __init__(self, array, dtype):
        self.array, self.dtype = array, dtype

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return Array(self.array, self.dtype)

    def set_(self, *_):
        pass

    def copy_(self, other):
        assert other.array is self.array

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return ()


def decode_e4m3(handle, _):
    return handle.data.view(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def side(rows, k, rng):
    codes = rng.integers(0, 256, (rows, k // 2), dtype=np.uint8)
    scales = np.exp2(rng.uniform(-8, 8, (rows, k // 16))).astype(ml_dtypes.float8_e4m3fn)
    values = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(rows, k)]
    return codes, scales, values * np.repeat(scales.astype(np.float64), 16, axis=1)


def error(m, n, k, block_m, block_n, block_k, split, weights_first):
    """Largest error over largest result; inf where memory after the result was touched."""
    rng = np.random.default_rng()
    x_codes, x_scales, x = side(m, k, rng)
    w_codes, w_scales, w = side(n, k, rng)
    factor = np.array([0.37], np.float32)
    memory = np.full(split * m * n + GUARD, np.nan, np.float32)
    operands = [
        Array(x_codes, "uint8"),
        Array(x_scales, "float8_e4m3fn"),
        Array(w_codes, "uint8"),
        Array(w_scales, "float8_e4m3fn"),
        Array(factor, "float32"),
        Array(memory, "float32"),
    ]
    sizes = dict(rows=m, N=n, K=k, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, SPLIT_K=split)
    w4a4_kernel[(n // block_n, m // block_m, split)](*operands, **sizes, WEIGHTS_FIRST=weights_first)
    if not np.isnan(memory[-GUARD:]).all():
        return np.inf
    parts = memory[:-GUARD].reshape(split, m, n).astype(np.float64)
    got = parts[0] if split == 1 else parts.sum(0) * float(factor[0])
    exact = x @ w.T * float(factor[0])
    return np.abs(got - exact).max() / np.abs(exact).max()


def main():
    interpreter._dot_scaled_scale_to_f32 = decode_e4m3
    worst = 0.0
    for weights_first in (False, True):
        for m, n, k, block_k, split in ((16, 128, 64, 64, 1), (32, 256, 512, 128, 1), (48, 128, 768, 128, 3)):
            found = error(m, n, k, 16, 128 if weights_first else 64, block_k, split, weights_first)
            print(f"weights first {weights_first}, {m} x {n} x {k}, {split} parts: {found:.1e}")
            worst = max(worst, np.inf if np.isnan(found) else found)
    return int(worst > 2e-6)


if __name__ == "__main__":
    sys.exit(main())
