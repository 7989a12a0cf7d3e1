"""Ascend's target: its section of build.yaml, what is planned for it, and what is made of the results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbuild.aot import assemble, hivm, plan, spec, staging, worker
from kvbuild.aot.errors import RequestError
from kvbuild.aot.plan import Facts, PlannedTarget
from kvbuild.aot.pool import Compiled
from kvbuild.aot.spec import TargetName
from kvbuild.aot.targets import ascend
from kvbuild.kernels.ascend import pipeline
from kvbuild.kernels.contract import COMPRESS_RATIOS

SPEC = spec.load(spec.PACKAGED)
NAME = TargetName("ascend", "910B2")


def facts(**changes: Any) -> Facts:
    versions = {"triton": "3.2.0", "triton-adapter-opt": "present", "bishengir-compile": "1.2.0"}
    default = Facts({}, {"ascend": versions}, {"ascend": ("python",)}, "0.17", (), lambda path: path, "r")
    return replace(default, **changes)


def planned(given: spec.Spec = SPEC, **changes: Any) -> PlannedTarget:
    (target,) = plan.plan(given, [NAME], facts(**changes)).targets
    return target


def section(text: str) -> spec.Section:
    keys = (
        "version: 1\ncompress_ratios: [128]\nstate_block_sizes: [8, any]\nhosts: [x86_64-linux-gnu.2.17]\n"
        f"numerics: {{fp_fusion: false}}\ntargets:\n  ascend:\n    archs: [910B1]\n{text}"
    )
    return spec.parse(keys).targets["ascend"]


def test_the_chip_is_named_exactly() -> None:
    for wanted in ("ascend:910B", "ascend:910"):
        with pytest.raises(RequestError, match="knows no such arch; wanted one of ascend:910B1, ascend:9"):
            spec.wanted_targets(SPEC, [wanted])
    assert [str(name) for name in spec.wanted_targets(SPEC, ["ascend"])] == [
        f"ascend:910B{number}" for number in (1, 2, 3, 4)
    ]


def test_routes_and_bounds_are_read() -> None:
    routes = "[{route: index_select, max_outputs: 9, block_d: 64}, {route: block}]"
    found = section(f"    chunk_bytes: 5000000\n    routes: {routes}\n").extra
    assert found["chunk_bytes"] == 5_000_000
    assert found["routes"] == (
        ascend.RouteRow("index_select", 9, 64), ascend.RouteRow("block", None, 512)
    )  # fmt: skip
    assert section("").extra == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("    chunk_bytes: 1000\n", r"chunk_bytes: wanted bytes from \d+ \(one output of the largest"),
        ("    routes: [{route: scan}]\n", r"routes\[0\].route: wanted index_select or block, found 'scan'"),
        ("    routes: [{route: block, max_outputs: 0}]\n", "wanted at least 1 and at most .*, found 0"),
        ("    routes: [{route: block, block_d: 96}]\n", "wanted one of 512, 256, 128, 64, found 96"),
        ("    routes: [{route: block, max_outputs: 99999999999}]\n", "at most 2147483647, found 9999"),
        ("    routes: [{route: block}, {route: block}]\n", r"routes\[1\]: wanted an entry that some call"),
        (
            "    routes: [{route: block, max_outputs: 8}, {route: index_select, max_outputs: 8}]\n",
            r"routes\[1\]: .* found that routes\[0\] takes them all",
        ),
        (
            "    routes: [{route: index_select}, {route: index_select, max_outputs: 8}, {route: block}]\n",
            r"routes\[1\]: .* found that routes\[0\] takes them all",
        ),
        ("    routes: [{route: index_select}]\n", "wanted `block` without max_outputs as the last entry"),
        ("    routes: [{route: block, max_outputs: 5}]\n", "wanted `block` without max_outputs"),
        ("    tiles: {}\n", "unknown key 'tiles'"),
    ],
)
def test_a_wrong_section_is_refused_by_line_and_field(text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as error:
        section(text)
    assert str(error.value).startswith("build.yaml:9: targets.ascend")


def test_the_smallest_bound_that_is_taken_holds_an_output_of_every_route() -> None:
    with pytest.raises(RequestError) as error:
        section("    chunk_bytes: 1\n")
    least = int(str(error.value).split("from ")[1].split()[0])
    for route in pipeline.ROUTES:
        for ratio in COMPRESS_RATIOS:
            assert pipeline.chunk_outputs(route, ratio, least) >= 1


def test_every_route_layout_and_ratio_is_planned() -> None:
    target = planned()
    assert [(p.route, p.layout, p.max_outputs) for p in target.pipelines if p.ratio == 256] == [
        ("block", "aligned", 32), ("block", "general", 32), ("index_select", "dense", None),
        ("block", "aligned", None), ("block", "general", None),
    ]  # fmt: skip
    # Each compiled stage once: three for all, four a ratio. The gather is CANN's.
    assert len(target.stages) == 3 + 4 * 3
    assert "gather" not in {stage.name for stage in target.stages}
    assert target.kernels == () and target.variants == () and target.hosts == spec.HOSTS
    general = planned(replace(SPEC, state_block_sizes=("any",)))
    assert {each.layout for each in general.pipelines} == {"dense", "general"}


def test_a_unit_holds_all_that_its_result_depends_on() -> None:
    units = {stage.name: stage.unit for stage in planned().stages}
    scan = units["scan-c128-d512"]
    assert scan.triton_target == ("npu", "Ascend910B2", 0) and scan.module == "ascend/scan.py"
    assert [path for path, _ in scan.sources] == ["ascend/leaf.py", "ascend/scan.py", "contract.py"]
    assert dict(scan.constexprs) == {"RATIO": 128, "BLOCK_D": 512}
    assert len({unit.key for unit in units.values()}) == len(units)
    changed = {
        stage.name for stage in planned(read=lambda path: path + "!" * (path == "ascend/leaf.py")).stages
        if stage.unit.key != units[stage.name].key
    }  # fmt: skip
    assert changed == {name for name in units if name.startswith(("scan", "blocks"))}


def text_of(stage: pipeline.Stage, ub_bytes: int = 4096, entry: str = "") -> bytes:
    """HIVM with the entry and the parameters of a stage, which uses so much of the unified buffer."""
    kinds = [argument.type.replace("u8", "i8").replace("fp", "f") for argument in stage.arguments]
    own = [f"memref<?x{kind[1:]}, #hivm.address_space<gm>>" if kind[0] == "*" else kind for kind in kinds]
    lead = [f"i64 {{hacc.arg_type = #hacc.arg_type<{kind}>}}" for kind in
            ("ffts_base_address", "sync_block_lock", "workspace")]  # fmt: skip
    listed = ", ".join(f"%arg{at}: {kind}" for at, kind in enumerate([*lead, *own, "i32", "i32", "i32"]))
    return (
        f"module {{\n  func.func @{entry or stage.function}({listed}) attributes {{hacc.entry, "
        "hivm.func_core_type = #hivm.func_core_type<AIV>} {\n    %c0_i64 = arith.constant 0 : i64\n"
        f"    %0 = hivm.hir.pointer_cast(%c0_i64) : memref<{ub_bytes}xi8, #hivm.address_space<ub>>\n"
        "  }\n}\n"
    ).encode()


def compiled(target: PlannedTarget, **of_stage: bytes) -> dict[str, assemble.Artifact]:
    """A checked artifact for each stage, as if compiled."""
    stages = {stage.name: stage for each in target.pipelines for stage in each.stages}
    return {
        stage.unit.key: assemble.check(Compiled(stage.unit, text_of(stages[stage.name]), {}, 0.0))
        for stage in target.stages
        if stage.name not in of_stage
    }


def test_the_launch_table_is_the_pipeline_as_it_was_compiled() -> None:
    target = planned()
    found = assemble.assemble(target, compiled(target))
    assert found.dropped == () and found.target is not None
    staged = found.target.staged
    assert staged is not None and staged.stage == "hivm" and found.target.launch_table == staged.digest
    assert (found.target.route, found.target.elf_machine) == ("staged", 0)
    assert [operator.function for operator in staged.operators] == ["aclnnIndexSelect"]
    assert {kernel.ub_bytes for kernel in staged.kernels} == {4096}
    dense = next(v for v in staged.variants if v.layout == "dense" and v.ratio == 512)
    assert dense.stages[:3] == ("locate-c512", "gather", "scan-c512-d512")
    assert dense.chunk_outputs == pipeline.chunk_outputs("index_select", 512, dense.chunk_bytes)
    gathered = {each.name: each.shape for each in dense.intermediates}["gathered"]
    assert gathered == (512, 1024)


def test_a_failed_stage_takes_its_route_and_the_last_one_the_target() -> None:
    target = planned()
    found = assemble.assemble(target, compiled(target, **{"scan-c512-d512": b""}))
    assert found.target is not None and found.target.staged is not None
    assert ("dense", 512) not in {(v.layout, v.ratio) for v in found.target.staged.variants}
    assert found.dropped == (
        "ascend:910B2: route index_select of ratio 512, layout dense, for want of scan-c512-d512",
    )
    whole = assemble.assemble(target, compiled(target, **{"blocks-c128-general-d512": b""}))
    assert whole.target is None and "the whole target" in whole.dropped[-1]


def test_a_result_that_is_not_the_stage_is_refused() -> None:
    stage = pipeline.scatter()
    kinds = tuple(argument.type for argument in stage.arguments)
    assert staging.check_hivm(text_of(stage), "scatter_bytes", kinds) == hivm.Hivm(
        "scatter_bytes", ("i64", "*i8", "i64", "*i64", "*i8", "*i8"), 4096
    )
    most = pipeline.UB_BYTES
    assert staging.check_hivm(text_of(stage, most), stage.function, kinds).ub_bytes == most
    for data, words in (
        (text_of(stage, most + 100), "wanted at most 196608 bytes, found 196708, 100 too many"),
        (text_of(stage, entry="other"), "wanted the entry scatter_bytes, found other"),
        (text_of(pipeline.encode(), entry="scatter_bytes"), "wanted the parameters i64, "),
        (b"\xff", "wanted HIVM text"),
        (b"\x7fELF", "wanted HIVM with one entry function, found 0"),
    ):
        with pytest.raises(ValueError, match=words):
            staging.check_hivm(data, stage.function, kinds)


class MLIRCompilationError(Exception):
    pass


def test_what_the_fork_wraps_is_told_plainly() -> None:
    def wrapped(inner: Exception) -> BaseException:
        try:
            try:
                raise inner
            except Exception:
                raise MLIRCompilationError("a frame with /somewhere/a/folder") from None
        except MLIRCompilationError as error:
            return worker.told(error)

    plain = RuntimeError("unified buffer: 5 too many")
    assert wrapped(plain) is plain
    failed = worker.subprocess.CalledProcessError(1, ["/x/triton-adapter-opt"], stderr=b"assertion failed")
    assert str(wrapped(failed)) == "triton-adapter-opt failed:\nassertion failed"
    other = ValueError("x")
    assert worker.told(other) is other
