"""The manifest: what its schemas allow, and nothing else."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvbuild.runtime.errors import BundleError
from kvbuild.runtime.manifest import SCHEMA, Manifest, host_parts

Path = tuple[str | int, ...]

# Objects whose member names are free; a member of theirs may come or go without being a missing field.
FREE = ("blobs", "toolchain", "launchers", "constexprs")


def paths(value: Any, here: Path = ()) -> Iterator[Path]:
    """Every path below a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*here, key)
        yield from paths(child, (*here, key))


def at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def text(path: Path) -> str:
    steps = [f"[{json.dumps(key)}]" if not str(key).isidentifier() else f".{key}" for key in path]
    return "".join(steps).lstrip(".")


def refused(manifest: Any) -> str:
    with pytest.raises(BundleError) as error:
        Manifest.from_json(manifest)
    return str(error.value)


def test_a_manifest_survives_both_ways(samples: Any) -> None:
    value, _ = samples.mixed()
    manifest = Manifest.from_json(value)
    assert manifest.to_json() == value
    assert Manifest.from_bytes(manifest.canonical_bytes()) == manifest
    expected = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert manifest.canonical_bytes() == expected


def test_its_tools_are_what_has_a_version(samples: Any) -> None:
    value, _ = samples.mixed()
    words = {"evidence": "never loaded", "parameters": "derived", "tiles": "measured"}
    value["targets"][0]["toolchain"] = {"zig": "0.17.1", **words}
    assert Manifest.from_json(value).targets[0].tools == {"zig": "0.17.1"}


def test_every_field_is_required(samples: Any) -> None:
    value, _ = samples.mixed()
    fields = [
        path for path in paths(value) if isinstance(path[-1], str) and (len(path) < 2 or path[-2] not in FREE)
    ]
    assert len(fields) > 60
    for path in fields:
        broken = copy.deepcopy(value)
        del at(broken, path[:-1])[path[-1]]
        message = refused(broken)
        assert f"{text(path)}: wanted" in message and "no such field" in message, (path, message)


def test_no_object_takes_an_unknown_field(samples: Any) -> None:
    value, _ = samples.mixed()
    objects = [()] + [p for p in paths(value) if isinstance(at(value, p), dict) and p[-1] not in FREE]
    assert len(objects) > 8
    for path in objects:
        broken = copy.deepcopy(value)
        at(broken, path)["surprise"] = 1
        assert f"{text((*path, 'surprise'))}: wanted no field but" in refused(broken)


@pytest.mark.parametrize("wrong", [None, 1.5, -1, [], {}, "", True, 2**63], ids=repr)
def test_every_value_has_its_type(samples: Any, wrong: Any) -> None:
    value, _ = samples.mixed()
    for path in paths(value):
        right = at(value, path)
        allowed = (
            (wrong is None and path[-1] == "max_outputs")
            or (isinstance(wrong, bool) and isinstance(right, bool))
            or (path[-2:-1] == ("constexprs",) and type(wrong) in (int, bool))
            or (wrong == [] and path[-1] in ("kernels", "args", "variants"))
            or (wrong == {} and path[-1] in FREE)
        )
        if allowed:
            continue
        broken = copy.deepcopy(value)
        at(broken, path[:-1])[path[-1]] = wrong
        assert f"{text(path)}" in refused(broken), path


def kernel_of(value: dict[str, Any]) -> dict[str, Any]:
    return value["targets"][1]["kernels"][0]


def variants_of(value: dict[str, Any]) -> list[dict[str, Any]]:
    return value["targets"][1]["variants"]


def change(**changes: Any) -> Any:
    return lambda value: kernel_of(value).update(changes)


CROSS_CHECKS = [
    (
        "unresolved kernel",
        lambda v: variants_of(v)[0].update(kernels=["other"]),
        r"variants\[0\].kernels: wanted kernels",
    ),
    ("variant without kernels", lambda v: variants_of(v)[0].update(kernels=[]), "one kernel or more"),
    ("gpu target without variants", lambda v: variants_of(v).clear(), "one variant or more"),
    ("kernel twice", lambda v: v["targets"][1]["kernels"].append(kernel_of(v)), "each kernel name once"),
    ("kernel of another ratio", change(ratio=256), "kernels of ratio 128 and layout general"),
    ("kernel of another layout", change(layout="aligned"), "kernels of ratio 128 and layout general"),
    ("bounded last variant", lambda v: variants_of(v)[0].update(max_outputs=64), "last variant of ratio 128"),
    ("layout unknown", change(layout="padded"), '"aligned" or "general"'),
    (
        "blob not listed",
        lambda v: v["blobs"].pop(kernel_of(v)["blob"]),
        r"targets\[1\]: wanted blobs that `blobs` lists",
    ),
    (
        "blob not used",
        lambda v: v["blobs"].update({"f" * 64: 1}),
        "blobs: wanted blobs that a target refers to",
    ),
    ("empty blob", lambda v: v["blobs"].update({kernel_of(v)["blob"]: 0}), "an integer >= 1"),
    ("upper-case sha256", change(blob="A" * 64), "64 lower-case hex digits"),
    (
        "stale digest",
        lambda v: v["targets"][1].update(launch_table="e" * 64),
        "the digest of this target's kernels",
    ),
    ("no target", lambda v: v.update(targets=[]), "one target or more"),
    ("target twice", lambda v: v["targets"].append(v["targets"][1]), "each VENDOR:ARCH once"),
    ("targets unsorted", lambda v: v["targets"].reverse(), "in sorted order"),
    ("no launcher", lambda v: v["targets"][0].update(launchers={}), "a launcher for one host or more"),
    ("odd host", lambda v: v["targets"][0].update(launchers={"vax": "a" * 64}), "x86_64-linux-gnu.2.17"),
    (
        "kernels on the cpu",
        lambda v: v["targets"][0].update(kernels=[kernel_of(v)]),
        r"\[\] for the cpu route",
    ),
    ("cpu route on a gpu", lambda v: v["targets"][1].update(route="cpu"), "the route cpu for the vendor cpu"),
    ("another operator", lambda v: v.update(operator="x"), "c128_256_512_compress"),
    ("vendor as a path", lambda v: v["targets"][0].update(vendor="../x"), "a vendor's name"),
    ("argument of unknown type", lambda v: kernel_of(v)["args"][1].update(type="q8"), "a pointer or one of"),
    ("argument of wrong size", lambda v: kernel_of(v)["args"][1].update(size=8), "4, the bytes of i32"),
    ("arguments overlap", lambda v: kernel_of(v)["args"][1].update(offset=4), "do not overlap"),
]


@pytest.mark.parametrize(
    ("fault", "words"), [(f, w) for _, f, w in CROSS_CHECKS], ids=[n for n, _, _ in CROSS_CHECKS]
)
def test_the_parts_must_agree(samples: Any, fault: Any, words: str) -> None:
    value, _ = samples.mixed()
    value = copy.deepcopy(value)
    fault(value)
    assert re.search(words, refused(value))


def test_a_target_may_have_many_variants(samples: Any) -> None:
    value, _ = samples.mixed()
    target = value["targets"][1]
    aligned = {**kernel_of(value), "name": "fused-c128-aligned", "layout": "aligned"}
    target["kernels"].append(aligned)
    few = samples.variant(layout="aligned", kernels=["fused-c128-aligned"], max_outputs=8)
    target["variants"] = [few, *variants_of(value)]
    value["targets"][1] = samples.sealed(target)
    names = [variant.name for variant in Manifest.from_json(value).targets[1].variants]
    assert names == ["c128-aligned-8", "c128-general-any"]


def test_a_newer_schema_is_refused_by_naming_its_reader(samples: Any) -> None:
    value, _ = samples.mixed()
    newer = {"schema": SCHEMA + 1, "kvbuild": "9.8.7", "whatever": []}
    message = refused(newer)
    assert f"found {SCHEMA + 1}" in message and "kvbuild 9.8.7 or newer reads it" in message
    for wrong in (0, -1, True, "1", 1.0, None):
        assert "schema: wanted an integer from 1 to 2" in refused({**value, "schema": wrong})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "wanted JSON"),
        (b"\xff", "wanted JSON in UTF-8"),
        (b"{", "wanted JSON"),
        (b'{"schema":1,"schema":1}', '"schema" repeated'),
        (b'{"schema":NaN}', "found NaN"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"schema":' + b"9" * 10_000 + b"}", "wanted"),
        (b'{"schema":1,"kvbuild":"\\ud800"}', "wanted"),
        (b"[]", "wanted an object"),
    ],
    ids=["empty", "not utf-8", "cut", "repeated key", "nan", "deep", "huge number", "surrogate", "array"],
)
def test_bytes_that_are_no_manifest(data: bytes, words: str) -> None:
    with pytest.raises(BundleError, match=re.escape(words)):
        Manifest.from_bytes(data)


@pytest.mark.parametrize(
    "wrong", ["", "a\0b", "\x1b[31m", "two\nlines", "\u202e", "é", " a", "a" * 257], ids=ascii
)
def test_names_are_printable_ascii(samples: Any, wrong: str) -> None:
    value, _ = samples.mixed()
    names = ("name", "entry", "field", "type", "denormals", "triton", "ptxas", "zig")
    places = [path for path in paths(value) if path[-1] in names]
    assert {path[-1] for path in places} >= {"name", "entry", "field", "type", "denormals"}
    for path in places:
        broken = copy.deepcopy(value)
        at(broken, path[:-1])[path[-1]] = wrong
        assert f"{text(path)}: wanted 1 to 256 printable ASCII" in refused(broken), path
    for free in ("toolchain", "constexprs"):
        broken = copy.deepcopy(value)
        (broken["targets"][1] if free == "toolchain" else kernel_of(broken))[free][wrong] = "1"
        assert "printable ASCII" in refused(broken)


@pytest.mark.parametrize("depth", [*range(850, 1000, 3), 2500, 9000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_no_depth_of_nesting_gets_through(samples: Any, depth: int, opening: str) -> None:
    """Whatever reads, shows or compares a value may be the first that the depth is too much for."""
    value, _ = samples.mixed()
    closing = "]" if opening == "[" else "}"
    nested = f"{opening * depth}1{closing * depth}"
    plain = json.dumps(value, sort_keys=True, separators=(",", ":"))
    for field in ("args", "constexprs", "name", "launchers", "blobs", "schema"):
        with pytest.raises(BundleError):
            Manifest.from_bytes(re.sub(rf'"{field}":', f'"{field}":{nested},"x":', plain, count=1).encode())


def test_many_keys_with_the_last_one_repeated_are_refused_soon() -> None:
    keys = ",".join(f'"{number}":1' for number in range(200_000))
    with pytest.raises(BundleError, match='"199999" repeated'):
        Manifest.from_bytes(f'{{{keys},"199999":1}}'.encode())


def test_what_a_message_quotes_is_printable_and_short(samples: Any) -> None:
    value, _ = samples.mixed()
    evil = "\x1b[2J" + "A" * 5000
    kernel = {**kernel_of(value), "name": evil}
    for broken in (
        {"schema": 3, "kvbuild": evil},
        {"schema": 10**4000, "kvbuild": "1"},
        {**value, evil: 1},
        {**value, "targets": [value["targets"][0], {**value["targets"][1], "kernels": [kernel]}]},
    ):
        message = refused(broken)
        assert message.isprintable() and len(message) < 1000


def test_only_the_canonical_form_is_read(samples: Any) -> None:
    value, _ = samples.mixed()
    with pytest.raises(BundleError, match="canonical JSON"):
        Manifest.from_bytes(json.dumps(value, indent=1).encode())


def test_a_surrogate_in_a_free_name_is_refused_too(samples: Any) -> None:
    value, _ = samples.mixed()
    value["targets"][0]["toolchain"] = {"\ud800": "1"}
    with pytest.raises(BundleError):
        Manifest.from_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def test_a_host_splits_into_machine_and_glibc() -> None:
    assert host_parts("aarch64-linux-gnu.2.17") == ("aarch64", (2, 17))
    with pytest.raises(ValueError, match="x86_64-linux-gnu"):
        host_parts("x86_64-linux-musl")
