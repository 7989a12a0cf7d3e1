"""Facts as JSON: what `explain --facts` reads."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvbuild.runtime.facts import Facts
from kvbuild.runtime.identity import Marks
from kvbuild.runtime.vendors import driver_words

H200 = Facts("nvidia", "sm_90", "NVIDIA H200", 0, 12080, "libcuda.so.1", "x86_64", "2.36")
MARKS = Marks("cuda", "NVIDIA H200", "9.0", pci="10de", torch=("version.hip",), libraries=("libmusa.so",))


def test_facts_survive_both_ways() -> None:
    assert Facts.from_json(H200.to_json()) == H200
    assert Facts.from_bytes(json.dumps(H200.to_json()).encode()) == H200
    bare = Facts("cpu", "aarch64", "aarch64", 0, 0, "", "aarch64", "")
    assert Facts.from_json(bare.to_json()) == bare
    assert bare.libc_version is None and H200.libc_version == (2, 36)


@pytest.mark.parametrize("name", sorted(set(H200.to_json()) - {"marks"}))
def test_every_field_is_required_and_typed(name: str) -> None:
    value: dict[str, Any] = H200.to_json()
    with pytest.raises(ValueError, match=f"^{name}: wanted"):
        Facts.from_json({**value, name: None})
    del value[name]
    with pytest.raises(ValueError, match=f"^{name}: wanted a value, found no such field"):
        Facts.from_json(value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"color": 1}, "color: wanted no field but"),
        ({"libc": "two"}, "libc: wanted glibc's version such as 2.36"),
        ({"driver": -1}, "driver: wanted an integer >= 0, found -1"),
        ({"index": True}, "index: wanted an integer >= 0, found true"),
        ({"arch": ""}, "arch: wanted a non-empty string"),
        ({"name": "H200\x1b[2J"}, "name: wanted at most 256 characters, none of control"),
        ({"arch": "sm_90\n"}, "arch: wanted at most 256 characters, none of control"),
        ({"host": "x86_64\u202e"}, "host: wanted at most 256 characters, none of control"),
        ({"vendor": "n" * 257}, "vendor: wanted at most 256 characters, none of control, found .{80}$"),
        ({"driver_library": "a\0"}, "driver_library: wanted at most 256 characters"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Facts.from_json({**H200.to_json(), **changes})


def test_marks_come_with_the_facts_and_may_stand_for_vendor_and_arch() -> None:
    whole = replace(H200, marks=MARKS)
    assert Facts.from_json(whole.to_json()) == whole
    assert whole.reasons == ("its PCI vendor is 10de", "its name is NVIDIA H200") and H200.reasons == ()
    value = whole.to_json()
    del value["vendor"], value["arch"]
    assert Facts.from_json(value) == whole
    value["marks"] = {"api": "cuda", "name": "PPU-ZW810E", "capability": "8.0"}
    assert (Facts.from_json(value).vendor, Facts.from_json(value).arch) == ("thead", "ppu001")
    value["marks"] = None
    with pytest.raises(ValueError, match="^vendor: wanted a value, found no such field"):
        Facts.from_json(value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vendor": "amd"}, "^vendor: wanted nvidia, as its marks say .its PCI vendor is 10de"),
        ({"arch": "sm_80"}, "^arch: wanted sm_90, as its marks say"),
        ({"marks": 5}, "^marks: wanted an object"),
        ({"marks": {}}, "^marks.api: wanted a value, found no such field"),
        ({"marks": {"api": "opencl"}}, '^marks.api: wanted "cuda" or'),
        ({"marks": {"api": "cuda", "pci": "0x10de"}}, "^marks.pci: wanted four hex digits"),
        (
            {"marks": {"api": "cuda", "capability": "nine"}},
            "^marks.capability: wanted a capability such as 8.0",
        ),
        ({"marks": {"api": "cuda", "name": "\x1b"}}, "^marks.name: wanted at most 256 characters"),
        ({"marks": {"api": "hip", "code": "g" * 300}}, "^marks.code: wanted at most 256 characters"),
        ({"marks": {"api": "cuda", "torch": "hip"}}, "^marks.torch: wanted an array"),
        ({"marks": {"api": "cuda", "color": 1}}, "^marks.color: wanted no field but"),
        (
            {"marks": {"api": "cuda", "name": "PPU-1", "pci": "10de"}},
            "^marks: wanted marks of one vendor, found",
        ),
    ],
)
def test_mistakes_in_marks_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Facts.from_json({**replace(H200, marks=MARKS).to_json(), **changes})


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"{}"])
def test_other_documents_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="wanted"):
        Facts.from_bytes(data)


def test_they_read_as_a_sentence() -> None:
    assert str(H200) == "nvidia:sm_90 (NVIDIA H200, driver API 12.8, host x86_64 with glibc 2.36)"
    assert driver_words("nvidia", 13000) == "API 13.0"
    assert driver_words("amd", 60402) == "60402"
