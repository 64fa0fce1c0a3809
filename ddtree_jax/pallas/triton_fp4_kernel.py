"""The Triton source of `triton_fp4`. Imports triton: to be imported only where a kernel is about to be compiled."""

import triton
import triton.language as tl


@triton.jit
def w4a4_kernel(
    x_codes,
    x_scales,
    w_codes,
    w_scales,
    factor,
    out,
    rows: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):
    """One [BLOCK_M, BLOCK_N] tile of x w^T over one part of K; operands as in `nvfp4_w4a4_matmul`, x padded to `rows`.

    With SPLIT_K 1, `out` is [rows, N] and holds the product times `factor` [1]; else float32 [SPLIT_K, rows, N] of bare
    sums. WEIGHTS_FIRST makes the weights the left operand: tcgen05 needs 128 rows there.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(2)
    byte = tl.arange(0, BLOCK_K // 2)
    group = tl.arange(0, BLOCK_K // 16)
    first = part * (K // SPLIT_K)
    # A stacked weight of experts may pass 2**31 bytes; one linear does not, but offsets are cheap next to the loads.
    row_n = n.to(tl.int64)
    if WEIGHTS_FIRST:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, K // SPLIT_K, BLOCK_K):
        k = first + step
        xs = tl.load(x_scales + m[:, None] * (K // 16) + (k // 16 + group)[None, :])
        ws = tl.load(w_scales + row_n[:, None] * (K // 16) + (k // 16 + group)[None, :])
        if WEIGHTS_FIRST:
            w = tl.load(w_codes + row_n[:, None] * (K // 2) + (k // 2 + byte)[None, :])
            x = tl.load(x_codes + m[None, :] * (K // 2) + (k // 2 + byte)[:, None])
            acc = tl.dot_scaled(w, ws, "e2m1", x, xs, "e2m1", acc)
        else:
            x = tl.load(x_codes + m[:, None] * (K // 2) + (k // 2 + byte)[None, :])
            w = tl.load(w_codes + row_n[None, :] * (K // 2) + (k // 2 + byte)[:, None])
            acc = tl.dot_scaled(x, xs, "e2m1", w, ws, "e2m1", acc)
    if SPLIT_K == 1:
        acc = acc * tl.load(factor)
    place = out + part.to(tl.int64) * (rows * N)
    if WEIGHTS_FIRST:
        tl.store(place + m[None, :] * N + n[:, None], acc.to(out.dtype.element_ty))
    else:
        tl.store(place + m[:, None] * N + n[None, :], acc.to(out.dtype.element_ty))
