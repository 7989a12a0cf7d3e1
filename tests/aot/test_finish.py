"""`kvbuild finish`, with a stand-in hivmc that checks how it is called and writes marked objects."""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from cann import environment, files

from kvbuild.aot.errors import BuildError, RequestError, ToolchainError
from kvbuild.aot.finish import FLAGS, find_hivmc, finish
from kvbuild.runtime.bundle import open_bundle
from kvbuild.runtime.errors import BundleError


def test_every_kernel_is_compiled_and_nothing_else_changes(
    unfinished: Path, cann: Path, tmp_path: Path
) -> None:
    out = tmp_path / "done.kvb"
    noted: list[str] = []
    before = unfinished.read_bytes()
    done = finish(unfinished, out, environment(cann), note=noted.append)
    assert unfinished.read_bytes() == before
    assert done.targets == ("ascend:910B1", "ascend:910B2")
    assert (done.hivmc.version, done.hivmc.path) == ("1.4.2", cann / "tools/bishengir/bin/hivmc")
    with open_bundle(unfinished) as old, open_bundle(out) as new:
        # Equal HIVM is compiled once, whichever target it is of.
        assert (
            len(noted)
            == done.kernels
            == len({b for t in old.manifest.targets for b in t.kernel_blobs.values()})
        )
        assert noted[0].startswith("ascend:910B1 ")
        for was, now in zip(old.manifest.targets, new.manifest.targets, strict=True):
            assert was.staged is not None and now.staged is not None
            assert (was.staged.stage, now.staged.stage) == ("hivm", "device")
            assert (now.elf_machine, now.toolchain) == (0x1029, {**was.toolchain, "hivmc": "1.4.2"})
            # The launchers go on knowing their manifest.
            assert (now.launch_table, now.launchers) == (was.launch_table, was.launchers)
            for name, blob in was.kernel_blobs.items():
                data = new.read(now.kernel_blobs[name])
                assert data[:4] == b"\x7fELF" and hashlib.sha256(old.read(blob)).digest() in data
        launchers = {blob for target in new.manifest.targets for blob in target.launchers.values()}
        finished = {blob for target in new.manifest.targets for blob in target.kernel_blobs.values()}
        assert set(new.manifest.blobs) == launchers | finished


def test_a_bundle_is_replaced_in_place(unfinished: Path, cann: Path, tmp_path: Path) -> None:
    out = tmp_path / "done.kvb"
    finish(unfinished, out, environment(cann))
    finish(unfinished, unfinished, environment(cann))
    assert unfinished.read_bytes() == out.read_bytes()


FAILURES = {
    "fails": ("hivmc 1.4.2 failed with exit 3:\nerror: no registers left", "ascend:910B1 normalise"),
    "silent": ("wanted an object from hivmc 1.4.2, found none", "ascend:910B1 "),
    "text": (
        "wanted an object for the chip from hivmc 1.4.2, found another: wanted a 64-bit",
        "ascend:910B1 ",
    ),
    "host": ("found another: its ELF machine is 62, x86-64", "ascend:910B1 "),
    "nameless": ("found another: it does not name ", "ascend:910B1 "),
    "mixed": ("wanted objects for one ELF machine, found ", "ascend:910B1"),
}


@pytest.mark.parametrize("mode", FAILURES)
def test_a_failure_leaves_the_bundle_as_it_was(unfinished: Path, cann: Path, mode: str) -> None:
    before, there = unfinished.read_bytes(), files(unfinished.parent)
    with pytest.raises(BuildError) as failure:
        finish(unfinished, unfinished, environment(cann, STANDIN=mode))
    words, start = FAILURES[mode]
    assert str(failure.value).startswith(start) and words in str(failure.value)
    assert (unfinished.read_bytes(), files(unfinished.parent)) == (before, there)


@pytest.mark.parametrize("mode", ["pipe", "folder", "endless"])
def test_what_is_no_file_is_no_object_and_is_not_waited_for(unfinished: Path, cann: Path, mode: str) -> None:
    with pytest.raises(BuildError, match="wanted an object from hivmc 1.4.2, found none"):
        finish(unfinished, unfinished, environment(cann, STANDIN=mode))


def test_one_that_prints_without_end_is_stopped(unfinished: Path, cann: Path) -> None:
    with pytest.raises(BuildError, match="hivmc 1.4.2 failed with exit -9:\n") as failure:
        finish(unfinished, unfinished, environment(cann, STANDIN="floods"))
    assert len(str(failure.value)) < 10_000


def test_one_that_hangs_is_ended_with_what_it_started(
    unfinished: Path, cann: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbuild.aot.finish.LIMIT_S", 1.0)
    pid = tmp_path / "pid"
    with pytest.raises(BuildError, match="wanted it to end within 1 s, found it still at work") as failure:
        finish(unfinished, unfinished, environment(cann, STANDIN="hangs", PID=str(pid)))
    assert re.search(r"\n1 of (\d+) kernels failed, \d+ were not tried; ", str(failure.value))
    state = Path(f"/proc/{pid.read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_full_disk_for_what_lies_between_is_said(
    unfinished: Path, cann: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BuildError, match="cannot be written: No space left on device; make room or"):
        finish(unfinished, unfinished, environment(cann))


def test_a_link_to_a_bundle_stays(unfinished: Path, cann: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links/latest.kvb"
    link.symlink_to(unfinished)
    finish(link, link, environment(cann))
    assert link.is_symlink() and files(link.parent) == {"latest.kvb"}
    with open_bundle(unfinished) as bundle:
        assert all(each.staged and each.staged.stage == "device" for each in bundle.manifest.targets)


def test_no_hivmc(unfinished: Path, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError) as failure:
        finish(unfinished, unfinished, environment(tmp_path / "elsewhere"))
    assert str(failure.value) == (
        "hivmc: wanted CANN's compiler of HIVM, found none (looked for hivmc, "
        f"{tmp_path}/elsewhere/tools/bishengir/bin/hivmc); install the CANN toolkit 8.5 or later, which has "
        "it in tools/bishengir/bin, and source its set_env.sh, or name it with --hivmc"
    )


@pytest.mark.parametrize("mode", ["speechless", "blank"])
def test_a_hivmc_that_says_nothing_is_refused(cann: Path, mode: str) -> None:
    with pytest.raises(ToolchainError, match="wanted a hivmc that says its version, found one that prints"):
        find_hivmc(environment(cann, STANDIN=mode))


def test_a_version_in_no_known_form_is_recorded_as_it_came(unfinished: Path, cann: Path) -> None:
    assert find_hivmc(environment(cann, STANDIN="broken")).version == "hivmc 1.4.2 (0a1b2c3 2026-03-01)"
    noted: list[str] = []
    done = finish(unfinished, unfinished, environment(cann, STANDIN="odd"), note=noted.append)
    version = done.hivmc.version
    assert version.startswith("[1mCANN 8.5 compiler  build x x") and len(version) == 255
    assert noted[0] == (
        f"{cann}/tools/bishengir/bin/hivmc says no version that kvbuild can read; it is recorded as it came: "
        + version
    )
    with open_bundle(unfinished) as bundle:
        assert {each.toolchain["hivmc"] for each in bundle.manifest.targets} == {version}


def test_every_kernel_is_tried_and_what_failed_is_kept(unfinished: Path, cann: Path, tmp_path: Path) -> None:
    noted: list[str] = []
    kept = tmp_path / "a b/kept"
    before = unfinished.read_bytes()
    with pytest.raises(BuildError) as failure:
        finish(unfinished, unfinished, environment(cann, STANDIN="fails"), note=noted.append, keep=kept)
    with open_bundle(unfinished) as bundle:
        every = {blob for target in bundle.manifest.targets for blob in target.kernel_blobs.values()}
        (blob,) = {target.kernel_blobs["normalise"] for target in bundle.manifest.targets}
        text = bundle.read(blob)
    assert len(noted) == len(every) and unfinished.read_bytes() == before
    assert str(failure.value) == (
        "ascend:910B1 normalise, ascend:910B2 normalise: hivmc 1.4.2 failed with exit 3:\n"
        f"error: no registers left\n1 of {len(every)} kernels failed; no bundle was written, see {kept}"
    )
    assert files(kept) == {"commands.sh", "1-ascend-910B1-normalise.mlir"}
    assert (kept / "1-ascend-910B1-normalise.mlir").read_bytes() == text
    (command,) = (kept / "commands.sh").read_text().splitlines()
    assert command == (
        f"{cann}/tools/bishengir/bin/hivmc 1-ascend-910B1-normalise.mlir {' '.join(FLAGS)} "
        "-o 1-ascend-910B1-normalise.o"
    )
    finish(unfinished, unfinished, environment(cann), keep=kept)
    assert files(kept) == {"1-ascend-910B1-normalise.mlir"}  # no command of another run


def test_failures_of_more_than_one_kind_are_all_listed(unfinished: Path, cann: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError) as failure:
        finish(unfinished, unfinished, environment(cann, STANDIN="nameless"), keep=tmp_path / "kept")
    with open_bundle(unfinished) as bundle:
        for target in bundle.manifest.targets:
            for name in target.kernel_blobs:
                assert f"{target.name} {name}" in str(failure.value)
        every = len({blob for target in bundle.manifest.targets for blob in target.kernel_blobs.values()})
    assert f"{every} of {every} kernels failed" in str(failure.value)
    assert len(files(tmp_path / "kept")) == every + 1


def test_what_cannot_be_kept_is_said_first(unfinished: Path, cann: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    noted: list[str] = []
    with pytest.raises(RequestError, match="--keep .*/file: wanted a folder that can be written, found: "):
        finish(unfinished, unfinished, environment(cann), note=noted.append, keep=tmp_path / "file")
    assert noted == []


def test_a_damaged_launcher_is_seen_before_hivmc_runs(unfinished: Path, cann: Path) -> None:
    data = unfinished.read_bytes()
    at = data.index(b"a launcher for 910B2")
    unfinished.write_bytes(data[:at] + b"A" + data[at + 1 :])
    noted: list[str] = []
    with pytest.raises(BundleError, match="wanted content of that sha256"):
        finish(unfinished, unfinished, environment(cann), note=noted.append)
    assert noted == []


def test_where_hivmc_is_looked_for(cann: Path, tmp_path: Path) -> None:
    path = cann / "tools/bishengir/bin/hivmc"
    nothing: Mapping[str, str] = {"PATH": "/usr/bin:/bin"}
    assert find_hivmc({**nothing, "PATH": f"{path.parent}:/usr/bin:/bin"}).path == path
    assert find_hivmc(nothing, str(path)).path == path
    assert find_hivmc({**nothing, "ASCEND_TOOLKIT_HOME": str(cann)}).path == path
    # Beside the bishengir-compile that a link on PATH leads to.
    beside = path.with_name("bishengir-compile")
    beside.write_text("#!/bin/sh\n")
    beside.chmod(0o755)
    links = tmp_path / "links"
    links.mkdir()
    (links / "bishengir-compile").symlink_to(beside)
    assert find_hivmc({"PATH": f"{links}:/usr/bin:/bin"}).path == path
    with pytest.raises(ToolchainError, match="looked for /nowhere/hivmc"):
        find_hivmc(environment(cann), "/nowhere/hivmc")


def test_a_hivmc_that_cannot_be_run(cann: Path) -> None:
    path = cann / "tools/bishengir/bin/hivmc"
    path.write_text("#!/nowhere/python\n")
    with pytest.raises(ToolchainError, match=r"hivmc: cannot be run: .*; name another with --hivmc"):
        find_hivmc(environment(cann))


def test_nothing_to_finish(unfinished: Path, cann: Path, cpu_bundle: Path, tmp_path: Path) -> None:
    done = tmp_path / "done.kvb"
    finish(unfinished, done, environment(cann))
    with pytest.raises(RequestError, match="ascend:910B2, finished already; load it as it is"):
        finish(done, tmp_path / "again.kvb", environment(cann))
    # A compiler that is not there is no reason to refuse what needs none.
    with pytest.raises(RequestError, match="found cpu:.*, which nobody has to finish"):
        finish(cpu_bundle, tmp_path / "again.kvb", environment(tmp_path))
    assert not (tmp_path / "again.kvb").exists()
