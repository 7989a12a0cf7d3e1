"""The encode stage alone, on values at every border that its arithmetic has."""

from __future__ import annotations

from typing import Any

import torch

from kvbuild.kernels.ascend import pipeline
from kvbuild.kernels.numerics import group_exponent, quantise


def encode(interpreter: Any, normed: torch.Tensor, tail: torch.Tensor) -> dict[str, torch.Tensor]:
    """payload and scales of bf16 values [n, 512] and fp32 tails [n, 64], rotated by nothing."""
    outputs = normed.shape[0]
    place = torch.zeros((outputs, pipeline.PLACE_WORDS), dtype=torch.int64)
    angles = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=1)
    memory = {
        "num_outputs": outputs, "cos_sin_cache": angles, "cos_sin_stride": 0, "place": place,
        "normed": normed.view(torch.int16), "tail": tail, "state_cache": None,
        "payload": torch.full((outputs, 576), 77, dtype=torch.uint8),
        "scales": torch.full((outputs, 8), 77, dtype=torch.uint8),
    }  # fmt: skip
    found: dict[str, torch.Tensor] = interpreter.stages((pipeline.encode(),), memory)
    return found


def test_exponents_and_codes_at_every_power_of_two_and_its_neighbours(interpreter: Any) -> None:
    # Exactly 127 * 2^k is where the exponent steps; beside it the bf16 values around, and the floor of 1e-4.
    steps = torch.tensor([127.0 * 2.0**k for k in range(-24, 24)]).to(torch.bfloat16)
    bits = steps.view(torch.int16).to(torch.int32)
    around = torch.cat((bits - 1, bits, bits + 1)).to(torch.int16).view(torch.bfloat16)
    largest = torch.cat((around, torch.tensor([0.0, 1e-4, 3e-38, 3e38], dtype=torch.bfloat16)))
    largest = torch.nn.functional.pad(largest, (0, -largest.numel() % 7)).view(-1, 7)
    fractions = torch.linspace(-1.0, 1.0, 64)
    groups = (largest.float()[..., None] * fractions).to(torch.bfloat16)
    normed = torch.zeros((largest.shape[0], 512), dtype=torch.bfloat16)
    normed[:, :448] = groups.flatten(1)

    found = encode(interpreter, normed, torch.zeros(largest.shape[0], 64))
    z = groups.float()
    exponent = group_exponent(z.abs().amax(dim=-1))
    assert torch.equal(found["scales"][:, :7].int(), (exponent + 127).int())
    assert (found["scales"][:, 7] == 0).all()
    codes = found["payload"][:, :448].view(torch.int8)
    assert torch.equal(codes, quantise(z, exponent[..., None]).flatten(1))


def test_ties_of_bf16_go_to_the_even_neighbour(interpreter: Any) -> None:
    bits = torch.arange(64, dtype=torch.int32) * 0x8000 + 0x3F800000
    tail = torch.stack((bits, bits + 1, bits - 1)).view(torch.float32)
    found = encode(interpreter, torch.zeros((3, 512), dtype=torch.bfloat16), tail)
    assert torch.equal(found["payload"][:, 448:].clone().view(torch.bfloat16), tail.to(torch.bfloat16))
