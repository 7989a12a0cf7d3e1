"""The host kernel's threads: how many, who may call, what is left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvbuild.kernels.contract import COMPRESS_RATIOS
from kvbuild.kernels.workloads import Workload, make


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("ratio", COMPRESS_RATIOS)
def test_every_thread_count_gives_the_same_bytes(
    new_copy: Callable[[], Any], ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, one = make(Workload(1, 11 * ratio, ratio), seed=8), make(Workload(1, ratio, ratio), seed=9)
    kernel, found, before = new_copy(), set(), _num_threads()
    for threads in (1, 2, 3, 8):
        monkeypatch.setenv("KVBUILD_NUM_THREADS", str(threads))
        found.add((kernel.fresh(many), kernel.fresh(one)))
        assert _num_threads() == before + threads - 1
    assert len(found) == 1


def test_a_divided_output_without_a_live_row_is_skipped(new_copy: Callable[[], Any]) -> None:
    kernel = new_copy()
    for outputs in (1, 2, 3):
        x = make(Workload(1, outputs * 512, 512), seed=outputs)
        x.block_table[:, -64:] = -1  # the last window
        kernel.check(x)


def test_many_callers_at_once(new_copy: Callable[[], Any]) -> None:
    kernel = new_copy()
    launches = [make(Workload(1, windows * 128, 128), seed=windows) for windows in (1, 2, 3, 5, 8, 20, 1, 2)]
    wanted = [kernel.fresh(x) for x in launches]
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(20):
            if kernel.fresh(launches[i]) != wanted[i]:
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(launches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_has_its_own_threads(new_copy: Callable[[], Any]) -> None:
    x = make(Workload(1, 1024, 128), seed=13)
    kernel = new_copy()
    wanted, in_child = kernel.fresh(x), x.fresh()
    for _ in range(2):
        child = os.fork()
        if child == 0:
            right = _num_threads() == 1 and kernel(in_child) == wanted and _num_threads() == 8
            os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert kernel.fresh(x) == wanted


def test_unloading_leaves_no_thread(new_copy: Callable[[], Any]) -> None:
    import _ctypes

    x, before = make(Workload(1, 1024, 128), seed=14), _num_threads()
    kernel = new_copy()
    kernel.fresh(x)
    assert _num_threads() == before + 7
    _ctypes.dlclose(kernel.library._handle)
    assert _num_threads() == before


def test_a_process_may_end_during_calls(
    kernel: Any, host_arch: str, run_program: Callable[..., bytes]
) -> None:
    x = make(Workload(1, 2048, 128), seed=15)
    for _ in range(3):
        assert run_program(host_arch, x, "end during calls") == kernel.fresh(x)
