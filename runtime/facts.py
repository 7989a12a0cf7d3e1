"""What selection needs to know about a host and one of its devices. Plain data, so that a choice can be
explained for a host that is not this one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .identity import Marks, identify
from .strictjson import Node, field_names, parse
from .vendors import driver_words

_LIBC = re.compile(r"([0-9]{1,4}\.[0-9]{1,4})?")


@dataclass(frozen=True)
class Facts:
    """One device of one host.

    vendor, arch:   as in a target's name: nvidia and sm_90, amd and gfx942, cpu and x86_64.
    name:           the device's name for people.
    index:          its ordinal in this process; 0 for the cpu.
    driver:         the driver's own integer (cuDriverGetVersion: 12080 is API 12.8); 0 where it has none.
    driver_library: the library that was asked, empty where none was.
    host:           the machine: x86_64 or aarch64.
    libc:           glibc's version such as 2.36, empty where the host has another libc.
    marks:          what vendor and arch were decided from; None for the cpu, or where nobody recorded them.
    """

    vendor: str
    arch: str
    name: str
    index: int
    driver: int
    driver_library: str
    host: str
    libc: str
    marks: Marks | None = None

    @classmethod
    def from_json(cls, value: object) -> Facts:
        """Reads parsed JSON strictly. ValueError names the field, what was wanted and what was found.

        `marks` may be left out; with marks, `vendor` and `arch` may, and a vendor that the marks do not
        bear out is refused.
        """
        given = {"marks": None, **value} if isinstance(value, dict) else value
        marks = None
        if isinstance(given, dict) and given["marks"] is not None:
            marks = Marks.read(Node(given["marks"], "marks"))
            given = _with_identity(given, marks)
        at = Node(given, "").fields(field_names(cls))
        return cls(
            vendor=at["vendor"].line(),
            arch=at["arch"].line(),
            name=at["name"].line(),
            index=at["index"].integer(),
            driver=at["driver"].integer(),
            driver_library=at["driver_library"].line(empty=True),
            host=at["host"].line(),
            libc=at["libc"].matching(_LIBC, "glibc's version such as 2.36, or an empty string"),
            marks=marks,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Facts:
        """Reads a JSON document; ValueError as `from_json`."""
        return cls.from_json(parse(data))

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON values, the inverse of `from_json`."""
        plain = {name: getattr(self, name) for name in field_names(type(self))}
        return plain | {"marks": None if self.marks is None else self.marks.to_json()}

    @property
    def libc_version(self) -> tuple[int, int] | None:
        """glibc's version as numbers, None where the host has another libc."""
        if not self.libc:
            return None
        major, minor = self.libc.split(".")
        return int(major), int(minor)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the device is its vendor's, as phrases; empty where no marks were recorded."""
        return () if self.marks is None else identify(self.marks).reasons

    def __str__(self) -> str:
        parts = [self.name] if self.name != self.arch else []
        if self.driver:
            parts.append(f"driver {driver_words(self.vendor, self.driver)}")
        parts.append(f"host {self.host} with {'glibc ' + self.libc if self.libc else 'no glibc'}")
        return f"{self.vendor}:{self.arch} ({', '.join(parts)})"


def _with_identity(given: dict[str, Any], marks: Marks) -> dict[str, Any]:
    """`given` with the vendor and the arch that its marks say. ValueError where it says another."""
    found = identify(marks)
    if not found.vendor:
        Node(given["marks"], "marks").fail("marks of one vendor", "; ".join(found.reasons))
    said = {"vendor": found.vendor, "arch": found.arch}
    for name, value in said.items():
        if name in given and given[name] != value:
            Node(given[name], name).fail(f"{value}, as its marks say ({'; '.join(found.reasons)})")
    return {**given, **said}
