"""The sum over a window's rows, leaf by leaf, in one order on every route.

A leaf is eight rows whose positions begin at a multiple of eight. The running state is three vectors: the
largest score met, the sum of weights exp(score - largest), and the sum of weighted values. A leaf enters as
((r0 + r4) + (r2 + r6)) + ((r1 + r5) + (r3 + r7)), however its rows were loaded: as one tile or one by one.
A row that does not exist has a score of -inf and a value of 0; a leaf without a row changes nothing.
"""

import triton
import triton.language as tl

from ..contract import HEAD_DIM

SCORES = tl.constexpr(HEAD_DIM)
LEAF = tl.constexpr(8)


@triton.jit
def empty_state(BLOCK_D: tl.constexpr):
    """Of no row: -inf, 0 and 0, fp32 [BLOCK_D] each."""
    return (
        tl.full([BLOCK_D], float("-inf"), tl.float32),
        tl.zeros([BLOCK_D], tl.float32),
        tl.zeros([BLOCK_D], tl.float32),
    )


@triton.jit
def add_halves(x, LENGTH: tl.constexpr):
    """[LENGTH] -> [LENGTH / 2]: x[i] + x[i + LENGTH / 2], one addition each, whatever the lowering."""
    return tl.sum(tl.reshape(x, (2, LENGTH // 2)), axis=0)


@triton.jit
def add_tile(x, BLOCK_D: tl.constexpr):
    """[8, BLOCK_D] -> [BLOCK_D] in the leaf's order."""
    flat = tl.reshape(x, (LEAF * BLOCK_D,))
    return add_halves(add_halves(add_halves(flat, 8 * BLOCK_D), 4 * BLOCK_D), 2 * BLOCK_D)


@triton.jit
def larger(a, b):
    """A comparison and a choice: a maximum proper also minds NaN, which costs four more instructions here."""
    return tl.where(a > b, a, b)


@triton.jit
def raise_top(top, largest):
    """The new maximum; the same with 0 for -inf, which differences are taken to; the old state's scale."""
    raised = larger(top, largest)
    # While no row was met, -inf minus -inf would be NaN.
    finite = tl.where(raised > float("-inf"), raised, 0.0)
    return raised, finite, tl.exp(top - finite)


@triton.jit
def fold_tile(top, weight, total, values, scores, BLOCK_D: tl.constexpr):
    """One leaf, loaded as a tile [8, BLOCK_D], into the state."""
    raised, finite, scale = raise_top(top, tl.max(scores, axis=0))
    terms = tl.exp(scores - finite[None, :])
    weight = weight * scale + add_tile(terms, BLOCK_D)
    total = total * scale + add_tile(terms * values, BLOCK_D)
    return raised, weight, total


@triton.jit
def load_row(lane, offset, exists):
    """Values and scores [BLOCK_D] of the row at `offset`, which must be readable even if it is masked."""
    values = tl.load(lane + offset)
    scores = tl.load(lane + offset + SCORES)
    return tl.where(exists, values, 0.0), tl.where(exists, scores, float("-inf"))


@triton.jit
def fold_rows(
    top, weight, total, v0, v1, v2, v3, v4, v5, v6, v7, s0, s1, s2, s3, s4, s5, s6, s7
):  # fmt: skip
    """One leaf, loaded row by row, into the state: the bytes of fold_tile."""
    low = larger(larger(s0, s1), larger(s2, s3))
    high = larger(larger(s4, s5), larger(s6, s7))
    raised, finite, scale = raise_top(top, larger(low, high))
    w0, w1, w2, w3 = tl.exp(s0 - finite), tl.exp(s1 - finite), tl.exp(s2 - finite), tl.exp(s3 - finite)
    w4, w5, w6, w7 = tl.exp(s4 - finite), tl.exp(s5 - finite), tl.exp(s6 - finite), tl.exp(s7 - finite)
    weight = weight * scale + (((w0 + w4) + (w2 + w6)) + ((w1 + w5) + (w3 + w7)))
    total = total * scale + (
        ((w0 * v0 + w4 * v4) + (w2 * v2 + w6 * v6)) + ((w1 * v1 + w5 * v5) + (w3 * v3 + w7 * v7))
    )
    return raised, weight, total


@triton.jit
def mean(weight, total):
    """The weighted mean. The added zero makes a vanished negative sum the +0 that a skipped leaf leaves."""
    return total / weight + 0.0
