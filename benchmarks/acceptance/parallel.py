"""Several streams, threads, devices and processes at once."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvbuild import runtime
from kvbuild.aot.measure.place import Place
from kvbuild.kernels.contract import COMPRESS_RATIOS
from kvbuild.kernels.workloads import Inputs, Workload, make

from . import launches
from .record import NotRun, Record, Refused

THREADS = 8
CHILD_SECONDS = 60


def run(record: Record, operator: Any, place: Place, bundle: Path, quick: bool) -> None:
    times = (20 if quick else 400) if place.is_gpu else (4 if quick else 20)
    with record.check("parallel", f"two streams at once, {times} calls on each") as check:
        if not place.is_gpu:
            raise NotRun("the cpu has no streams")
        check.detail = _streams(operator, place, times)
    with record.check("parallel", f"{THREADS} threads, a stream each, {times} calls each") as check:
        check.detail = _threads(operator, place, times)
    with record.check("parallel", "a thread that never touched CUDA, default stream"):
        if not place.is_gpu:
            raise NotRun("needs a GPU")
        _fresh_thread(operator, place, operator)
    _second_device(record, operator, place, bundle, times)
    with record.check("parallel", "a forked child") as check:
        check.detail = fork(operator, place)


def _mixture(operator: Any, place: Place, seed: int) -> list[launches.Launch]:
    """Three launches of different ratios, sizes and layouts, each with bytes that the oracle accepted."""
    ratio = COMPRESS_RATIOS[seed % len(COMPRESS_RATIOS)]
    few = make(Workload.decode(3 if place.is_gpu else 1, ratio), device=place.device, seed=seed)
    many = launches.windows(24 if place.is_gpu else 1, COMPRESS_RATIOS[0], place.device, seed)
    return [launches.judged(operator, inputs) for inputs in (few, many, launches.padded_pages(many))]


def _streams(operator: Any, place: Place, times: int) -> str:
    streams = [place.stream() for _ in range(2)]
    mixtures = [_mixture(operator, place, seed) for seed in (10, 11)]
    place.synchronize()
    wrong = [torch.zeros((), dtype=torch.int64, device=place.device) for _ in streams]
    place.synchronize()
    for _ in range(times // 4):
        # A few calls of each in turn, so that both streams always hold work.
        for at, stream in enumerate(streams):
            with place.on(stream):
                wrong[at] += launches.repeat(operator, mixtures[at], 4)
    place.synchronize()
    if any(int(count) for count in wrong):
        raise Refused(f"wrong bytes by stream: {[int(count) for count in wrong]}")
    return "every byte right"


def _threads(operator: Any, place: Place, times: int) -> str:
    mixtures = [_mixture(operator, place, 20 + number) for number in range(THREADS)]
    place.synchronize()
    barrier = threading.Barrier(THREADS)
    wrong = [-1] * THREADS

    def work(number: int) -> None:
        stream = place.stream()
        barrier.wait()
        with place.on(stream):
            count = launches.repeat(operator, mixtures[number], times)
            wrong[number] = int(count)

    before = operator.counters()["calls"]
    _join([threading.Thread(target=work, args=(number,)) for number in range(THREADS)])
    calls = operator.counters()["calls"] - before
    if any(wrong) or calls != THREADS * times:
        raise Refused(f"wrong bytes by thread (-1: it did not end): {wrong}; {calls} calls counted")
    return f"{calls:,} calls, every byte right"


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _in_thread(action: Callable[[], Any]) -> Any:
    """What the action returns on a thread of its own; what it raises is raised here."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append((action(), None))
        except Exception as error:
            outcome.append((None, error))

    _join([threading.Thread(target=work)])
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def _fresh_thread(judge: Any, place: Place, operator: Any) -> None:
    """The first thing that the thread does with CUDA is the call itself."""
    for inputs in (make(Workload.decode(8, 128), device=place.device, seed=30),
                   launches.padded_pages(launches.windows(8, 128, place.device, 31))):
        launch = launches.judged(judge, inputs)
        own = inputs.fresh()
        place.synchronize()
        _in_thread(lambda own=own: operator.compress(*own.call_args()))
        place.synchronize()
        if not torch.equal(own.kv_storage, launch.wanted):
            raise Refused("the thread's call gave other bytes than the main thread's")


def _second_device(record: Record, operator: Any, place: Place, bundle: Path, times: int) -> None:
    names = ("loaded and used from a thread that never touched CUDA", "both devices at once",
             "operands on the wrong device")
    count = torch.cuda.device_count() if place.is_gpu else 0
    if count < 2:
        for name in names:
            with record.check("second GPU", name):
                raise NotRun(f"wanted 2 GPUs, found {count}")
        return
    index = (place.device.index or 0) ^ 1
    other_place = Place(torch.device("cuda", index))
    other: Any = None
    with record.check("second GPU", names[0]):
        inputs = make(Workload.decode(8, 128), device=other_place.device, seed=40)
        scratch = launches.padded_pages(launches.windows(8, 128, other_place.device, 41))
        owns = [inputs.fresh(), scratch.fresh()]
        other_place.synchronize()
        other = _in_thread(lambda: _load_and_call(bundle, index, owns))
        other_place.synchronize()
        for own, before in zip(owns, (inputs, scratch), strict=True):
            launches.refuse_wrong(own, before)
        _fresh_thread(other, other_place, other)
    with record.check("second GPU", names[1]) as check:
        check.expect(other is not None, "the second device was not loaded")
        check.detail = _both_devices(operator, place, other, other_place, times)
    with record.check("second GPU", names[2]) as check:
        check.expect(other is not None, "the second device was not loaded")
        here = make(Workload.decode(1, 128), device=place.device)
        there = make(Workload.decode(1, 128), device=other_place.device)
        mixed = here.with_(positions=there.positions)
        for which, wrong in ((operator, there), (other, here), (operator, mixed)):
            try:
                which.compress(*wrong.call_args())
            except ValueError:
                continue
            raise Refused(f"an operator of {which.device} took operands on another device")


def _load_and_call(bundle: Path, index: int, owns: Sequence[Inputs]) -> Any:
    operator = runtime.load(bundle, device=f"cuda:{index}")
    for own in owns:
        operator.compress(*own.call_args())
    return operator


def _both_devices(operator: Any, place: Place, other: Any, other_place: Place, times: int) -> str:
    """One thread a device, then one thread for both in turn; the same inputs give the same bytes on both."""
    pairs = ((operator, place), (other, other_place))
    mixtures = [_mixture(which, where, 50) for which, where in pairs]
    for one, two in zip(*mixtures, strict=True):
        same = torch.equal(*(each.inputs.state_cache.nan_to_num().cpu() for each in (one, two)))
        if same and not torch.equal(one.wanted.cpu(), two.wanted.cpu()):
            raise Refused("the two devices gave different bytes for the same inputs")
    wrong = [-1, -1]

    def work(at: int) -> None:
        which, where = pairs[at]
        with torch.cuda.device(where.device), where.on(where.stream()):
            wrong[at] = int(launches.repeat(which, mixtures[at], times))

    _join([threading.Thread(target=work, args=(at,)) for at in range(2)])
    for _ in range(times // 4):
        for at, (which, _) in enumerate(pairs):
            # The current device stays the first one: the call must go to its operands' device.
            wrong[at] += int(launches.repeat(which, mixtures[at], 4))
    if any(wrong):
        raise Refused(f"wrong bytes by device (-1: it did not end): {wrong}")
    return f"{2 * times + 8 * (times // 4):,} calls, every byte right"


def fork(operator: Any, place: Place) -> str:
    """An operator of a device refuses in a forked child; one of the cpu works there."""
    inputs = launches.windows(2, 128, place.device, 60)
    launch = launches.judged(operator, inputs)
    own = inputs.fresh()
    wanted = b"" if place.is_gpu else _content(launch.wanted)
    place.synchronize()

    def call() -> str:
        operator.compress(*own.call_args())
        if place.is_gpu:
            return "the call returned"
        return "right" if _content(own.kv_storage) == wanted else "other bytes than the parent's"

    found = in_child(call)
    right = found.startswith("DeviceError: ") if place.is_gpu else found == "right"
    if not right:
        raise Refused(f"wanted {'DeviceError' if place.is_gpu else 'the right bytes'}, found {found}")
    operator.compress(*own.call_args())
    place.synchronize()
    if not torch.equal(own.kv_storage, launch.wanted):
        raise Refused("after the fork, the parent's own call gave other bytes")
    return found


def _content(storage: torch.Tensor) -> bytes:
    """Without torch's threads, which a forked child does not have."""
    return ctypes.string_at(storage.data_ptr(), storage.numel())


def in_child(action: Callable[[], str]) -> str:
    """What the action returns, or raises, in a forked child of this process; the child then ends at once."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = action()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode()[:4000])
        os._exit(0)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], CHILD_SECONDS)
        if not ready:
            os.kill(child, signal.SIGKILL)
        text = os.read(read, 4096).decode() if ready else f"nothing within {CHILD_SECONDS} s"
    finally:
        os.close(read)
    _reap(child)
    return text or "the child ended without a word"


def _reap(child: int) -> None:
    end = time.monotonic() + CHILD_SECONDS
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            end += CHILD_SECONDS
        time.sleep(0.01)
