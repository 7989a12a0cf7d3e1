"""Generating and compiling launchers: equal bytes, keys, what is refused, what is exported."""

from __future__ import annotations

import copy
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbuild.aot.errors import BuildError, ToolchainError
from kvbuild.aot.launcher import build_launcher, generate, launch_table_digest, launcher_key, zig
from kvbuild.kernels.gpgpu.route import ALIGNED_FIELDS, ARGS
from kvbuild.runtime import launchtable
from kvbuild.runtime.strictjson import Node

sys.path.insert(0, str(Path(__file__).parent / "standin"))
import harness

X86, ARM = zig.HOSTS


@pytest.fixture
def target() -> dict[str, Any]:
    return harness.gpu_target("nvidia")[0]


def dynamic_symbols(data: bytes) -> set[str]:
    """The names that a 64-bit ELF library defines for others."""

    def number(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], "little")

    sections, size, count = number(0x28, 8), number(0x3A, 2), number(0x3C, 2)
    headers = [sections + index * size for index in range(count)]
    (table,) = [at for at in headers if number(at + 4, 4) == 11]
    strings = number(headers[number(table + 0x28, 4)] + 0x18, 8)
    start, length = number(table + 0x18, 8), number(table + 0x20, 8)
    names = set()
    for at in range(start, start + length, 24):
        if number(at + 6, 2) != 0:
            name = strings + number(at, 4)
            names.add(data[name : data.index(b"\0", name)].decode())
    return names - {""}


@pytest.mark.parametrize("host", zig.HOSTS)
@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_equal_bytes_from_two_folders(
    vendor: str, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = harness.gpu_target(vendor)[0]
    built = []
    for name in ("one", "another-and-longer"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        monkeypatch.delenv("HOME", raising=False)
        built.append(build_launcher(target, host))
        assert list(folder.iterdir()) == [], "the build folder is gone"
    assert built[0] == built[1]
    assert str(tmp_path).encode() not in built[0]
    assert b"launcher/" not in built[0] and b".c\0" not in built[0]
    assert int.from_bytes(built[0][18:20], "little") == (62 if host == X86 else 183)


def test_only_the_interface_is_exported(target: dict[str, Any], host_arch: str) -> None:
    names = ("open", "compress", "bind", "close", "counters", "pin")
    wanted = {f"{prefix}{name}" for prefix in ("kvb_", "__tvm_ffi_") for name in names}
    wanted |= {"kvb_last_error", "kvb_step", "kvb_unbind", "kvb_python_compress", "kvb_python_step"}
    assert dynamic_symbols(build_launcher(target, X86)) == wanted
    cpu = dynamic_symbols(build_launcher(harness.cpu_target(host_arch), harness.host_triple()))
    assert cpu == wanted | {"kvb_cpu_compress"}


def test_digest_is_the_runtimes(target: dict[str, Any]) -> None:
    kernels = tuple(launchtable.Kernel.read(Node(kernel, "")) for kernel in target["kernels"])
    variants = tuple(launchtable.Variant.read(Node(variant, "")) for variant in target["variants"])
    digest = launch_table_digest(target["kernels"], target["variants"])
    assert digest == launchtable.launch_table_digest(kernels, variants)
    assert f'.digest = "{digest}"' in generate.generate_table(target)


def test_digest_covers_kernels_and_variants(target: dict[str, Any]) -> None:
    digests = {launch_table_digest(target["kernels"], target["variants"])}
    target["kernels"][0]["shared"] += 1
    digests.add(launch_table_digest(target["kernels"], target["variants"]))
    target["variants"][0]["max_outputs"] += 1
    digests.add(launch_table_digest(target["kernels"], target["variants"]))
    assert len(digests) == 3


def test_key_changes_with_what_goes_in(
    target: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = launcher_key(target, X86)
    assert launcher_key(copy.deepcopy(target), X86) == first
    assert launcher_key({**target, "launchers": {}}, X86) == first
    keys = {first, launcher_key(target, ARM), launcher_key(harness.gpu_target("amd")[0], X86)}
    target["kernels"][0]["shared"] += 1
    keys.add(launcher_key(target, X86))
    monkeypatch.setattr(zig, "FLAGS", (*zig.FLAGS, "-O1"))
    keys.add(launcher_key(target, X86))
    monkeypatch.setattr(zig, "zig_version", lambda: "0")
    keys.add(launcher_key(target, X86))
    for path in zig._HERE.glob("*.[ch]"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "check.c").write_text("changed")
    monkeypatch.setattr(zig, "_HERE", tmp_path)
    keys.add(launcher_key(target, X86))
    assert len(keys) == 7


def test_every_argument_and_aligned_field_is_in_the_table(target: dict[str, Any]) -> None:
    text = generate.generate_table(target)
    for arg in ARGS:
        assert f"offsetof(kvb_operands, {arg.field})" in text
    table = text[text.index("aligned_fields[]") :]
    for field in ALIGNED_FIELDS:
        assert f"offsetof(kvb_operands, {field})" in table


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(target: dict[str, Any]) -> None:
        *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        at: Any = target
        for step in steps:
            at = at[step]
        at[last] = value

    return apply


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("vendor", "nobody", "nobody:sm_90: no launcher for vendor 'nobody'"),
        ("kernels.0.global_scratch", 64, "kernel small: global_scratch: wanted 0 bytes"),
        ("kernels.0.profile_scratch", 64, "kernel small: profile_scratch: wanted 0 bytes"),
        ("kernels.0.grid.y", 65536, "kernel small: grid.y: wanted 1 to 65535, found 65536"),
        (
            "kernels.0.hidden",
            41,
            "kernel small: args and hidden: wanted at most 64 together, found 25 and 41",
        ),
        ("kernels.0.assumes.alignment", 32, "kernel small: assumes: wanted what layout 'aligned' means"),
        ("kernels.2.assumes.block_size", 8, "kernel general: assumes: wanted what layout 'general' means"),
        ("kernels.0.entry", 'x"; int y = "', "launch table: wanted a name of letters, digits"),
        (
            "kernels.0.args.0.field",
            "state cache",
            "args: wanted a field of kvb_operands, found 'state cache'",
        ),
        ("variants.0.kernels", ["other"], "wanted kernels of the target, found 'other'"),
        (
            "variants.0.kernels",
            ["general"],
            "wanted kernels of the same ratio and layout, found general of ratio 128",
        ),
        ("variants.0.kernels", [], "wanted 1 to 4 kernels, found 0"),
        (
            "variants.2.max_outputs",
            9,
            "the last variant of ratio 128: wanted layout general and max_outputs null",
        ),
        ("variants", [], "nvidia:sm_90: wanted one variant or more to launch, found none"),
    ],
)
def test_table_that_cannot_be_launched(target: dict[str, Any], path: str, value: Any, text: str) -> None:
    change(path, value)(target)
    with pytest.raises(BuildError, match=text.replace("(", r"\(")):
        generate.generate_table(target)


def test_clusters_are_nvidias() -> None:
    target = harness.gpu_target("amd")[0]
    target["kernels"][0]["cluster"] = 2
    with pytest.raises(
        BuildError, match="amd:gfx942: kernel small: cluster: wanted 1 for this vendor, found 2"
    ):
        generate.generate_table(target)


def test_argument_of_another_size_does_not_compile(target: dict[str, Any]) -> None:
    for kernel in target["kernels"]:
        kernel["args"][10]["size"] = 4
    with pytest.raises(
        BuildError, match="the launcher for x86_64-linux-gnu.2.17 did not compile; zig cc said"
    ):
        build_launcher(target, X86)


def test_unknown_host(target: dict[str, Any]) -> None:
    with pytest.raises(BuildError, match="host: wanted one of x86_64-linux-gnu.2.17, .* found 'riscv64'"):
        launcher_key(target, "riscv64")
    with pytest.raises(BuildError, match="cpu:aarch64: wanted a host of that architecture, found x86_64"):
        launcher_key(harness.cpu_target("aarch64"), X86)


def test_missing_ziglang(target: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(zig, "version", missing)
    with pytest.raises(
        ToolchainError, match=r"ziglang, .* is missing. Install it: pip install 'kvbuild\[compile\]'"
    ):
        launcher_key(target, X86)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match=r"is missing. Install it: pip install 'kvbuild\[compile\]'"):
        build_launcher(target, X86)


def test_key_runs_no_compiler(target: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("a process was started"))
    launcher_key(target, X86)
