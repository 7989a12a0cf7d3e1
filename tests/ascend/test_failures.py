"""Failures of ACL in a process that uses two devices and two streams, beside those of one call alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from recording import Recording

# The thread's own device is 1; memory grows, and is looked for while another stream is at work.
SCENARIO = """
acl = ctypes.CDLL("libascendcl.so")
acl.aclInit(None)
acl.aclrtSetDevice(1)
opened = [kvb.open(0), kvb.open(1)]
said = [
    kvb.compress(call(outputs, device, dense), stream)
    for dense, outputs, stream, device in (
        (True, 1, 7, 0), (True, 600, 7, 0), (False, 3, 8, 0), (True, 900, 8, 1), (False, 3, 7, 1)
    )
]
acl.aclrtSetDevice(1)
after = [kvb.compress(call(3, device, True), 7) for device in (0, 1)]
closed = [kvb.close(0), kvb.close(1)]
say([opened, said, after, closed])
"""


@pytest.mark.parametrize(
    "function",
    [
        "aclrtSetCurrentContext@1", "aclrtSetCurrentContext@2", "aclrtSetCurrentContext@3",
        "aclrtSetCurrentContext@6", "aclrtQueryEventStatus@1", "aclrtQueryEventStatus@2", "aclrtMalloc@3",
        "aclrtRecordEvent@4",
    ],
)  # fmt: skip
def test_one_failure_is_said_and_over(recording: Recording, tmp_path: Path, function: str) -> None:
    name = function.partition("@")[0]
    (opened, said, after, closed), calls = recording.run(
        SCENARIO, tmp_path, KVB_STANDIN_FAIL=f"{function}=207001"
    )
    failed = [each for each in opened + said if each is not None]
    assert failed[0] == [3, f"DeviceError: {name}: error 207001: EZ9999: the stand-in was told to fail"]
    if opened == [None, None]:
        assert len(failed) == 1 and after == [None, None]
    assert [each is None for each in closed] == [each is None for each in opened]
    memory = [Counter(call["memory"] for call in calls if call["call"] == which and "failed" not in call)
              for which in ("aclrtMalloc", "aclrtFree")]  # fmt: skip
    assert memory[0] == memory[1]
    done = Counter(call["call"] for call in calls if "failed" not in call)
    assert done["aclrtCreateEventExWithFlag"] == done["aclrtDestroyEvent"]
    assert done["aclCreateTensor"] == done["aclDestroyTensor"]
