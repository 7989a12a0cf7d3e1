"""Selection as a table: facts and targets in, a verdict with its words out. No hardware."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbuild.runtime.errors import NoMatchingArtifact
from kvbuild.runtime.facts import Facts
from kvbuild.runtime.manifest import Manifest
from kvbuild.runtime.select import Accepted, Rejected, evaluate, select

X86, ARM = "x86_64-linux-gnu.2.17", "aarch64-linux-gnu.2.17"
H200 = Facts("nvidia", "sm_90", "NVIDIA H200", 0, 12080, "libcuda.so.1", "x86_64", "2.36")
MI300 = Facts("amd", "gfx942:sramecc+:xnack-", "AMD Instinct MI300X", 1, 0, "", "x86_64", "2.36")
CPU = Facts("cpu", "x86_64", "a cpu", 0, 0, "", "x86_64", "2.36")


def manifest(samples: Any, *names: str, hosts: tuple[str, ...] = (X86,), min_driver: int = 0) -> Manifest:
    blobs = samples.blobs(b"launcher", b"binary")
    launcher, binary = blobs
    targets = []
    for name in names:
        vendor, arch = name.split(":")
        launchers = dict.fromkeys(hosts, launcher)
        driver = min_driver if vendor == "nvidia" else 0
        targets.append(samples.target(vendor, arch, launcher, binary, launchers=launchers, min_driver=driver))
    used = blobs if any(target["kernels"] for target in targets) else {launcher: blobs[launcher]}
    return Manifest.from_json(samples.manifest(targets, used))


def nvidia(arch: str, **changes: Any) -> Facts:
    return replace(H200, arch=arch, **changes)


ARCHS = [
    # target, device, runs, runs under strict, words of the refusal
    ("nvidia:sm_90", nvidia("sm_90"), True, True, ""),
    ("nvidia:sm_80", nvidia("sm_80"), True, True, ""),
    ("nvidia:sm_80", nvidia("sm_86"), True, False, "strict selection wants the device's own arch sm_86"),
    ("nvidia:sm_80", nvidia("sm_89"), True, False, "it is for sm_80"),
    ("nvidia:sm_86", nvidia("sm_89"), True, False, "sm_86"),
    ("nvidia:sm_86", nvidia("sm_80"), False, False, "capability 8.6 to 8.9, this device has 8.0"),
    ("nvidia:sm_89", nvidia("sm_90"), False, False, "capability 8.9 to 8.9, this device has 9.0"),
    ("nvidia:sm_75", nvidia("sm_80"), False, False, "capability 7.5 to 7.9, this device has 8.0"),
    ("nvidia:sm_90", nvidia("sm_89"), False, False, "runs on sm_90 alone, this device is sm_89"),
    ("nvidia:sm_90", nvidia("sm_100"), False, False, "runs on sm_90 alone, this device is sm_100"),
    ("nvidia:sm_100", nvidia("sm_103"), False, False, "runs on sm_100 alone, this device is sm_103"),
    ("nvidia:sm_103", nvidia("sm_103"), True, True, ""),
    ("nvidia:sm_120", nvidia("sm_121"), False, False, "runs on sm_120 alone, this device is sm_121"),
    ("nvidia:sm_80", nvidia("sm_100"), False, False, "this device has 10.0"),
    ("nvidia:sm_80", nvidia("sm_" + "9" * 5000), False, False, "it is for sm_80 and no other arch"),
    ("nvidia:sm_90a", nvidia("sm_90"), False, False, "it is for sm_90a and no other arch"),
    ("amd:gfx942", MI300, True, True, ""),
    ("amd:gfx942", replace(MI300, arch="gfx942"), True, True, ""),
    ("amd:gfx90a", MI300, False, False, "it is for gfx90a and no other arch, this device is gfx942"),
    ("amd:gfx942", replace(MI300, arch="gfx9421"), False, False, "this device is gfx9421"),
    ("cpu:x86_64", CPU, True, True, ""),
    ("cpu:aarch64", CPU, False, False, "it is for aarch64 and no other arch, this device is x86_64"),
    ("metax:c500", replace(CPU, vendor="metax", arch="c500"), True, True, ""),
    ("metax:c500", replace(CPU, vendor="metax", arch="c600"), False, False, "this device is c600"),
    ("nvidia:sm_90", MI300, False, False, "its vendor is nvidia, this device's is amd"),
    ("nvidia:sm_90", replace(CPU, vendor="tianshu", arch="sm_90"), False, False, "this device's is tianshu"),
    ("cpu:x86_64", H200, False, False, "its vendor is cpu, this device's is nvidia"),
    ("amd:gfx942", CPU, False, False, "its vendor is amd, this device's is cpu"),
]


@pytest.mark.parametrize(("target", "facts", "runs", "runs_strictly", "words"), ARCHS)
def test_archs(samples: Any, target: str, facts: Facts, runs: bool, runs_strictly: bool, words: str) -> None:
    for strict, wanted in ((False, runs), (True, runs_strictly)):
        (verdict,) = evaluate(manifest(samples, target), facts, strict)
        assert isinstance(verdict, Accepted) is wanted
        if not wanted:
            assert words in verdict.reason


HOSTS = [
    ((X86,), "x86_64", "2.17", ""),
    ((X86,), "x86_64", "2.40", ""),
    ((X86,), "x86_64", "3.0", ""),
    ((X86,), "x86_64", "2.9", "needs glibc 2.17, this host has glibc 2.9"),
    ((X86,), "x86_64", "", "needs glibc 2.17, this host has no glibc"),
    ((X86,), "aarch64", "2.36", "does not run on this host's machine aarch64"),
    ((X86, ARM), "aarch64", "2.36", ""),
    ((ARM,), "x86_64", "2.36", "its launcher for aarch64-linux-gnu.2.17 does not run"),
    ((X86, "x86_64-linux-gnu.2.34"), "x86_64", "2.36", ""),
]


@pytest.mark.parametrize(("hosts", "machine", "libc", "words"), HOSTS)
def test_hosts(samples: Any, hosts: tuple[str, ...], machine: str, libc: str, words: str) -> None:
    facts = replace(H200, host=machine, libc=libc)
    (verdict,) = evaluate(manifest(samples, "nvidia:sm_90", hosts=hosts), facts)
    if words:
        assert isinstance(verdict, Rejected) and words in verdict.reason
    else:
        assert isinstance(verdict, Accepted) and verdict.host.startswith(machine)


def test_the_newest_glibc_that_will_do_is_taken(samples: Any) -> None:
    hosts = (X86, "x86_64-linux-gnu.2.34", "x86_64-linux-gnu.2.39")
    assert select(manifest(samples, "nvidia:sm_90", hosts=hosts), H200).host == "x86_64-linux-gnu.2.34"


@pytest.mark.parametrize(
    ("needed", "present", "words"),
    [
        (12080, 12080, ""),
        (12080, 13000, ""),
        (0, 0, ""),
        (12000, 11040, "it needs driver API 12.0 or newer, this host has API 11.4"),
        (13000, 12090, "it needs driver API 13.0 or newer, this host has API 12.9"),
        (12080, 0, "it needs driver API 12.8 or newer, this host has none"),
    ],
)
def test_drivers(samples: Any, needed: int, present: int, words: str) -> None:
    facts = replace(H200, driver=present)
    (verdict,) = evaluate(manifest(samples, "nvidia:sm_90", min_driver=needed), facts)
    assert isinstance(verdict, Rejected if words else Accepted)
    assert not words or verdict.reason == words


@pytest.mark.parametrize(
    ("device", "chosen"), [("sm_80", "sm_80"), ("sm_86", "sm_86"), ("sm_87", "sm_86"), ("sm_89", "sm_86")]
)
def test_the_closest_arch_wins(samples: Any, device: str, chosen: str) -> None:
    bundle = manifest(samples, "nvidia:sm_80", "nvidia:sm_86", "nvidia:sm_90", "cpu:x86_64")
    choice = select(bundle, nvidia(device))
    assert choice.target.arch == chosen
    assert choice.launcher == choice.target.launchers[X86]
    assert [verdict.target for verdict in choice.trace] == list(bundle.targets)


def test_a_gpu_never_falls_back_to_the_cpu(samples: Any) -> None:
    with pytest.raises(NoMatchingArtifact, match="its vendor is cpu, this device's is nvidia"):
        select(manifest(samples, "cpu:x86_64"), H200)


def test_the_refusal_lists_every_target_and_what_to_do(samples: Any) -> None:
    bundle = manifest(samples, "cpu:x86_64", "amd:gfx942", "nvidia:sm_90", min_driver=13000, hosts=(ARM,))
    with pytest.raises(NoMatchingArtifact) as error:
        select(bundle, H200)
    lines = str(error.value).splitlines()
    assert "nvidia:sm_90 (NVIDIA H200, driver API 12.8, host x86_64 with glibc 2.36)" in lines[0]
    assert [line.split(": ")[0].strip() for line in lines[1:4]] == [t.name for t in bundle.targets]
    assert "needs driver API 13.0" in lines[3] and "does not run on this host" in lines[3]
    assert lines[4].startswith("nvidia:sm_90 has code for this device: mend what its reason names")
    with pytest.raises(NoMatchingArtifact, match=r"--target amd:gfx942$"):
        select(manifest(samples, "cpu:x86_64"), MI300)


def test_the_same_facts_always_get_the_same_choice(samples: Any) -> None:
    bundle = manifest(samples, "nvidia:sm_80", "nvidia:sm_86")
    assert select(bundle, nvidia("sm_89")) == select(bundle, nvidia("sm_89"))


@pytest.mark.parametrize(
    ("facts", "strict", "words"),
    [
        (nvidia("sm_90", driver=11080), False, "nvidia:sm_90 has code for this device: mend what"),
        (nvidia("sm_90", host="aarch64"), False, "nvidia:sm_90 has code for this device"),
        (nvidia("sm_100"), False, "build one that does: kvbuild compile --target nvidia:sm_100"),
        (MI300, False, "build one that does: kvbuild compile --target amd:gfx942"),
    ],
)
def test_the_advice_fits_the_reason(samples: Any, facts: Facts, strict: bool, words: str) -> None:
    made = manifest(samples, "nvidia:sm_90", min_driver=12000)
    with pytest.raises(NoMatchingArtifact) as caught:
        select(made, facts, strict)
    assert words in str(caught.value).splitlines()[-1]


ASCEND = replace(nvidia("x"), vendor="ascend", name="an NPU")


@pytest.mark.parametrize("arch", ["910B2C", "910B4-1", "910_9392", "910B", "310P3"])
def test_no_target_is_advised_that_nobody_can_build(samples: Any, arch: str) -> None:
    with pytest.raises(NoMatchingArtifact) as caught:
        select(manifest(samples, "nvidia:sm_90"), replace(ASCEND, arch=arch))
    last = str(caught.value).splitlines()[-1]
    assert last == (
        f"kvbuild has no target for ascend:{arch}; it has ascend:910B1, ascend:910B2, ascend:910B3, "
        "ascend:910B4"
    )
    assert "--target" not in str(caught.value)


def test_advice_is_the_nearest_arch_whose_code_the_device_runs(samples: Any) -> None:
    for facts, strict, words in (
        (replace(ASCEND, arch="910B2"), True, "build one that does: kvbuild compile --target ascend:910B2"),
        (nvidia("sm_87"), False, "build one that does: kvbuild compile --target nvidia:sm_86"),
        (nvidia("sm_87"), True, "kvbuild has no target for nvidia:sm_87; it has nvidia:sm_80, "),
        (nvidia("sm_75"), False, "kvbuild has no target for nvidia:sm_75; it has nvidia:sm_80, "),
    ):
        with pytest.raises(NoMatchingArtifact) as caught:
            select(manifest(samples, "cpu:x86_64"), facts, strict)
        assert str(caught.value).splitlines()[-1].startswith(words)


def test_strict_advises_to_build_for_the_devices_own_arch(samples: Any) -> None:
    with pytest.raises(NoMatchingArtifact, match="compile --target nvidia:sm_86"):
        select(manifest(samples, "nvidia:sm_80"), nvidia("sm_86"), strict=True)
