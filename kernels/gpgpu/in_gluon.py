"""The Triton functions that the Gluon kernels share with compress.py: the same text, with explicit layouts.

So are the bytes the same, whichever kernel a call gets.
"""

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
