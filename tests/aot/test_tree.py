"""What a folder of installed files holds, and what is no longer so."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvbuild.aot import tree


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "package/__pycache__").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "package/code.py").write_text("x = 1")
    (tmp_path / "package/__pycache__/code.pyc").write_text("compiled")
    (tmp_path / "bin/tool").write_text("#!python")
    (tmp_path / "bin/tool").chmod(0o755)
    (tmp_path / "link").symlink_to("package")
    return tmp_path


def test_every_file_and_link_is_read_and_nothing_that_python_compiled(folder: Path) -> None:
    found = tree.read(folder)
    assert set(found) == {"package/code.py", "bin/tool", "link"}
    assert found["bin/tool"] == tree.File(8, 0o100755, hashlib.sha256(b"#!python").hexdigest())
    assert found["link"].sha256 == hashlib.sha256(b"package").hexdigest()
    assert set(tree.read(folder, ("bin/tool",))) == {"package/code.py", "link"}


def test_json_gives_back_what_it_took(folder: Path) -> None:
    found = tree.read(folder)
    assert tree.from_json(json.loads(json.dumps(tree.to_json(found)))) == found


@pytest.mark.parametrize(
    "value", [None, [], {"a": 1}, {"a": [1, "644"]}, {"a": [1, 644, "x"]}, {"a": ["x", "9", ""]}]
)
def test_other_json_is_an_error_that_callers_know(value: object) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        tree.from_json(value)


def test_the_first_difference_is_said(folder: Path) -> None:
    found = tree.read(folder)
    assert tree.difference(found, found) == ""
    for change, words in (
        ({"size": 9}, "bin/tool: wanted 8 bytes, found 9 bytes"),
        ({"mode": 0o100644}, "bin/tool: wanted the mode 100755, found 100644"),
        ({"sha256": ""}, "bin/tool: its content is not what was installed"),
    ):
        other = {**found, "bin/tool": replace(found["bin/tool"], **change)}
        assert tree.difference(found, other) == words
    assert tree.difference(found, {}) == "bin/tool: wanted 8 bytes, found no such file"


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    assert tree.difference({}, {"pipe": tree.read(folder)["pipe"]}).startswith("pipe: wanted no such file")


def test_the_digest_is_of_paths_and_contents_but_for_what_names_a_host(folder: Path) -> None:
    before = tree.digest(tree.read(folder))
    (folder / "bin/tool").write_text("#!/other/python")
    (folder / "package-1.dist-info").mkdir()
    (folder / "package-1.dist-info/RECORD").write_text("")
    assert tree.digest(tree.read(folder)) == before
    (folder / "package/code.py").rename(folder / "package/other.py")
    assert tree.digest(tree.read(folder)) != before
