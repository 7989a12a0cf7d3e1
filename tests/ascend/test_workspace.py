"""The memory between stages: whose it is, for how long, and what it costs; against the recording ACL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
from recording import Recording, launches, names, unpacked

from kvbuild.kernels.ascend import pipeline


def test_memory_is_a_streams_and_stays(acl: Any) -> None:
    said, calls = acl(
        """
        kvb.open()
        said = [kvb.compress(call(outputs), 7) for outputs in (3, 3, 1, 200, 201, 3)]
        say(said + [kvb.close()])
        """
    )
    assert said == [None] * 7
    # 1 MiB serves up to some 250 outputs, so that calls of changing size make no memory of their own.
    assert [call["bytes"] for call in calls if call["call"] == "aclrtMalloc"] == [1 << 20]
    assert names(calls, "aclrtFree", "aclrtDestroyEvent", "aclrtCreateEventExWithFlag") == [
        "aclrtCreateEventExWithFlag", "aclrtFree", "aclrtDestroyEvent"
    ]  # fmt: skip


def test_memory_of_a_stream_at_work_is_left_alone(acl: Any) -> None:
    said, calls = acl(
        """
        kvb.open()
        acl = ctypes.CDLL("libascendcl.so")
        said = [kvb.compress(call(), 1), kvb.compress(call(), 2), kvb.compress(call(), 1)]
        acl.aclrtSynchronizeStream(1)
        said += [kvb.compress(call(), 3), kvb.compress(call(3000), 3)]
        for stream in (1, 2, 3): acl.aclrtSynchronizeStream(stream)
        said += [kvb.compress(call(), 4)]
        acl.aclrtSynchronizeStream(4)
        say(said + [kvb.close()])
        """,
        KVB_STANDIN_DEFER="1",
    )
    assert said == [None] * 7
    made = [call["bytes"] for call in calls if call["call"] == "aclrtMalloc"]
    # Streams 1 and 2; then 3 takes what 1 is done with, and needs more while it is still at work on that.
    assert made == [1 << 20, 1 << 20, 16 << 20]
    assert [call["uses"] for call in calls if call["call"] == "aclrtFree"] == [0] * 3


def test_memory_that_has_become_too_small_goes(acl: Any) -> None:
    said, calls = acl("kvb.open(); say([kvb.compress(call(3), 7), kvb.compress(call(3000), 7)])")
    assert said == [None, None]
    assert names(calls, "aclrtMalloc", "aclrtFree") == ["aclrtMalloc", "aclrtFree", "aclrtMalloc"]


def test_a_captured_graph_keeps_its_memory(acl: Any) -> None:
    said, calls = acl(
        """
        import os
        kvb.open()
        said = [kvb.compress(call(), 7)]
        os.environ["KVB_STANDIN_CAPTURE"] = "7"
        said += [kvb.compress(call(), 7), kvb.compress(call(), 7)]
        os.environ["KVB_STANDIN_GRAPH"] = "99"
        said += [kvb.compress(call(), 7)]
        os.environ["KVB_STANDIN_CAPTURE"] = "0"
        said += [kvb.compress(call(), 7), kvb.compress(call(), 8)]
        say(said + [kvb.close()])
        """
    )
    assert said == [None] * 7
    made = [call["memory"] for call in calls if call["call"] == "aclrtMalloc"]
    assert len(made) == 3  # for calls, for one graph, for the other
    place, *_ = pipeline.stages("block", 128, "aligned", 512)
    used = [
        unpacked(place, bytes.fromhex(launch["arguments"]))[1]["place"] for launch in launches(calls)[::4]
    ]
    assert used == [made[0], made[1], made[1], made[2], made[0], made[0]]
    # A capturing thread allocates in the relaxed mode, and then has its own mode back.
    assert [call["mode"] for call in calls if call["call"] == "aclmdlRICaptureThreadExchangeMode"] == [
        2,
        0,
    ] * 3
    assert len(names(calls, "aclrtFree")) == 3
    # An event recorded in a graph says nothing about its runs.
    assert len(names(calls, "aclrtRecordEvent")) == 3


def test_threads_at_once_share_no_memory(acl: Any) -> None:
    said, calls = acl(
        """
        import threading
        kvb.open()
        said, gate = [], threading.Barrier(8)

        def work(stream):
            gate.wait()
            for outputs in (1, 40, 300, 2, 700, 5, 300, 40): said.append(kvb.compress(call(outputs), stream))

        threads = [threading.Thread(target=work, args=(stream,)) for stream in range(1, 9)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        say(said + [kvb.counters()[0]])
        """,
        KVB_STANDIN_DEFER="1",
    )
    assert said == [None] * 64 + [64]
    place, *_ = pipeline.stages("block", 128, "aligned", 512)
    owners: dict[int, set[int]] = {}
    for launch in launches(calls):
        if launch["name"] == "entry_blocks_c128_aligned_d512":
            _, values, _ = unpacked(place, bytes.fromhex(launch["arguments"]))
            owners.setdefault(values["place"], set()).add(launch["stream"])
    # No stream's work is done before the end, so none may have what another had.
    assert all(len(streams) == 1 for streams in owners.values())
    assert len({next(iter(streams)) for streams in owners.values()}) == 8
    # A stream makes memory for the size that it has none for, not for each call.
    assert len(owners) == 8 * 3


def test_a_cann_that_captures_nothing(recording: Recording, tmp_path: Path, session_folder: Path) -> None:
    renamed = [
        f"-D{name}=no_{name}" for name in ("aclmdlRICaptureGetInfo", "aclmdlRICaptureThreadExchangeMode")
    ]
    harness.build_shared(
        "acl.c", tmp_path, "libascendcl.so", session_folder, "-Wno-unused-function", *renamed
    )
    (tmp_path / "libopapi.so").symlink_to("libascendcl.so")
    said, _ = recording.run("say([kvb.open(), kvb.compress(call())])", tmp_path, tmp_path)
    assert said == [None, None]


def test_index_select_without_a_workspace(acl: Any) -> None:
    said, calls = acl("kvb.open(); say(kvb.compress(call(dense=True)))", KVB_STANDIN_SPACE="0")
    assert said is None
    assert len(names(calls, "aclrtMalloc")) == 1
