"""The generated table of a staged launcher: what it refuses, and that it compiles for both kinds of host."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable
from typing import Any

import pytest
from bench import pipelines, stages_of, target_of

from kvbuild.aot import elf
from kvbuild.aot.errors import BuildError
from kvbuild.aot.launcher import build_launcher
from kvbuild.aot.launcher.staged import generate_staged_table
from kvbuild.aot.launcher.vendors import VENDORS
from kvbuild.kernels.ascend import pipeline

Target = dict[str, Any]


@pytest.fixture(scope="module")
def target() -> Target:
    chosen = pipelines()
    names = [name for name, stage in stages_of(chosen).items() if stage.kind == "triton"]
    return target_of(chosen, dict.fromkeys(names, "0" * 64), {name: f"entry_{name[:6]}" for name in names})


def generate(target: Target) -> str:
    return generate_staged_table(target, VENDORS["ascend"].device_type, "npu")


def test_the_table_holds_what_the_pipeline_says(target: Target) -> None:
    text = generate(target)
    assert text.count(".num_stages = 6") == sum(
        each["route"] == "index_select" for each in target["variants"]
    )
    assert f".buffer_alignment = {pipeline.SCRATCH_ALIGNMENT}" in text
    for variant in target["variants"]:
        assert f".chunk_outputs = {variant['chunk_outputs']}," in text
    # A binary is known by its stage, so that finishing a bundle changes no launcher.
    finished = copy.deepcopy(target)
    for kernel in finished["kernels"]:
        kernel["blob"] = "1" * 64
    assert generate(finished) == text


def test_a_table_without_index_select_opens_no_operator_library(target: Target) -> None:
    assert ".needs_gather = 1" in generate(target)
    alone = copy.deepcopy(target)
    alone["variants"] = [each for each in alone["variants"] if each["route"] == "block"]
    assert ".needs_gather = 0" in generate(alone)


def scalar_of_one_byte(target: Target) -> None:
    target["kernels"][0]["args"][0] |= {"type": "i8", "intermediate": False, "field": "block_size"}


def another_operator(target: Target) -> None:
    target["operators"][0]["function"] = "aclnnGather"


def another_dimension(target: Target) -> None:
    target["operators"][0]["constants"] = {"dim": 1}


def no_such_stage(target: Target) -> None:
    target["variants"][0]["stages"][0] = "locate-c64"


def too_many_stages(target: Target) -> None:
    target["variants"][0]["stages"] *= 2


def odd_buffer(target: Target) -> None:
    target["variants"][0]["intermediates"][0]["dtype"] = "fp8"


def no_general_variant(target: Target) -> None:
    target["variants"] = [each for each in target["variants"] if each["layout"] != "general"]


def bounded_last_variant(target: Target) -> None:
    target["variants"][-1]["max_outputs"] = 8


def no_variants(target: Target) -> None:
    target["variants"] = []


def odd_field(target: Target) -> None:
    target["kernels"][0]["args"][0] |= {"intermediate": False, "field": "x; system("}


REFUSALS: dict[Callable[[Target], None], str] = {
    scalar_of_one_byte: "wanted a pointer, i32, i64 or fp32, .* found i8",
    another_operator: "wanted aclnnIndexSelect of three tensors and dim 0, .* found aclnnGather",
    another_dimension: "found aclnnIndexSelect of 3 and {'dim': 1}",
    no_such_stage: "stage locate-c64: wanted a kernel or an operator of the target, found neither",
    too_many_stages: "wanted at most 8 stages and 12 intermediates, found 12",
    odd_buffer: "wanted one of i8, .* found fp8",
    no_general_variant: "the last variant of ratio 128: wanted layout general",
    bounded_last_variant: "the last variant of ratio 512: .* found general and 8",
    no_variants: "wanted one variant or more to launch, found none",
    odd_field: "launch table: wanted a name of letters",
}


@pytest.mark.parametrize("change", REFUSALS, ids=lambda change: change.__name__)
def test_what_a_launcher_cannot_do_is_refused(target: Target, change: Callable[[Target], None]) -> None:
    changed = copy.deepcopy(target)
    change(changed)
    with pytest.raises(BuildError, match=REFUSALS[change]):
        generate(changed)


@pytest.mark.parametrize("host", ["x86_64-linux-gnu.2.17", "aarch64-linux-gnu.2.17"])
def test_both_kinds_of_host(target: Target, host: str) -> None:
    data = build_launcher(target, host)
    assert elf.read(data).machine == {"x86_64": 62, "aarch64": 183}[host.partition("-")[0]]
    assert struct.unpack_from("<H", data, 16) == (3,)
    for library in (b"libascendcl.so\0", b"libopapi.so\0", b"__tvm_ffi_use_stream\0"):
        assert library in data
