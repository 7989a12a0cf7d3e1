"""The bundle's manifest: everything a launch needs and everything that makes it trustworthy.

The types are plain data. `Manifest.from_json` accepts exactly what docs/architecture.md describes and
raises BundleError for anything else, naming the JSON path, what was wanted and what was found.

Schema 1 has targets of the routes gpgpu and cpu. Schema 2 adds the route staged, and a manifest has it only
where one of its targets needs it, so that every other bundle is read by older readers too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import BundleError
from .launchtable import (
    LAYOUTS,
    Assumes,
    Grid,
    Kernel,
    KernelArg,
    Tile,
    Variant,
    check_table,
    launch_table_digest,
    table_digest,
)
from .strictjson import JsonError, Node, canonical, field_names, parse, shown

if TYPE_CHECKING:
    from .staged import Staged, StagedVariant

SCHEMA = 2
OPERATOR = "c128_256_512_compress"
MANIFEST_NAME = "manifest.json"

ROUTES = ("gpgpu", "cpu", "staged")

_HOST = re.compile(r"(x86_64|aarch64)-linux-gnu\.([0-9]{1,3})\.([0-9]{1,3})")
_NAME = re.compile(r"[A-Za-z0-9_.+-]{1,64}")


@dataclass(frozen=True)
class Numerics:
    """The flags that could change a byte of the result."""

    fp_fusion: bool
    denormals: str

    @classmethod
    def read(cls, node: Node) -> Numerics:
        at = node.fields(field_names(cls))
        return cls(at["fp_fusion"].boolean(), at["denormals"].label())

    def to_json(self) -> dict[str, Any]:
        return {"fp_fusion": self.fp_fusion, "denormals": self.denormals}


def _read_staged(at: Mapping[str, Node]) -> Staged:
    # Few bundles have one, and every process would pay for the import.
    from .staged import Staged

    return Staged.read(at)


# Under these names a target's toolchain says in words what is known, and what not, of the result.
IN_WORDS = ("evidence", "parameters", "tiles")


@dataclass(frozen=True)
class Target:
    """Everything the bundle holds for one VENDOR:ARCH."""

    vendor: str
    arch: str
    route: str
    warp_size: int
    elf_machine: int
    min_driver: int
    toolchain: Mapping[str, str]
    numerics: Numerics
    source_digest: str
    launchers: Mapping[str, str]
    launch_table: str
    kernels: tuple[Kernel, ...]
    variants: tuple[Variant, ...]
    staged: Staged | None = None

    @property
    def name(self) -> str:
        """VENDOR:ARCH."""
        return f"{self.vendor}:{self.arch}"

    @property
    def tools(self) -> Mapping[str, str]:
        """Version by tool: its toolchain without what that says in words."""
        return {name: text for name, text in self.toolchain.items() if name not in IN_WORDS}

    @property
    def blobs(self) -> frozenset[str]:
        """The sha256 of every blob this target refers to."""
        return frozenset((*self.launchers.values(), *self.kernel_blobs.values()))

    @property
    def kernel_blobs(self) -> Mapping[str, str]:
        """The sha256 of what its kernels were compiled to, by the name that its launchers know it by: the
        digest itself, or the kernel's name where the target is staged."""
        if self.staged:
            return {kernel.name: kernel.blob for kernel in self.staged.kernels}
        return {kernel.blob: kernel.blob for kernel in self.kernels}

    @property
    def launchable(self) -> tuple[Variant | StagedVariant, ...]:
        """What a call may launch, in the launcher's order; empty for the cpu."""
        return self.staged.variants if self.staged else self.variants

    @classmethod
    def read(cls, node: Node) -> Target:
        is_staged = isinstance(node.value, dict) and node.value.get("route") == "staged"
        at = node.fields((*_TARGET_FIELDS, "stage", "operators") if is_staged else _TARGET_FIELDS)
        launchers = {}
        for host, blob in at["launchers"].members().items():
            Node(host, at["launchers"].path).matching(_HOST, "hosts such as x86_64-linux-gnu.2.17")
            launchers[host] = blob.sha256()
        target = cls(
            vendor=at["vendor"].matching(_NAME, "a vendor's name"),
            arch=at["arch"].matching(_NAME, "an arch's name"),
            route=at["route"].string(*ROUTES),
            warp_size=at["warp_size"].integer(0, 1024),
            elf_machine=at["elf_machine"].integer(0, 65535),
            min_driver=at["min_driver"].integer(),
            toolchain={name: value.label() for name, value in at["toolchain"].labelled().items()},
            numerics=Numerics.read(at["numerics"]),
            source_digest=at["source_digest"].sha256(),
            launchers=launchers,
            launch_table=at["launch_table"].sha256(),
            kernels=() if is_staged else at["kernels"].each(Kernel.read),
            variants=() if is_staged else at["variants"].each(Variant.read),
            staged=_read_staged(at) if is_staged else None,
        )
        target._check(at)
        return target

    def _check(self, at: Mapping[str, Node]) -> None:
        if not self.launchers:
            at["launchers"].fail("a launcher for one host or more", "none")
        if (self.route == "cpu") != (self.vendor == "cpu"):
            found = f"{self.route} for {self.vendor}"
            at["route"].fail("the route cpu for the vendor cpu, and for no other", found)
        if self.route == "cpu":
            for name in ("kernels", "variants"):
                if getattr(self, name):
                    at[name].fail("[] for the cpu route", f"{len(getattr(self, name))} entries")
        elif not self.staged and not self.variants:
            at["variants"].fail("one variant or more", "none")
        check_table(self.kernels, self.variants, at["kernels"], at["variants"])
        if self.staged:
            digest, what = self.staged.digest, "kernels (without their blobs), operators and variants"
        else:
            digest = table_digest({name: at[name].value for name in ("kernels", "variants")})
            what = "kernels and variants"
        if digest != self.launch_table:
            at["launch_table"].fail(f"{digest}, the digest of this target's {what}")

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in _TARGET_FIELDS}
        return plain | {
            "toolchain": dict(self.toolchain),
            "numerics": self.numerics.to_json(),
            "launchers": dict(self.launchers),
            "kernels": [kernel.to_json() for kernel in self.kernels],
            "variants": [variant.to_json() for variant in self.variants],
            **(self.staged.to_json() if self.staged else {}),
        }


_TARGET_FIELDS = tuple(name for name in field_names(Target) if name != "staged")


@dataclass(frozen=True)
class Manifest:
    """The manifest of one bundle. `blobs` maps each blob's sha256 to its size in bytes."""

    kvbuild: str
    targets: tuple[Target, ...]
    blobs: Mapping[str, int]
    operator: str = OPERATOR

    @property
    def schema(self) -> int:
        """The oldest schema that can say it."""
        return 2 if any(target.staged for target in self.targets) else 1

    @classmethod
    def from_json(cls, value: object) -> Manifest:
        """Reads parsed JSON. Raises BundleError for whatever its schema does not allow."""
        try:
            return cls._read(Node(value, ""))
        except JsonError as error:
            raise BundleError(f"{MANIFEST_NAME}: {error}") from None

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Reads canonical JSON bytes. Raises BundleError, also where the bytes are not canonical."""
        try:
            value = parse(data)
        except JsonError as error:
            raise BundleError(f"{MANIFEST_NAME}: {error}") from None
        manifest = cls.from_json(value)
        # The same as manifest.canonical_bytes(), for nothing was left out or filled in, but faster.
        if canonical(value) != data:
            raise BundleError(
                f"{MANIFEST_NAME}: wanted canonical JSON (sorted keys, no spaces, UTF-8), "
                "found another form; build the bundle again"
            )
        return manifest

    @classmethod
    def _read(cls, node: Node) -> Manifest:
        _check_schema(node)
        at = node.fields(("schema", *field_names(cls)))
        manifest = cls(
            kvbuild=at["kvbuild"].matching(_NAME, "a version"),
            operator=at["operator"].string(OPERATOR),
            targets=at["targets"].each(Target.read),
            blobs={
                Node(name, "blobs").sha256(): size.integer(1) for name, size in at["blobs"].members().items()
            },
        )
        manifest._check(at)
        if at["schema"].value != manifest.schema:
            at["schema"].fail(f"{manifest.schema}, the schema of these targets' routes")
        return manifest

    def _check(self, at: Mapping[str, Node]) -> None:
        names = [(target.vendor, target.arch) for target in self.targets]
        if not names:
            at["targets"].fail("one target or more", "none")
        if names != sorted(set(names)):
            found = ", ".join(target.name for target in self.targets)
            at["targets"].fail("each VENDOR:ARCH once, in sorted order", found)
        used: set[str] = set()
        for index, target in enumerate(self.targets):
            for blob in sorted(target.blobs - set(self.blobs)):
                Node(blob, f"targets[{index}]").fail("blobs that `blobs` lists")
            used |= target.blobs
        for blob in sorted(set(self.blobs) - used):
            Node(blob, "blobs").fail("blobs that a target refers to")

    def to_json(self) -> dict[str, Any]:
        """The manifest as JSON values, the inverse of `from_json`."""
        return {
            "schema": self.schema,
            "kvbuild": self.kvbuild,
            "operator": self.operator,
            "targets": [target.to_json() for target in self.targets],
            "blobs": dict(self.blobs),
        }

    def canonical_bytes(self) -> bytes:
        """The bytes of manifest.json."""
        return canonical(self.to_json())


def host_parts(host: str) -> tuple[str, tuple[int, int]]:
    """Splits a host such as x86_64-linux-gnu.2.17 into its machine and the oldest glibc it runs on."""
    match = _HOST.fullmatch(host)
    if match is None:
        raise ValueError(f"host: wanted one such as x86_64-linux-gnu.2.17, found {host!r}")
    return match[1], (int(match[2]), int(match[3]))


def _check_schema(node: Node) -> None:
    if not isinstance(node.value, dict):
        node.fail("an object")
    schema = node.value.get("schema")
    if type(schema) is int and schema > SCHEMA:
        writer = node.value.get("kvbuild")
        known = isinstance(writer, str) and _NAME.fullmatch(writer)
        reader = f"kvbuild {writer} or newer" if known else "a newer kvbuild"
        raise JsonError(
            f"schema: wanted {SCHEMA}, the newest that this kvbuild reads, found {shown(schema)}; "
            f"{reader} reads it: install that, or build the bundle with this version"
        )
    if "schema" not in node.value:
        Node(None, "schema").fail(f"an integer from 1 to {SCHEMA}", "no such field")
    Node(schema, "schema").integer(1, SCHEMA)


__all__ = [
    "LAYOUTS",
    "MANIFEST_NAME",
    "OPERATOR",
    "SCHEMA",
    "Assumes",
    "Grid",
    "Kernel",
    "KernelArg",
    "Manifest",
    "Numerics",
    "Target",
    "Tile",
    "Variant",
    "host_parts",
    "launch_table_digest",
]
