from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbuild.aot import spec, targets
from kvbuild.aot.errors import RequestError
from kvbuild.kernels.gpgpu.route import Tile

VENDORS = ", ".join(targets.names())
GOOD = """\
version: 1
compress_ratios: [128, 512]
state_block_sizes: [8, any]
hosts: [x86_64-linux-gnu.2.17]
numerics: {fp_fusion: false}
targets:
  nvidia:
    archs: [sm_80, sm_90]
  amd:
    archs: [gfx942]
    tiles: {gfx942: [{block_t: 4, block_d: 256, split: 1, num_warps: 4, num_stages: 1}]}
  cpu:
    archs: [x86_64]
toolchains: {}
"""


def test_the_packaged_file_is_the_one_at_the_root_and_names_every_arch() -> None:
    root = Path(__file__).parents[2] / "build.yaml"
    assert root.read_bytes() == spec.PACKAGED.read_bytes()
    parsed = spec.load(root)
    assert parsed.compress_ratios == (128, 256, 512)
    assert parsed.state_block_sizes == (8, "any")
    assert parsed.hosts == spec.HOSTS
    assert parsed.fp_fusion is False
    assert {name: section.archs for name, section in parsed.targets.items()} == {
        name: targets.load(name).ARCHS for name in targets.names()
    }


def test_values_are_read() -> None:
    parsed = spec.parse(GOOD)
    assert parsed.compress_ratios == (128, 512)
    assert list(parsed.targets) == ["nvidia", "amd", "cpu"]
    (row,) = parsed.targets["amd"].tiles["gfx942"]
    assert row.max_outputs is None
    assert row.tile == Tile(4, 256, 1, 4, 1)


def test_toolchains_take_a_text_or_a_list() -> None:
    given = GOOD.replace("toolchains: {}", "toolchains: {nvidia: {python: a b}, amd: {python: [c, d]}}")
    assert spec.parse(given).toolchains == {"nvidia": ("a b",), "amd": ("c", "d")}
    assert spec.parse(GOOD.replace("toolchains: {}\n", "")).toolchains == {}


def test_several_tiles_carry_rising_limits() -> None:
    tile = "block_t: 4, block_d: 256, split: 1, num_warps: 4, num_stages: 1"
    rows = f"[{{max_outputs: 8, {tile}}}, {{max_outputs: 64, {tile}}}, {{{tile}}}]"
    given = re.sub(r"gfx942: \[\{.*\}\]", f"gfx942: {rows}", GOOD)
    limits = [row.max_outputs for row in spec.parse(given).targets["amd"].tiles["gfx942"]]
    assert limits == [8, 64, None]


TILES = "tiles: {gfx942: [{block_t: 4, block_d: 256, split: 1, num_warps: 4, num_stages: 1}]}"
MISTAKES = [
    ("version: 1", "version: 2", 1, "version: wanted 1, found 2"),
    ("version: 1\n", "", 1, f"numerics, targets; copy the whole of {spec.PACKAGED} and edit it"),
    ("version: 1", "version: '1'", 1, "version: wanted an integer, found '1'"),
    ("version: 1", "version: true", 1, "version: wanted an integer, found True"),
    ("version: 1", "version: [1]", 1, "version: wanted a single value, found a list"),
    ("version: 1", "versoin: 1", 1, "versoin: unknown key 'versoin'; wanted one of version,"),
    ("version: 1", "version: 1\nversion: 1", 2, "key 'version' stands twice, first on line 1"),
    ("[128, 512]", "[128, 100]", 2, r"compress_ratios[1]: wanted one of 128, 256, 512, found 100"),
    ("[128, 512]", "[128, 128]", 2, r"compress_ratios[1]: 128 stands twice"),
    ("[128, 512]", "[]", 2, "compress_ratios: wanted at least one entry, found an empty list"),
    ("[128, 512]", "128", 2, "compress_ratios: wanted a list, found 128"),
    ("[128, 512]", "[128.0]", 2, "found 128.0"),
    ("[8, any]", "[16, any]", 3, r"state_block_sizes[0]: wanted one of 8, any, found 16"),
    ("[8, any]", "[8]", 3, "state_block_sizes: wanted `any` among the entries"),
    ("2.17]", "2.17, riscv64-linux-gnu]", 4, r"hosts[1]: wanted one of x86_64-linux-gnu.2.17"),
    ("fp_fusion: false", "fp_fusion: true", 5, "numerics.fp_fusion: wanted false, found true; fused"),
    ("fp_fusion: false", "fp_fusion: 0", 5, "numerics.fp_fusion: wanted true or false, found 0"),
    ("fp_fusion: false", "fp_fusion: false, tf32: true", 5, "numerics.tf32: unknown key 'tf32'"),
    ("  nvidia:", "  nvidai:", 8, f"targets.nvidai: unknown vendor 'nvidai'; wanted one of {VENDORS}; did"),
    ("[sm_80, sm_90]", "[sm_80, sm_91]", 8, r"targets.nvidia.archs[1]: wanted one of sm_80, sm_86"),
    ("[sm_80, sm_90]", "[sm_80, sm_80]", 8, "'sm_80' stands twice"),
    ("[sm_80, sm_90]", "[sm_80, 3, 4]", 8, "found 3"),
    (
        "    archs: [x86_64]",
        "    archs: [x86_64]\n    tiles: {}",
        14,
        "targets.cpu.tiles: unknown key 'tiles'",
    ),
    (
        "tiles: {gfx942",
        "tiles: {gfx90a",
        11,
        "wanted an arch listed in targets.amd.archs (gfx942), found 'gfx90a'",
    ),
    ("block_t: 4", "block_t: 5", 11, "tile key 'block_t': wanted 4 or 8, found 5"),
    ("block_t: 4", "block_x: 4", 11, "tile key 'block_x': wanted one of block_t"),
    ("block_t: 4, ", "", 11, "tile key 'block_t': missing"),
    (
        "num_stages: 1",
        "num_stages: 1, cluster: true",
        11,
        "'cluster': wanted false, found true; this arch has no",
    ),
    ("block_t: 4", "max_outputs: 3, block_t: 4", 11, "max_outputs: wanted no limit on the last row"),
    (TILES, "tiles: {gfx942: []}", 11, "targets.amd.tiles.gfx942: wanted at least one entry"),
    (
        "toolchains: {}",
        "toolchains: {nvidia: /usr/bin/python3}",
        14,
        "toolchains.nvidia: wanted a mapping, found",
    ),
    (
        "toolchains: {}",
        "toolchains: {nvidia: {python: ''}}",
        14,
        "toolchains.nvidia.python: wanted text, found ''",
    ),
    ("toolchains: {}", "toolchains: {intel: {python: x}}", 14, "toolchains.intel: unknown vendor 'intel'"),
    ("toolchains: {}", "toolchains: {", 15, "not valid YAML"),
    ("version: 1", "version: 2001-99-99", 1, "version: cannot be read"),
]


@pytest.mark.parametrize(("old", "new", "line", "text"), MISTAKES, ids=[mistake[1] for mistake in MISTAKES])
def test_a_mistake_names_file_line_field_and_what_was_wanted(
    old: str, new: str, line: int, text: str
) -> None:
    assert old in GOOD
    with pytest.raises(RequestError) as caught:
        spec.parse(GOOD.replace(old, new, 1), "some/build.yaml")
    message = str(caught.value)
    assert message.startswith(f"some/build.yaml:{line}: "), message
    assert text in message


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "- 1\n", "just words", "a: &a [*a]\n", "\x00", "{" * 5000]
)
def test_what_is_no_build_yaml_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="b.yaml:"):
        spec.parse(text, "b.yaml")


def test_no_target_at_all_is_refused() -> None:
    given = GOOD[: GOOD.index("targets:")] + "targets: {}\n"
    with pytest.raises(RequestError, match=":6: targets: wanted at least one vendor"):
        spec.parse(given)


def test_a_missing_or_unreadable_file_is_refused(tmp_path: Path, write: Callable[[str], Path]) -> None:
    with pytest.raises(RequestError, match="no.yaml: cannot be read: No such file"):
        spec.load(tmp_path / "no.yaml")
    path = write("")
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(RequestError, match="not UTF-8"):
        spec.load(path)


def test_the_file_is_the_named_one_then_the_local_then_the_packaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert spec.find() == spec.PACKAGED
    (tmp_path / "build.yaml").write_text(GOOD)
    assert spec.find() == Path("build.yaml")
    assert spec.find("other.yaml") == Path("other.yaml")


def names(*wanted: str) -> list[str]:
    return [str(name) for name in spec.wanted_targets(spec.parse(GOOD), wanted)]


def test_a_vendor_alone_is_every_arch_that_is_listed() -> None:
    assert names("nvidia") == ["nvidia:sm_80", "nvidia:sm_90"]
    assert names("nvidia:sm_90", "cpu", "nvidia", "nvidia:sm_90") == [
        "cpu:x86_64",
        "nvidia:sm_80",
        "nvidia:sm_90",
    ]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (
            (),
            "no target was named; wanted at least one of nvidia:sm_80, nvidia:sm_90, amd:gfx942, cpu:x86_64",
        ),
        (("intel:xe",), f"unknown vendor 'intel'; wanted one of {VENDORS}"),
        (("nvidia:H100",), "wanted one of nvidia:sm_80, nvidia:sm_90; did you mean nvidia:sm_90?"),
        (("iluvatar",), f"unknown vendor 'iluvatar'; wanted one of {VENDORS}; did you mean tianshu?"),
        (("nvidia:sm_75",), "kvbuild knows no such arch; wanted one of nvidia:sm_80, nvidia:sm_90"),
        (("nvidia:",), "knows no such arch"),
        (("nvidia:sm_100",), "build.yaml does not list it; .*add sm_100 to targets.nvidia.archs"),
        (("",), "unknown vendor ''"),
    ],
)
def test_unknown_targets_are_refused_with_a_list(wanted: tuple[str, ...], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        names(*wanted)


NEEDS_SCRATCH = "{block_t: 4, block_d: 64, split: 1, num_warps: 1, num_stages: 1}"
ALONE = "{block_t: 4, block_d: 512, split: 1, num_warps: 4, num_stages: 1}"


def with_vendors(*sections: str) -> spec.Spec:
    return spec.parse(GOOD.replace("  cpu:\n", "".join(f"  {each}\n" for each in sections) + "  cpu:\n", 1))


def test_one_vendors_tiles_are_overridden_without_another_ones() -> None:
    given = with_vendors(
        f"metax: {{archs: [c500, c600], tiles: {{c500: [{ALONE}]}}}}",
        "hygon: {archs: [gfx936]}",
    )
    assert [row.tile for row in given.targets["metax"].tiles["c500"]] == [Tile(4, 512, 1, 4, 1)]
    assert "c600" not in given.targets["metax"].tiles
    assert given.targets["hygon"].tiles == {}
    assert given.targets["amd"].tiles.keys() == {"gfx942"}


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (
            f"tianshu: {{archs: [ivcore11], tiles: {{ivcore11: [{NEEDS_SCRATCH}]}}}}",
            "wanted block_d 512 and split 1, found 64 and 1; such a tile takes scratch memory, and this "
            "vendor's driver is not known to allocate in a stream's order",
        ),
        (
            f"mthreads: {{archs: [mp_22], tiles: {{mp_22: [{ALONE.replace('warps: 4', 'warps: 16')}]}}}}",
            "tile key 'num_warps': wanted at most 8 on this arch, found 16",
        ),
        (
            f"thead: {{archs: [ppu001], tiles: {{ppu001: [{ALONE.replace('_t: 4', '_t: 8')}]}}}}",
            "tile key 'block_t': wanted 4, found 8; no kernel streams pages on this arch",
        ),
    ],
)
def test_a_tile_that_an_arch_cannot_launch_is_refused(section: str, text: str) -> None:
    with pytest.raises(RequestError, match=re.escape(text)):
        with_vendors(section)


def test_a_vendor_that_the_file_leaves_out_is_refused() -> None:
    given = GOOD.replace("  cpu:\n    archs: [x86_64]\n", "")
    with pytest.raises(RequestError, match="lists no 'cpu' under targets"):
        spec.wanted_targets(spec.parse(given), ["cpu"])


def test_a_cpu_target_needs_its_host() -> None:
    given = GOOD.replace("[x86_64-linux-gnu.2.17]", "[aarch64-linux-gnu.2.17]")
    with pytest.raises(RequestError, match=r"cpu:x86_64: wanted x86_64-linux-gnu.2.17 among the hosts"):
        spec.wanted_targets(spec.parse(given), ["cpu"])


TAGGED = (
    "!!int ''", "!!int _", "!!int '+'", "!!float ''", "!!float _", "!!bool x", "!!timestamp x", "!!set {a}",
    "!!seq x", "!!map x", "!!binary é", "!!merge x", "!!python/object/apply:os.system [id]", "!foo x", "0b_",
    "0x_", "2001-99-99", "'\\0'", '"\\ud800"', "=", "<<", ".nan", "1e400", "&a x", "*x", "? x", "9" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("value", TAGGED)
@pytest.mark.parametrize(
    "place", ["version: {}", "targets: {{nvidia: {}}}", "toolchains: {{amd: {}}}", "? {}\n: 1"]
)
def test_a_value_that_yaml_itself_stumbles_over_is_a_wrong_request(value: str, place: str) -> None:
    key = place.split(":")[0]
    lines = [line for line in GOOD.splitlines() if not line.startswith((f"{key}:", "  "))]
    with pytest.raises(RequestError, match=r"build\.yaml:\d+: "):
        spec.parse("\n".join(lines) + "\n" + place.format(value) + "\n")


@pytest.mark.parametrize("text", ["\ufeff" + GOOD, GOOD.replace("\n", "\r\n"), "---\n" + GOOD + "...\n"])
def test_other_ways_to_write_the_same_are_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "build.yaml"
    path.write_bytes(text.encode())
    assert spec.load(path).targets == spec.parse(GOOD).targets


def test_what_is_no_file_of_settings_is_refused_at_once(tmp_path: Path) -> None:
    huge, pipe = tmp_path / "huge.yaml", tmp_path / "pipe"
    huge.write_text(GOOD + "# x\n" * 300_000)
    os.mkfifo(pipe)
    for path in (huge, pipe, tmp_path, Path("/dev/zero"), tmp_path / "none", tmp_path / ("x" * 300)):
        with pytest.raises(RequestError, match="name a build.yaml with --config"):
            spec.load(path)
