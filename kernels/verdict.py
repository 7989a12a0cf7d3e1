"""Compares what a launch left in kv_cache with the oracle, byte by byte, and names every wrong one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .contract import (
    KV_BLOCK_SIZE,
    MIN_PAGE_STRIDE,
    NOPE_HEAD_DIM,
    NUM_GROUPS,
    QUANT_GROUP,
    SCALE_BIAS,
    SCALE_DIM,
    SCALE_OFFSET,
    TOKEN_STRIDE,
)
from .numerics import bf16_bits, group_exponent, quantise, round_to_bf16_from_f64
from .oracle import Expectation

ROPE_TOLERANCE = 1.0e-2
MAX_FAULTS = 16

# A run over random normal data may show fewer than one accepted tie in so many bytes, and fewer than
# this multiple of what the float32 reference shows on the same input, plus a few.
BYTES_PER_TIE = 10_000
REFERENCE_FACTOR = 1.5
REFERENCE_SLACK = 8


@dataclass(frozen=True)
class Fault:
    """One wrong byte, or one wrong two-byte RoPE value.

    kind:   "int8", "scale", "pad" (the 8th scale byte), "rope", "skipped" (a byte in the slot of an output
            that must not be written) or "untouched" (any other byte that belongs to no output).
    output: index into boundary_token_indices; -1 for "untouched".
    page, offset: where in kv_cache; the offset in bytes from the start of the page.
    wanted, found: the byte, unsigned; for "rope" the 16 bits.
    """

    kind: str
    output: int
    page: int
    offset: int
    wanted: int
    found: int

    def __str__(self) -> str:
        digits = 4 if self.kind == "rope" else 2
        owner = f"output {self.output}, " if self.output >= 0 else ""
        return (f"{self.kind}: {owner}page {self.page}, byte {self.offset}: "
                f"wanted 0x{self.wanted:0{digits}x}, found 0x{self.found:0{digits}x}")


@dataclass(frozen=True)
class Verdict:
    """What `judge` found.

    outputs:           outputs compared byte by byte.
    excluded:          written outputs whose bytes are not specified (or whose slot another output names too).
    bytes_compared:    584 for each output compared.
    differing:         bytes of these that are not the oracle's.
    ties:              differing bytes that are accepted: the oracle's own value lies at a rounding tie.
    wrong:             bytes that are not accepted. (Under a scale byte that is an accepted tie, a code
                       equal to the oracle's may be the wrong one.)
    untouched_bytes:   bytes of kv_cache that belong to no written output, each compared with before.
    untouched_changed: those that changed.
    rope_error:        largest |found - wanted| / max(1, |wanted|) over the RoPE values.
    faults:            the first few wrong or changed bytes, at most MAX_FAULTS of each sort.
    """

    outputs: int
    excluded: int
    bytes_compared: int
    differing: int
    ties: int
    wrong: int
    untouched_bytes: int
    untouched_changed: int
    rope_error: float
    faults: tuple[Fault, ...]

    @property
    def right(self) -> bool:
        """No wrong byte and no changed byte; accepted ties are right."""
        return self.wrong == 0 and self.untouched_changed == 0

    @property
    def passes_challenge(self) -> bool:
        """The challenge's own check: INT8 and scale bytes equal but for ties, RoPE within 1e-2."""
        return self.rope_error <= ROPE_TOLERANCE and not any(
            fault.kind in ("int8", "scale", "pad") for fault in self.faults)

    def __str__(self) -> str:
        text = (f"{self.outputs} outputs, {self.bytes_compared} bytes compared: {self.wrong} wrong, "
                f"{self.ties} accepted ties; {self.untouched_changed} of {self.untouched_bytes} "
                f"untouched bytes changed")
        if self.excluded:
            text += f"; {self.excluded} outputs not specified"
        return "\n  ".join((text, *map(str, self.faults)))


@dataclass(frozen=True)
class _Section:
    """One part of the slots: uint8 or 16-bit values as int32 [n, width]; wrong and differing alike."""

    kind: str
    wanted: Tensor
    found: Tensor
    wrong: Tensor
    first_byte: int
    value_bytes: int = 1

    def count(self, chosen: Tensor) -> int:
        if self.value_bytes == 1:
            return int(chosen.sum())
        changed = self.wanted ^ self.found
        each = ((changed & 0xFF) != 0).to(torch.int64) + ((changed >> 8) != 0).to(torch.int64)
        return int(torch.where(chosen, each, 0).sum())


def judge(kv_after: Tensor, kv_before: Tensor, oracle: Expectation) -> Verdict:
    """Compares every byte of `kv_after` with the oracle, or with `kv_before` where no output belongs.

    kv_after, kv_before: uint8 [kv_pages, page_stride], any page stride; a launch into a new zeroed tensor is
    judged with zeros as `kv_before`. ValueError: shapes or dtypes that do not fit.
    """
    for name, tensor in (("kv_after", kv_after), ("kv_before", kv_before)):
        if tensor.dtype != torch.uint8 or tensor.ndim != 2 or tensor.shape[1] < MIN_PAGE_STRIDE:
            raise ValueError(f"{name}: wanted uint8 [kv_pages, at least {MIN_PAGE_STRIDE}], "
                             f"found {tensor.dtype} {tuple(tensor.shape)}")
    if kv_after.shape != kv_before.shape:
        raise ValueError(f"kv_after: wanted kv_before's shape {tuple(kv_before.shape)}, "
                         f"found {tuple(kv_after.shape)}")
    device = oracle.written.device
    after, before = kv_after.to(device), kv_before.to(device)

    written = oracle.written.nonzero().squeeze(1)
    used, which, uses = oracle.slot[written].unique(return_inverse=True, return_counts=True)
    specified = oracle.specified[written] & (uses[which] == 1)
    chosen = written[specified]

    sections = _sections(after, oracle, chosen)
    differing = sum(s.count(s.wanted != s.found) for s in sections)
    ties = sum(s.count((s.wanted != s.found) & ~s.wrong) for s in sections)
    wrong = sum(s.count(s.wrong) for s in sections)
    faults = [fault for s in sections for fault in _section_faults(s, chosen, oracle.slot)]

    untouched = torch.ones(after.shape, dtype=torch.bool, device=device)
    page, offset = used // KV_BLOCK_SIZE, used % KV_BLOCK_SIZE
    _payload(untouched)[page, offset] = False
    _scales(untouched)[page, offset] = False
    changed = (after != before) & untouched
    faults += _untouched_faults(changed, after, before, oracle)
    return Verdict(
        outputs=chosen.shape[0],
        excluded=written.shape[0] - chosen.shape[0],
        bytes_compared=chosen.shape[0] * (TOKEN_STRIDE + SCALE_DIM),
        differing=differing,
        ties=ties,
        wrong=wrong,
        untouched_bytes=int(untouched.sum()),
        untouched_changed=int(changed.sum()),
        rope_error=_rope_error(sections[-1]),
        faults=tuple(faults),
    )


def changed_outside(storage_after: Tensor, storage_before: Tensor, kv_cache: Tensor) -> int:
    """How many bytes of the storage around a strided `kv_cache` changed.

    storage_after, storage_before: uint8 [n], all the memory `kv_cache` is a view of, after and before a
    launch; `kv_cache` tells which of these bytes are its own.
    """
    outside = torch.ones(storage_after.shape[0], dtype=torch.bool, device=storage_after.device)
    outside.as_strided(tuple(kv_cache.shape), kv_cache.stride(), kv_cache.storage_offset()).fill_(False)
    return int(((storage_after != storage_before.to(storage_after.device)) & outside).sum())


def tie_refusals(ties: int, bytes_compared: int, reference_ties: int | None = None) -> tuple[str, ...]:
    """Why a run over random normal data shows too many accepted ties; empty when it does not.

    `reference_ties`: what the float32 PyTorch reference shows on the same input, where it was run.
    """
    refusals = []
    if ties and ties * BYTES_PER_TIE >= bytes_compared:
        refusals.append(f"ties: wanted fewer than 1 in {BYTES_PER_TIE} of {bytes_compared} bytes, "
                        f"found {ties}")
    if reference_ties is not None and ties >= REFERENCE_FACTOR * reference_ties + REFERENCE_SLACK:
        refusals.append(f"ties: wanted fewer than {REFERENCE_FACTOR} times the reference's {reference_ties} "
                        f"plus {REFERENCE_SLACK}, found {ties}")
    return tuple(refusals)


def _payload(kv: Tensor) -> Tensor:
    return kv[:, :SCALE_OFFSET].unflatten(1, (KV_BLOCK_SIZE, TOKEN_STRIDE))


def _scales(kv: Tensor) -> Tensor:
    return kv[:, SCALE_OFFSET:MIN_PAGE_STRIDE].unflatten(1, (KV_BLOCK_SIZE, SCALE_DIM))


def _sections(after: Tensor, oracle: Expectation, chosen: Tensor) -> tuple[_Section, ...]:
    slot = oracle.slot[chosen]
    payload = _payload(after)[slot // KV_BLOCK_SIZE, slot % KV_BLOCK_SIZE].to(torch.int32)
    scales = _scales(after)[slot // KV_BLOCK_SIZE, slot % KV_BLOCK_SIZE].to(torch.int32)
    expected = oracle.expected[chosen].to(torch.int32)

    y, bound = oracle.y[chosen, :NOPE_HEAD_DIM], oracle.y_bound[chosen, :NOPE_HEAD_DIM]
    shape = (NUM_GROUPS, QUANT_GROUP)
    low = round_to_bf16_from_f64(y - bound).unflatten(1, shape)
    high = round_to_bf16_from_f64(y + bound).unflatten(1, shape)
    least = torch.where((low <= 0) & (high >= 0), 0.0, torch.minimum(low.abs(), high.abs()))
    most = torch.maximum(low.abs(), high.abs())

    exponent = scales[:, :NUM_GROUPS] - SCALE_BIAS
    scale_wrong = (exponent < group_exponent(least.amax(-1))) | (exponent > group_exponent(most.amax(-1)))
    # The codes are judged under the scale that was found where that one is accepted: under another scale
    # they are other codes, and no less exact.
    under = torch.where(scale_wrong, oracle.exponent[chosen], exponent)[..., None]
    code = payload[:, :NOPE_HEAD_DIM].to(torch.uint8).view(torch.int8).unflatten(1, shape)
    code_wrong = (code < quantise(low, under)) | (code > quantise(high, under))

    rope, rope_bound = oracle.rope[chosen], oracle.rope_bound[chosen]
    found = _value_bits(payload[:, NOPE_HEAD_DIM:])
    key = _order(found)
    rope_wrong = ((key < _order(bf16_bits(round_to_bf16_from_f64(rope - rope_bound))))
                  | (key > _order(bf16_bits(round_to_bf16_from_f64(rope + rope_bound)))))

    pad, pad_wanted = scales[:, NUM_GROUPS:], expected[:, TOKEN_STRIDE + NUM_GROUPS:]
    scales_wanted = expected[:, TOKEN_STRIDE:TOKEN_STRIDE + NUM_GROUPS]
    return (
        _Section("int8", expected[:, :NOPE_HEAD_DIM], payload[:, :NOPE_HEAD_DIM], code_wrong.flatten(1), 0),
        _Section("scale", scales_wanted, scales[:, :NUM_GROUPS], scale_wrong, TOKEN_STRIDE),
        _Section("pad", pad_wanted, pad, pad != pad_wanted, TOKEN_STRIDE + NUM_GROUPS),
        _Section("rope", _value_bits(expected[:, NOPE_HEAD_DIM:TOKEN_STRIDE]), found, rope_wrong,
                 NOPE_HEAD_DIM, value_bytes=2),
    )


def _value_bits(low_high: Tensor) -> Tensor:
    return low_high[:, 0::2] | (low_high[:, 1::2] << 8)


def _order(bits: Tensor) -> Tensor:
    """Integers in the order of the bf16 values; both zeros alike (their tie is zero), NaN beyond infinity."""
    magnitude = bits & 0x7FFF
    return torch.where(bits > 0x7FFF, -magnitude, magnitude)


def _rope_error(rope: _Section) -> float:
    if rope.found.numel() == 0:
        return 0.0
    wanted, found = ((bits << 16).view(torch.float32).to(torch.float64) for bits in (rope.wanted, rope.found))
    error = (found - wanted).abs() / wanted.abs().clamp(min=1.0)
    return float(error.nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def _section_faults(section: _Section, chosen: Tensor, slots: Tensor) -> list[Fault]:
    faults = []
    for row, column in section.wrong.nonzero()[:MAX_FAULTS].tolist():
        output = int(chosen[row])
        page, place = divmod(int(slots[output]), KV_BLOCK_SIZE)
        byte = section.first_byte + column * section.value_bytes
        offset = (place * TOKEN_STRIDE + byte if byte < TOKEN_STRIDE
                  else SCALE_OFFSET + place * SCALE_DIM + byte - TOKEN_STRIDE)
        faults.append(Fault(section.kind, output, page, offset,
                            int(section.wanted[row, column]), int(section.found[row, column])))
    return faults


def _untouched_faults(changed: Tensor, after: Tensor, before: Tensor, oracle: Expectation) -> list[Fault]:
    faults = []
    skipped: dict[int, int] | None = None
    for page, offset in changed.nonzero()[:MAX_FAULTS].tolist():
        if skipped is None:
            slots, written = oracle.slot.tolist(), oracle.written.tolist()
            skipped = {slot: i for i, slot in enumerate(slots) if not written[i]}
        place = offset // TOKEN_STRIDE if offset < SCALE_OFFSET else (offset - SCALE_OFFSET) // SCALE_DIM
        output = skipped.get(page * KV_BLOCK_SIZE + place, -1) if place < KV_BLOCK_SIZE else -1
        faults.append(Fault("untouched" if output < 0 else "skipped", output, page, offset,
                            int(before[page, offset]), int(after[page, offset])))
    return faults
