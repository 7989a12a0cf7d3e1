"""What the Gluon kernels share: with compress.py its functions, the same text with explicit layouts.

So are the bytes the same, whichever kernel a call gets.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from . import compress, finalize, scan

locate = gluon.jit(compress.locate.fn)
finish = gluon.jit(finalize.finish.fn)
load_rotation = gluon.jit(finalize.load_rotation.fn)
load_weight = gluon.jit(finalize.load_weight.fn)
tile_sums = gluon.jit(finalize.tile_sums.fn)
end_part = gluon.jit(scan.end_part.fn)
fold = gluon.jit(scan.fold.fn)
leaf_floor = gluon.jit(scan.leaf_floor.fn)
leaf_offsets = gluon.jit(scan.leaf_offsets.fn)
load_row = gluon.jit(scan.load_row.fn)
lookup = gluon.jit(scan.lookup.fn)


@gluon.jit
def fold_leaf(ring, at, top, weight, total, LAYOUT: gl.constexpr):
    """scan.fold of four existing rows, whose values and scores lie in turn in the ring from `at` on."""
    v0 = ring.index(at).load(LAYOUT)
    s0 = ring.index(at + 1).load(LAYOUT)
    v1 = ring.index(at + 2).load(LAYOUT)
    s1 = ring.index(at + 3).load(LAYOUT)
    v2 = ring.index(at + 4).load(LAYOUT)
    s2 = ring.index(at + 5).load(LAYOUT)
    v3 = ring.index(at + 6).load(LAYOUT)
    s3 = ring.index(at + 7).load(LAYOUT)
    return fold(top, weight, total, v0, v1, v2, v3, s0, s1, s2, s3, scan.LEAST, True)
