from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbuild.aot import build as building
from kvbuild.aot import launcher, spec, toolchain
from kvbuild.aot.build import BuildResult, build, prepare
from kvbuild.aot.cache import Cache, Entry
from kvbuild.aot.errors import BuildError, RequestError, ToolchainError
from kvbuild.aot.plan import Unit
from kvbuild.aot.pool import Compiled, Failed, Pool
from kvbuild.aot.progress import Silent

HOSTS = ("aarch64-linux-gnu.2.17", "x86_64-linux-gnu.2.17")


class Launchers:
    """Stands in for the launcher compiler, which has its own tests, and counts."""

    def __init__(self) -> None:
        self.built: list[tuple[str, str]] = []
        self.error: Exception | None = None
        self.only_on = ""

    def build(self, table: Mapping[str, Any], host: str) -> bytes:
        name = f"{table['vendor']}:{table['arch']}"
        assert "launchers" not in table
        self.built.append((name, host))
        if self.error is not None and self.only_on in host:
            raise self.error
        return f"{name} {host} {table['launch_table']}".encode()


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> Launchers:
    fake = Launchers()
    monkeypatch.setattr(launcher, "build_launcher", fake.build)
    monkeypatch.setattr(launcher, "launcher_key", lambda table, host: table["launch_table"] + host)
    return fake


class Recorder(Silent):
    def __init__(self) -> None:
        self.total = 0
        self.steps: list[tuple[str, str]] = []
        self.ended = False

    def begin(self, total: int) -> None:
        self.total = total

    def done(self, name: str, how: str, seconds: float) -> None:
        self.steps.append((name, how))

    def end(self) -> None:
        self.ended = True


def plan_of(tiny: Any, broken: str = "", source: str = "def add(:\n") -> Any:
    """Two targets; broken: the (arch, layout) whose source does not compile, as `arch layout`."""
    bad = tiny.source("bad", source)

    def unit(target: str, layout: str) -> Any:
        block = (("BLOCK", 64 if layout == "aligned" else 128),)
        chosen = {"module": bad} if broken == f"{target} {layout}" else {}
        return tiny.unit(target, constexprs=block, **chosen)

    def target(name: str) -> Any:
        rows = [(128, layout, None, unit(name, layout)) for layout in ("aligned", "general")]
        return tiny.target(name, rows)

    return tiny.plan(target("amd:gfx942"), target("nvidia:sm_80"))


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory, tiny_units: Any) -> Path:
    """A cache that holds the units of `plan_of` and none of its launchers, to be copied."""
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        fake = Launchers()
        patch.setattr(launcher, "build_launcher", fake.build)
        patch.setattr(launcher, "launcher_key", lambda table, host: "none of the tests'")
        assert build(plan_of(tiny_units), cache=Cache(folder), jobs=2).ok
    return folder


@pytest.fixture
def warm(filled: Path, tmp_path: Path) -> Cache:
    """A cache of the test's own with every unit of `plan_of` in it."""
    shutil.copytree(filled, tmp_path / "warm")
    return Cache(tmp_path / "warm")


def counts(result: BuildResult) -> tuple[int, int, int, int]:
    report = result.report
    return (
        report.units_compiled,
        report.units_cached,
        report.launchers_compiled,
        report.launchers_cached,
    )


def test_a_build_makes_everything_once_and_then_takes_it_from_the_cache(
    tiny: Any, tmp_path: Path, launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tiny)
    recorder = Recorder()
    first = build(plan, cache=Cache(tmp_path), jobs=2, reporter=recorder)
    assert first.ok and first.manifest is not None
    assert counts(first) == (4, 0, 4, 0)
    assert recorder.total == len(recorder.steps) == 8
    assert recorder.ended
    assert {how for _, how in recorder.steps} == {"compiled"}
    assert "nvidia:sm_80 add-c128-aligned-None" in {name for name, _ in recorder.steps}

    def no_process(*_: object, **__: object) -> None:
        raise AssertionError("a process was started although everything was cached")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_process)
        again = build(plan, cache=Cache(tmp_path), jobs=2)
    assert counts(again) == (0, 4, 0, 4)
    assert (again.manifest, again.blobs) == (first.manifest, first.blobs)
    assert len(launchers.built) == 4


def test_the_manifest_names_every_blob_by_its_content(tiny: Any, warm: Cache, launchers: Launchers) -> None:
    result = build(plan_of(tiny), cache=warm, jobs=1)
    assert result.manifest is not None
    assert [target.name for target in result.manifest.targets] == ["amd:gfx942", "nvidia:sm_80"]
    assert sorted(result.blobs) == sorted(result.manifest.blobs)
    assert {name: len(data) for name, data in result.blobs.items()} == dict(result.manifest.blobs)
    for target in result.manifest.targets:
        assert tuple(sorted(target.launchers)) == HOSTS
        assert target.blobs <= set(result.blobs)
        assert target.toolchain["triton"]
    assert type(result.manifest).from_json(result.manifest.to_json()) == result.manifest


def test_neither_jobs_nor_order_nor_a_half_filled_cache_changes_a_byte(
    tiny: Any, tmp_path: Path, launchers: Launchers
) -> None:
    plan = plan_of(tiny)
    one = build(plan, cache=Cache(tmp_path / "a"), jobs=1)
    turned = tiny.plan(*reversed(plan.targets))
    build(tiny.plan(plan.targets[1]), cache=Cache(tmp_path / "b"), jobs=1)
    other = build(turned, cache=Cache(tmp_path / "b"), jobs=3)
    assert counts(other)[:2] == (2, 2)
    assert one.manifest is not None and other.manifest is not None
    assert one.manifest.canonical_bytes() == other.manifest.canonical_bytes()
    assert one.blobs == other.blobs


def test_an_edit_to_one_source_compiles_its_units_alone(
    tiny: Any, tmp_path: Path, launchers: Launchers
) -> None:
    same = tiny.unit("nvidia:sm_80")
    module = tiny.source("other", tiny.sources["tiny/add.py"])

    def plan() -> Any:
        return tiny.plan(
            tiny.target(
                "nvidia:sm_80",
                [(128, "general", None, same), (256, "general", None, tiny.unit(module=module))],
            )
        )

    build(plan(), cache=Cache(tmp_path), jobs=1)
    tiny.source("other", tiny.sources["tiny/add.py"].replace("v * scale", "v / scale"))
    assert counts(build(plan(), cache=Cache(tmp_path), jobs=1)) == (1, 1, 2, 0)


def test_a_failing_unit_is_named_with_the_compilers_words_and_nothing_is_to_be_written(
    tiny: Any, tmp_path: Path, launchers: Launchers
) -> None:
    recorder = Recorder()
    plan = plan_of(tiny, "nvidia:sm_80 aligned")
    result = build(plan, cache=Cache(tmp_path), jobs=2, reporter=recorder)
    assert not result.ok
    assert (result.manifest, dict(result.blobs)) == (None, {})
    (failure,) = result.report.failures
    assert failure.name == "nvidia:sm_80 add-c128-aligned-None"
    assert "SyntaxError" in failure.error
    assert counts(result) == (3, 0, 0, 0)
    assert ("nvidia:sm_80 add-c128-aligned-None", "failed") in recorder.steps
    assert launchers.built == []
    assert "SyntaxError" in str(result.report.to_json())
    assert Cache(tmp_path).get(plan.targets[1].kernels[0].unit.key) is None
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3


def test_keep_going_leaves_out_the_variant(tiny: Any, warm: Cache, launchers: Launchers) -> None:
    plan = plan_of(tiny, "nvidia:sm_80 aligned")
    result = build(plan, cache=warm, jobs=2, keep_going=True)
    assert not result.ok
    assert result.manifest is not None
    variants = {t.name: [v.layout for v in t.variants] for t in result.manifest.targets}
    assert variants == {"amd:gfx942": ["aligned", "general"], "nvidia:sm_80": ["general"]}
    assert "aligned variant of ratio 128" in result.report.dropped[0]
    assert type(result.manifest).from_json(result.manifest.to_json()) == result.manifest


def test_keep_going_leaves_out_the_target_and_its_blobs(tiny: Any, warm: Cache, launchers: Launchers) -> None:
    plan = plan_of(tiny, "nvidia:sm_80 general")
    result = build(plan, cache=warm, jobs=2, keep_going=True)
    assert result.manifest is not None
    assert [target.name for target in result.manifest.targets] == ["amd:gfx942"]
    assert "nvidia:sm_80: the whole target" in result.report.dropped[-1]
    assert set(result.blobs) == set(result.manifest.targets[0].blobs)


def test_keep_going_with_nothing_left_gives_no_manifest(
    tiny: Any, tmp_path: Path, launchers: Launchers
) -> None:
    plan = plan_of(tiny, "nvidia:sm_80 general")
    result = build(tiny.plan(plan.targets[1]), cache=Cache(tmp_path), jobs=1, keep_going=True)
    assert (result.ok, result.manifest) == (False, None)


def test_a_binary_that_cannot_be_launched_is_a_failed_unit(
    tiny: Any, tmp_path: Path, launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithScratch(Pool):
        def run(self, units: Sequence[Unit]) -> Generator[Compiled | Failed, None, None]:
            for outcome in super().run(units):
                assert isinstance(outcome, Compiled)
                yield replace(outcome, facts={**outcome.facts, "global_scratch": 64})

    monkeypatch.setattr(building, "Pool", WithScratch)
    plan = tiny.plan(tiny.target("nvidia:sm_80", [(128, "general", None, tiny.unit())]))
    result = build(plan, cache=Cache(tmp_path), jobs=1)
    (failure,) = result.report.failures
    assert failure.error.startswith("the compiler's result cannot be launched: wanted no global scratch")


def test_a_launcher_that_does_not_compile_is_named(
    tiny: Any, tmp_path: Path, warm: Cache, filled: Path, launchers: Launchers
) -> None:
    launchers.error, launchers.only_on = BuildError("zig cc said: no"), "aarch64"
    plan = plan_of(tiny)
    result = build(plan, cache=warm, jobs=2)
    assert result.manifest is None
    assert [failure.name for failure in sorted(result.report.failures, key=lambda f: f.name)] == [
        "amd:gfx942 launcher for aarch64-linux-gnu.2.17",
        "nvidia:sm_80 launcher for aarch64-linux-gnu.2.17",
    ]
    kept = build(plan, cache=warm, jobs=2, keep_going=True)
    assert kept.manifest is not None and not kept.ok
    assert [list(target.launchers) for target in kept.manifest.targets] == [[HOSTS[1]]] * 2
    launchers.only_on = ""
    again = tmp_path / "again"
    shutil.copytree(filled, again)
    nothing = build(plan, cache=Cache(again), jobs=2, keep_going=True)
    assert nothing.manifest is None
    assert len(nothing.report.dropped) == 2


def test_a_missing_launcher_toolchain_ends_the_build(tiny: Any, warm: Cache, launchers: Launchers) -> None:
    launchers.error = ToolchainError("no headers")
    with pytest.raises(ToolchainError, match="no headers"):
        build(plan_of(tiny), cache=warm, jobs=2)


def test_an_interrupt_kills_the_workers_and_leaves_only_whole_entries(
    tiny: Any, tmp_path: Path, launchers: Launchers
) -> None:
    pids = tmp_path / "pids"
    stuck = f"import os, time\nopen({str(pids)!r}, 'a').write(str(os.getpid()))\ntime.sleep(1000)\n"
    plan = plan_of(tiny, "nvidia:sm_80 general", stuck)

    class Interrupts(Recorder):
        def done(self, name: str, how: str, seconds: float) -> None:
            super().done(name, how, seconds)
            if len(self.steps) == 3:
                while not pids.exists() or not pids.read_text():
                    time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGINT)

    reporter = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        build(plan, cache=Cache(tmp_path / "cache"), jobs=2, reporter=reporter)
    assert reporter.ended
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids.read_text()), 0)
    left = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert left <= {unit.key for unit in plan.units}
    cache = Cache(tmp_path / "cache")
    assert all(cache.get(key) for key in left)


# prepare


def test_prepare_reads_sources_tables_and_versions() -> None:
    plan = prepare(spec.load(spec.PACKAGED), ["nvidia:sm_90", "cpu:x86_64"])
    cpu, nvidia = plan.targets
    assert (str(cpu.name), str(nvidia.name)) == ("cpu:x86_64", "nvidia:sm_90")
    assert {variant.ratio for variant in nvidia.variants} == {128, 256, 512}
    assert all(path in plan.sources for unit in plan.units for path, _ in unit.sources)
    assert plan.commands["nvidia"] == (sys.executable,)
    assert plan == prepare(spec.load(spec.PACKAGED), ["cpu:x86_64", "nvidia:sm_90"])


def test_nothing_heavy_is_imported_where_everything_is_cached() -> None:
    code = (
        "import sys\n"
        "from kvbuild.aot import build, spec, cache, bundle, progress\n"
        "build.prepare(spec.load(spec.PACKAGED), ['nvidia:sm_90', 'cpu'])\n"
        "print(sorted({'triton', 'torch', 'tvm_ffi', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_wrong_request_comes_before_a_missing_toolchain() -> None:
    environ = {"KVBUILD_TOOLCHAIN_NVIDIA": "/no/such/python"}
    with pytest.raises(RequestError):
        prepare(spec.load(spec.PACKAGED), ["nvidia:sm_1"], environ)
    with pytest.raises(ToolchainError, match="/no/such/python"):
        prepare(spec.load(spec.PACKAGED), ["nvidia:sm_90"], environ)


def test_every_missing_toolchain_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_zig() -> str:
        raise ToolchainError("zig is not there")

    monkeypatch.setattr(toolchain, "zig_version", no_zig)
    environ = {"KVBUILD_TOOLCHAIN_NVIDIA": "/no/a", "KVBUILD_TOOLCHAIN_AMD": "/no/b"}
    with pytest.raises(ToolchainError) as caught:
        prepare(spec.load(spec.PACKAGED), ["nvidia:sm_90", "amd:gfx942", "cpu"], environ)
    assert [text in str(caught.value) for text in ("/no/a", "/no/b", "zig is not there")] == [True] * 3
    assert str(caught.value).count("zig is not there") == 1
    with pytest.raises(ToolchainError) as caught:
        prepare(spec.load(spec.PACKAGED), ["nvidia:sm_90"], {})
    assert str(caught.value) == "zig is not there", "nothing is built alone without it"


def test_a_missing_toolchain_does_not_hide_what_needs_none() -> None:
    packaged = spec.load(spec.PACKAGED)

    def said(*names: str, **environ: str) -> list[str]:
        with pytest.raises(ToolchainError) as caught:
            prepare(packaged, names, environ)
        return str(caught.value).splitlines()

    (_, last) = said("hygon")
    assert last == "hygon:gfx906 needs none of this: compile it alone"
    assert said("metax", "cpu")[-1] == "cpu:aarch64, cpu:x86_64 need none of this: compile them alone"
    assert len(said("metax")) == 1
    lines = said("metax", KVBUILD_TOOLCHAIN_MACA="/x", KVBUILD_TOOLCHAIN_AMD="/y")
    assert len(lines) == 2 and lines[1].startswith("KVBUILD_TOOLCHAIN_MACA is set, ")
    assert lines[1].endswith("; did you mean metax?")


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "KERNELS", tmp_path)
    with pytest.raises(
        RequestError, match=r"gpgpu/compress.py: a kernel's source cannot be read: No such file"
    ):
        building.read_source("gpgpu/compress.py")


@pytest.mark.parametrize("target", ["nvidia:sm_90", "amd:gfx942"])
def test_a_real_kernel_of_the_route_compiles_and_can_be_launched(
    target: str, tmp_path: Path, launchers: Launchers, write: Callable[[str], Path]
) -> None:
    text = spec.PACKAGED.read_text().replace("[128, 256, 512]", "[128]").replace("[8, any]", "[any]")
    plan = prepare(spec.load(write(text)), [target])
    result = build(plan, cache=Cache(tmp_path), jobs=2)
    assert result.ok, result.report.failures
    assert result.manifest is not None
    for kernel in result.manifest.targets[0].kernels:
        assert kernel.hidden == 2
        assert kernel.args[-1].offset + kernel.args[-1].size == 192


def test_a_cached_unit_that_cannot_be_used_is_made_anew(tiny: Any, warm: Cache, launchers: Launchers) -> None:
    """A right digest says that an entry is whole, not that it is right."""
    plan = plan_of(tiny)
    notes: list[str] = []
    for unit, change in zip(
        plan.units, ({"entry": "other"}, {"shared": "x"}, {"num_ctas": None}, None), strict=True
    ):
        entry = warm.get(unit.key)
        assert entry is not None
        warm.put(unit.key, Entry(entry.data, {**entry.facts, **change}) if change else Entry(b"", {}))
    recorder = Recorder()
    recorder.note = notes.append  # type: ignore[method-assign]
    result = build(plan, cache=warm, jobs=2, reporter=recorder)
    assert result.ok
    assert (result.report.units_compiled, result.report.units_cached) == (4, 0)
    assert len(notes) == 4 and all("made anew" in note for note in notes)
    assert build(plan, cache=warm, jobs=2).report.units_cached == 4
