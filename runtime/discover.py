"""Which bundle to load where the caller names none."""

from __future__ import annotations

import os

from .errors import BundleError

VARIABLE = "KVBUILD_BUNDLE"
ENTRY_POINTS = "kvbuild.bundles"


def bundle_path(path: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """`path` itself, else what KVBUILD_BUNDLE names, else the bundle of the one installed bundle wheel (an
    entry point of the group kvbuild.bundles, whose value is a path). BundleError where there is none."""
    if path is not None:
        return path
    named = os.environ.get(VARIABLE)
    return named if named else _installed()


def _installed() -> str | os.PathLike[str]:
    from importlib.metadata import entry_points

    # A package found twice on sys.path announces its entry points twice.
    found = {(point.name, point.value): point for point in entry_points(group=ENTRY_POINTS)}
    if not found:
        raise BundleError(
            "wanted a bundle to load, found neither a path, nor one in the environment variable "
            f"{VARIABLE}, nor an installed bundle wheel; name the .kvb file in one of these ways"
        )
    if len(found) > 1:
        names = ", ".join(f"{name} ({value})" for name, value in sorted(found))
        raise BundleError(
            f"wanted one installed bundle wheel, found {len(found)}: {names}; "
            f"name the file to load, or set {VARIABLE}"
        )
    ((name, value),) = found
    try:
        path = found[name, value].load()
    except Exception as error:
        raise BundleError(
            f"entry point {name} = {value}: wanted the path of a bundle, found "
            f"{type(error).__name__}: {error}; install that package again"
        ) from error
    if not isinstance(path, (str, os.PathLike)):
        raise BundleError(f"entry point {name} = {value}: wanted the path of a bundle, found {path!r}")
    return path
