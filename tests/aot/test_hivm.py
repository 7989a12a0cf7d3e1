"""What is read from HIVM text: the entry, its parameters, how much of the unified buffer it uses."""

from __future__ import annotations

import pytest

from kvbuild.aot import hivm

UB = "#hivm.address_space<ub>"
GM = "#hivm.address_space<gm>"


def entry(*own: str, name: str = "scan", core: str = "AIV", grid: str = "i32", kinds: bool = True) -> str:
    """The first line of an entry function, as bishengir writes it."""
    first, *rest = (
        f" {{hacc.arg_type = #hacc.arg_type<{kind}>}}" if kinds else ""
        for kind in ("ffts_base_address", "sync_block_lock", "workspace")
    )
    parameters = [f"i64{first}", *(f"memref<?xi8, {GM}>{mark}" for mark in rest), *own, grid, grid, grid]
    listed = ", ".join(f"%arg{at}: {kind}" for at, kind in enumerate(parameters))
    return (
        f"  func.func @{name}({listed}) attributes {{hacc.entry, "
        f"hivm.func_core_type = #hivm.func_core_type<{core}>}} {{"
    )


def module(*lines: str, head: str | None = None) -> str:
    own = (f"memref<?xf32, {GM}> {{tt.tensor_kind = 0 : i32}}", "i64")
    return "\n".join(["module {", entry(*own) if head is None else head, *lines, "  }", "}", ""])


def test_entry_and_parameters() -> None:
    own = (
        f"memref<?xf32, {GM}> {{tt.tensor_kind = 0 : i32}}", f"memref<?xbf16, {GM}>", "i64", "f32",
        f"memref<?xi8, {GM}> {{tt.tensor_kind = 1 : i32}}", "i32",
    )  # fmt: skip
    found = hivm.read(module(head=entry(*own, name="encode")))
    assert found == hivm.Hivm("encode", ("*fp32", "*bf16", "i64", "fp32", "*i8", "i32"), 0)


def test_the_buffer_is_used_up_to_the_end_of_its_last_piece() -> None:
    found = hivm.read(module(
        "    %c0_i64 = arith.constant 0 : i64",
        "    %c4096_i64 = arith.constant 4096 : i64",
        "    %c8192_i64 = arith.constant 8192 : i64",
        f"    %0 = hivm.hir.pointer_cast(%c4096_i64) : memref<8x16xf32, {UB}>",
        f"    %1 = hivm.hir.pointer_cast(%c0_i64, %c8192_i64) : memref<256xi1, {UB}>",
        f"    %2 = hivm.hir.pointer_cast(%c8192_i64) : memref<0xf32, {UB}>",
        "    %3 = hivm.hir.pointer_cast(%c8192_i64) : memref<4096xf32, #hivm.address_space<cbuf>>",
    ))  # fmt: skip
    assert found.ub_bytes == 8192 + 32


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"%0 = hivm.hir.pointer_cast(%c1_i64) : memref<?xf32, {UB}>", "whose size cannot be read"),
        (f"%0 = hivm.hir.pointer_cast(%c1\n_i64) : memref<8xf32, {UB}>", "whose size cannot be read"),
        (f"%0 = hivm.hir.pointer_cast(%made) : memref<8xf32, {UB}>", "wanted planned addresses, found %made"),
    ],
)
def test_a_piece_that_cannot_be_counted_is_refused(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hivm.read(module("    %c1_i64 = arith.constant 1 : i64", f"    {line}"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "wanted HIVM with one entry function, found 0"),
        (module() + module(), "found 2"),
        (module(head=entry("i64", core="MIX")), "scan: wanted a kernel for the vector cores alone"),
        (module(head=entry("i64", grid="i64")), "three i32"),
        (module(head=entry("i64", kinds=False)), "wanted the parameters ffts_base_address"),
        (module("  func.func @scan_infer_workspace_shape_function()"), "no workspace and no locks"),
        (module("  func.func @scan_infer_sync_block_lock_num_function()"), "no workspace and no locks"),
    ],
)
def test_what_no_launcher_can_launch_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hivm.read(text)


def _hostile() -> list[str]:
    function = "  func.func @a("
    return [
        function + ") attributes {hacc.entry" * 20_000 + "\n",
        function + ") attributes {" * 20_000 + "hacc.entry" * 20_000 + "} {\n",
        function + "%arg0: memref<?xi8, " * 20_000 + ") attributes {hacc.entry, func_core_type<AIV>} {\n",
        module("    hivm.hir.pointer_cast(%" * 20_000),
        module("    hivm.hir.pointer_cast(%\n" * 20_000),
        module("    hivm.hir.pointer_cast(%a) : memref<" + "8x" * 100_000 + f" {UB}>"),
        module("    hivm.hir.pointer_cast(%a)" + " : memref<8x" * 20_000 + f"f32, {UB}>"),
        module(" " * 200_000 + "%c" + "c" * 200_000),
    ]


@pytest.mark.parametrize("text", _hostile(), ids=range(8))
def test_no_text_takes_longer_than_it_is_long(text: str) -> None:
    """Each took minutes, or would have, where an expression could start over at every word."""
    try:
        hivm.read(text)
    except ValueError as error:
        assert len(str(error)) < 1000
