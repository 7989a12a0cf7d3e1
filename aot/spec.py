"""build.yaml as typed, checked objects. Each error names file, line, field and what was wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..kernels.contract import COMPRESS_RATIOS, SPECIALISED_BLOCK_SIZE
from . import document, meant, targets
from .errors import RequestError
from .tuning import Row, parse_rows

VERSION = 1
HOSTS = ("x86_64-linux-gnu.2.17", "aarch64-linux-gnu.2.17")
STATE_BLOCK_SIZES: tuple[int | str, ...] = (SPECIALISED_BLOCK_SIZE, "any")
PACKAGED = Path(__file__).with_name("build.yaml")

_KEYS = ("version", "compress_ratios", "state_block_sizes", "hosts", "numerics", "targets")


@dataclass(frozen=True)
class Section:
    """What build.yaml says of one vendor.

    tiles: per arch, the rows that take the place of its tuning table. extra: the vendor's own keys.
    """

    vendor: str
    archs: tuple[str, ...]
    tiles: Mapping[str, tuple[Row, ...]]
    extra: Mapping[str, object]


@dataclass(frozen=True)
class Spec:
    """A whole build.yaml. toolchains: per vendor the interpreter's command, one text or its words."""

    file: str
    compress_ratios: tuple[int, ...]
    state_block_sizes: tuple[int | str, ...]
    hosts: tuple[str, ...]
    fp_fusion: bool
    targets: Mapping[str, Section]
    toolchains: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, order=True)
class TargetName:
    """One target, written VENDOR:ARCH."""

    vendor: str
    arch: str

    def __str__(self) -> str:
        return f"{self.vendor}:{self.arch}"


def find(path: str | Path | None = None) -> Path:
    """The build.yaml to use: `path`, else ./build.yaml, else the one in the package."""
    if path is not None:
        return Path(path)
    here = Path("build.yaml")
    return here if here.exists() else PACKAGED


def load(path: str | Path) -> Spec:
    """Reads and checks a build.yaml. Raises RequestError, also where the file cannot be read."""
    try:
        text = document.read(Path(path))
    except RequestError as error:
        raise RequestError(f"{error}; name a build.yaml with --config") from None
    return parse(text, str(path))


def parse(text: str, file: str = "build.yaml") -> Spec:
    """Checks the text of a build.yaml. Raises RequestError as `file:line: field: wanted, found`."""
    advice = f"copy the whole of {PACKAGED} and edit it"
    keys = document.parse(text, file).record(_KEYS, ("toolchains",), advice)
    version = keys["version"].integer()
    if version != VERSION:
        keys["version"].fail(f"wanted {VERSION}, found {version}; this kvbuild reads no other version")
    numerics = keys["numerics"].record(("fp_fusion",))
    if numerics["fp_fusion"].boolean():
        numerics["fp_fusion"].fail(
            "wanted false, found true; fused multiply-add changes the operator's bytes, which are fixed"
        )
    block_sizes = _choices(keys["state_block_sizes"], STATE_BLOCK_SIZES)
    if "any" not in block_sizes:
        keys["state_block_sizes"].fail(
            "wanted `any` among the entries; without the general variant a call outside the specialised "
            "layout would have nothing to run"
        )
    sections = {
        vendor: _section(vendor, value)
        for vendor, value in _vendors(keys["targets"], "wanted at least one vendor, found none")
    }
    toolchains = {
        vendor: _command(value.record(("python",))["python"])
        for vendor, value in (_vendors(keys["toolchains"]) if "toolchains" in keys else ())
    }
    return Spec(
        file=file,
        compress_ratios=tuple(sorted(_choices(keys["compress_ratios"], COMPRESS_RATIOS))),
        state_block_sizes=block_sizes,
        hosts=_choices(keys["hosts"], HOSTS),
        fp_fusion=False,
        targets=sections,
        toolchains=toolchains,
    )


def wanted_targets(spec: Spec, names: Sequence[str]) -> tuple[TargetName, ...]:
    """The targets that `names` (VENDOR or VENDOR:ARCH) mean, sorted, each once.

    Raises RequestError where `names` is empty, or one is unknown, not listed in build.yaml or without a host.
    """
    if not names:
        raise RequestError(f"no target was named; wanted at least one of {_listed(spec)}")
    chosen: set[TargetName] = set()
    for name in names:
        vendor, colon, arch = name.partition(":")
        if vendor not in targets.names():
            raise RequestError(
                f"target {name!r}: unknown vendor {vendor!r}; wanted one of {', '.join(targets.names())}"
                f"{meant.target(name)}"
            )
        if vendor not in spec.targets:
            raise RequestError(
                f"target {name!r}: {spec.file} lists no {vendor!r} under targets; it lists {_listed(spec)}"
            )
        listed = spec.targets[vendor].archs
        if colon and arch not in listed:
            known = targets.load(vendor).ARCHS
            what = "does not list it" if arch in known else "knows no such arch"
            hint = f"; add {arch} to targets.{vendor}.archs" if arch in known else meant.target(name)
            whose = spec.file if arch in known else "kvbuild"
            raise RequestError(
                f"target {name!r}: {whose} {what}; wanted one of "
                f"{', '.join(f'{vendor}:{listed_arch}' for listed_arch in listed)}{hint}"
            )
        for each in (arch,) if colon else listed:
            if targets.load(vendor).ROUTE == "cpu" and not cpu_hosts(spec, each):
                raise RequestError(
                    f"target {vendor}:{each}: wanted {each}-linux-gnu.2.17 among the hosts of {spec.file}, "
                    f"found {', '.join(spec.hosts)}; add it"
                )
        chosen.update(TargetName(vendor, each) for each in ((arch,) if colon else listed))
    return tuple(sorted(chosen))


def cpu_hosts(spec: Spec, arch: str) -> tuple[str, ...]:
    """The hosts that a cpu target of that arch runs on."""
    return tuple(host for host in spec.hosts if host.startswith(f"{arch}-"))


def _listed(spec: Spec) -> str:
    return ", ".join(f"{s.vendor}:{arch}" for s in spec.targets.values() for arch in s.archs)


def _choices(value: document.Value, known: Sequence[object]) -> tuple:  # type: ignore[type-arg]
    chosen: list[object] = []
    for entry in value.list():
        one = entry.scalar()
        # True == 1 and 8.0 == 8 in Python; neither is what the file should say.
        if not any(type(one) is type(each) and one == each for each in known):
            entry.fail(f"wanted one of {', '.join(map(str, known))}, found {one!r}")
        if one in chosen:
            entry.fail(f"{one!r} stands twice; keep one")
        chosen.append(one)
    return tuple(chosen)


def _vendors(value: document.Value, if_none: str = "") -> list[tuple[str, document.Value]]:
    found: list[tuple[str, document.Value]] = []
    for key, section in value.items():
        if not isinstance(key, str) or key not in targets.names():
            known = ", ".join(targets.names())
            section.fail(f"unknown vendor {key!r}; wanted one of {known}{meant.vendor(str(key))}")
        found.append((key, section))
    if not found and if_none:
        value.fail(if_none)
    return found


def _section(vendor: str, value: document.Value) -> Section:
    module = targets.load(vendor)
    readers: Mapping[str, Callable[[document.Value], object]] = module.SECTION_KEYS
    tiled = ("tiles",) if module.ROUTE == "gpgpu" else ()
    keys = value.record(("archs",), (*tiled, *readers))
    archs: tuple[str, ...] = _choices(keys["archs"], module.ARCHS)
    tiles: dict[str, tuple[Row, ...]] = {}
    for arch, rows in keys["tiles"].items() if "tiles" in keys else ():
        if arch not in archs:
            rows.fail(f"wanted an arch listed in targets.{vendor}.archs ({', '.join(archs)}), found {arch!r}")
        tiles[str(arch)] = parse_rows(rows, nested=False, limits=targets.limits(vendor, str(arch)))
    extra = {name: read(keys[name]) for name, read in readers.items() if name in keys}
    return Section(vendor, archs, tiles, extra)


def _command(value: document.Value) -> tuple[str, ...]:
    if value.found() == "a list":
        return tuple(entry.text() for entry in value.list())
    return (value.text(),)
