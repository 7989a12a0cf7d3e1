"""Which bundle is loaded where none is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvbuild.runtime.discover import bundle_path
from kvbuild.runtime.errors import BundleError


def wheel(folder: Path, name: str, module: str) -> None:
    """An installed package that announces a bundle."""
    (folder / f"{name}.py").write_text(module)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvbuild.bundles]\n{name} = {name}:PATH\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("kvb_one", "kvb_two"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_named_path_wins(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(site, "kvb_one", "PATH = '/from/the/wheel.kvb'")
    monkeypatch.setenv("KVBUILD_BUNDLE", "/from/the/variable.kvb")
    assert bundle_path("given.kvb") == "given.kvb"
    assert bundle_path(None) == "/from/the/variable.kvb"
    monkeypatch.setenv("KVBUILD_BUNDLE", "")
    assert bundle_path(None) == "/from/the/wheel.kvb"


def test_no_bundle_says_what_to_do(site: Path) -> None:
    with pytest.raises(BundleError, match=r"KVBUILD_BUNDLE, nor an installed bundle wheel; name"):
        bundle_path(None)


def test_two_wheels_are_ambiguous(site: Path) -> None:
    wheel(site, "kvb_one", "PATH = 'one.kvb'")
    wheel(site, "kvb_two", "PATH = 'two.kvb'")
    with pytest.raises(BundleError, match=r"found 2: kvb_one \(kvb_one:PATH\), kvb_two"):
        bundle_path(None)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("raise RuntimeError('no data')", "found RuntimeError: no data"),
        ("", "found AttributeError"),
        ("PATH = 3", "wanted the path of a bundle, found 3"),
    ],
)
def test_a_broken_wheel_is_named(site: Path, module: str, words: str) -> None:
    wheel(site, "kvb_one", module)
    with pytest.raises(BundleError, match="entry point kvb_one = kvb_one:PATH") as error:
        bundle_path(None)
    assert words in str(error.value)
