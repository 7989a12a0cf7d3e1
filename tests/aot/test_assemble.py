from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbuild.aot.assemble import Artifact, assemble, check, natural_offsets
from kvbuild.aot.pool import Compiled
from kvbuild.runtime.launchtable import launch_table_digest
from kvbuild.runtime.manifest import Manifest


def test_arguments_lie_at_multiples_of_their_size() -> None:
    assert natural_offsets(("*fp32", "i32", "i64", "fp32", "i32", "*u8")) == (0, 8, 16, 24, 28, 32)
    assert natural_offsets(("i32", "*u8", "i32")) == (0, 8, 16)
    assert natural_offsets(()) == ()


@pytest.mark.parametrize(
    "name", ["nvidia:sm_80", "nvidia:sm_90", "nvidia:sm_100", "amd:gfx942", "amd:gfx1100"]
)
def test_a_good_unit_is_taken_with_its_hidden_parameters_counted(
    name: str, compiled_tiny: dict[str, Compiled]
) -> None:
    artifact = check(compiled_tiny[name])
    assert artifact.offsets == (0, 8, 16, 20)
    # Triton 3.5 and later: global scratch and profile scratch.
    assert artifact.hidden == 2
    assert (artifact.entry, artifact.num_warps, artifact.num_ctas) == ("add", 4, 1)


def altered(compiled: Compiled, **facts: object) -> Compiled:
    return replace(compiled, facts={**compiled.facts, **facts})


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"global_scratch": 128}, "wanted no global scratch, found 128 bytes"),
        ({"profile_scratch": 1}, "wanted no profile scratch, found 1 bytes"),
        ({"num_warps": 0}, "wanted 1 to 32 warps a block, found 0"),
        ({"num_warps": 33}, "wanted 1 to 32 warps a block, found 33"),
        ({"num_ctas": 2}, "wanted 1 blocks a cluster, found 2"),
        ({"entry": "other"}, "other"),
    ],
)
def test_facts_that_a_launcher_cannot_serve_are_refused(
    facts: dict[str, object], text: str, compiled_tiny: dict[str, Compiled]
) -> None:
    with pytest.raises(ValueError, match=text):
        check(altered(compiled_tiny["nvidia:sm_80"], **facts))


@pytest.mark.parametrize("name", ["nvidia:sm_80", "amd:gfx942"])
@pytest.mark.parametrize(
    ("signature", "text"),
    [
        (
            (("x", "*fp32"), ("n", "i32"), ("count", "i32"), ("scale", "fp32")),
            "n: wanted 4 bytes at offset 8, found 8",
        ),
        (
            (("x", "*fp32"), ("n", "i64"), ("count", "i64"), ("scale", "fp32")),
            "count: wanted 8 bytes .* found 4",
        ),
        ((("x", "*fp32"), ("n", "i64")), "hidden parameter 0: wanted 8 bytes at offset 16, found 4"),
        ((("x", "i64"),) * 7, "wanted 7 parameters or more, found 6"),
    ],
)
def test_a_parameter_elsewhere_than_computed_is_refused(
    name: str, signature: tuple[tuple[str, str], ...], text: str, compiled_tiny: dict[str, Compiled]
) -> None:
    compiled = compiled_tiny[name]
    with pytest.raises(ValueError, match=text):
        check(replace(compiled, unit=replace(compiled.unit, signature=signature)))


def test_a_binary_of_another_vendor_is_refused(compiled_tiny: dict[str, Compiled]) -> None:
    swapped = replace(compiled_tiny["nvidia:sm_80"], data=compiled_tiny["amd:gfx942"].data)
    with pytest.raises(ValueError, match="wanted ELF machine 190, found 224"):
        check(swapped)
    with pytest.raises(ValueError, match="wanted a 64-bit little-endian ELF file"):
        check(replace(swapped, data=b""))


def artifact(unit: Any) -> Artifact:
    return Artifact(unit.key.encode(), "add", 4, 1, 64, (0, 8, 16, 20), 2, 190, False)


def units(tiny: Any) -> list[tuple[int, str, int | None, Any]]:
    return [
        (ratio, layout, limit, tiny.unit(constexprs=(("BLOCK", ratio), ("AT", at))))
        for ratio in (128, 256)
        for at, (layout, limit) in enumerate((("aligned", 8), ("aligned", None), ("general", None)))
    ]


def test_the_manifests_target_holds_what_was_planned_and_compiled(tiny: Any) -> None:
    planned = tiny.target("nvidia:sm_90", units(tiny))
    made = {kernel.unit.key: artifact(kernel.unit) for kernel in planned.kernels}
    target = assemble(planned, made).target
    assert target is not None
    assert (target.vendor, target.arch, target.route, target.warp_size, target.elf_machine) == (
        "nvidia",
        "sm_90",
        "gpgpu",
        32,
        190,
    )
    assert target.min_driver == 12000
    assert target.launch_table == launch_table_digest(target.kernels, target.variants)
    assert [(v.ratio, v.layout, v.max_outputs) for v in target.variants] == [each[:3] for each in units(tiny)]
    assumed = {kernel.layout: kernel.assumes for kernel in target.kernels}
    assert (assumed["aligned"].block_size, assumed["aligned"].alignment) == (8, 16)
    assert (assumed["general"].block_size, assumed["general"].alignment) == (0, 0)
    first = target.kernels[0]
    assert [(arg.field, arg.type, arg.offset, arg.size) for arg in first.args] == [
        ("x", "*fp32", 0, 8),
        ("n", "i64", 8, 8),
        ("count", "i32", 16, 4),
        ("scale", "fp32", 20, 4),
    ]
    blob = "0" * 64
    with_launcher = replace(target, launchers={"x86_64-linux-gnu.2.17": blob})
    sizes = dict.fromkeys(with_launcher.blobs, 1)
    manifest = Manifest("0.1.0", (with_launcher,), sizes)
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_a_variant_that_lacks_a_kernel_is_left_out_and_named(tiny: Any) -> None:
    planned = tiny.target("nvidia:sm_90", units(tiny))
    made = {kernel.unit.key: artifact(kernel.unit) for kernel in planned.kernels}
    del made[planned.kernels[0].unit.key]
    assembled = assemble(planned, made)
    assert assembled.target is not None
    assert len(assembled.target.variants) == 5
    assert planned.kernels[0].name not in {kernel.name for kernel in assembled.target.kernels}
    assert assembled.dropped == (
        "nvidia:sm_90: the aligned variant of ratio 128, up to 8 outputs, for want of add-c128-aligned-8",
    )


def test_without_a_general_variant_the_target_is_left_out_and_named(tiny: Any) -> None:
    planned = tiny.target("nvidia:sm_90", units(tiny))
    made = {kernel.unit.key: artifact(kernel.unit) for kernel in planned.kernels}
    del made[planned.kernels[5].unit.key]
    assembled = assemble(planned, made)
    assert assembled.target is None
    assert assembled.dropped[-1] == (
        "nvidia:sm_90: the whole target, for want of ratio 256's general variant"
    )


def test_binaries_of_two_machines_make_no_target(tiny: Any) -> None:
    planned = tiny.target("nvidia:sm_90", units(tiny))
    made = {kernel.unit.key: artifact(kernel.unit) for kernel in planned.kernels}
    first = planned.kernels[0].unit.key
    made[first] = replace(made[first], machine=191)
    assembled = assemble(planned, made)
    assert assembled.target is None
    assert assembled.dropped == (
        "nvidia:sm_90: the whole target, for its binaries are of the ELF machines 190, 191",
    )


def test_derived_parameters_are_said_in_the_manifest(tiny: Any) -> None:
    planned = tiny.target("nvidia:sm_90", units(tiny))
    made = {kernel.unit.key: artifact(kernel.unit) for kernel in planned.kernels}
    read = assemble(planned, made).target
    made = {key: replace(each, derived=True) for key, each in made.items()}
    derived = assemble(planned, made).target
    assert read is not None and derived is not None
    assert "parameters" not in read.toolchain
    assert derived.toolchain["parameters"] == "derived from Triton 3.9.0; the binaries do not tell them"
    assert {**derived.toolchain, "parameters": ""} == {**read.toolchain, "parameters": ""}
