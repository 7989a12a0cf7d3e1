"""The built-in functions that a launcher makes for an interpreter, with tensors and a framework made by hand.

Without torch, so that any Python can run the scenarios.
"""

from __future__ import annotations

from typing import Any

import harness
import pytest

BEGIN = """
import gc, sys

class Tensor:
    def __init__(self, described):
        self.described = described

class Other(Tensor):
    pass

DESCRIBE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
POINTER = ctypes.POINTER(ctypes.c_void_p)
STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, POINTER)

class API(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("unused", ctypes.c_void_p * 4),
                ("describe", DESCRIBE), ("stream", STREAM))

class Given(ctypes.Structure):
    _fields_ = (("exchange", ctypes.POINTER(API)), ("types", ctypes.c_void_p * 2),
                ("plain", ctypes.py_object), ("refuse", ctypes.py_object),
                ("keep", ctypes.py_object), ("closed", ctypes.c_void_p),
                ("device_id", ctypes.c_int64), ("torch", ctypes.c_char * 120), ("usual", ctypes.py_object))

seen = []
def describe(tensor, out):
    if tensor.described is None:
        return -1
    out[0] = tensor.described
    return 0
def stream(kind, index, out):
    seen.append(["stream", kind, index])
    out[0] = 99
    return STREAM_CODE[0]
def plain(*arguments, **named):
    seen.append(["plain", len(arguments), sorted(named)])
    return "plainly"
def usual(tensor):
    if tensor in odd:
        raise ValueError
odd = []
class Refused(Exception):
    pass
def refuse(code, words, arguments):
    raise Refused(code, words, len(arguments))
STREAM_CODE = [0]
def api(major=1):
    return API(major, 0, (ctypes.c_void_p * 4)(), DESCRIBE(describe), STREAM(stream))
apis = [api()]
closed = ctypes.c_int32(0)
def given(exchange=apis[0], device_id=0):
    return Given(ctypes.pointer(exchange), (ctypes.c_void_p * 2)(id(Tensor), id(Tensor)), plain, refuse,
                 ctypes.py_object(closed), ctypes.addressof(closed), device_id, b"", usual)
def function(name, *types):
    address = ctypes.cast(getattr(kvb.library, name), ctypes.c_void_p).value
    return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.POINTER(Given), *types)(address)
make = function("kvb_python_compress")
make_step = function("kvb_python_step", ctypes.py_object * 5, ctypes.c_int64, ctypes.c_int64, ctypes.c_double)
def arguments(**changes):
    call = operands(**changes)
    return [Tensor(call[name]) for name in NAMES] + [call["block_size"], call["compress_ratio"], 1e-6]
def outcome(call, *given, **named):
    try:
        result = call(*given, **named)
    except Refused as refused:
        return list(refused.args)
    return "kv_cache" if given and result is given[-4 if len(given) == 12 else -3] else result
kvb.open()
compress = make(given())
"""


def test_a_call(run: Any) -> None:
    said, calls = run(
        BEGIN
        + """
args = arguments()
by_name = dict(zip([*NAMES, "block_size", "compress_ratio", "rms_norm_eps"], args))
said = [outcome(compress, *args), outcome(compress, *args[:11]), compress(**by_name) is args[8],
        compress(*args[:9], block_size=8, compress_ratio=128) is args[8]]
say([said, seen, kvb.counters()[0]])
"""
    )
    assert said == [["kv_cache", "kv_cache", True, True], [["stream", 2, 0]] * 4, 4]
    launches = harness.launches(calls)
    assert len(launches) == 4 and {launch["stream"] for launch in launches} == {99}
    assert launches[0] == launches[1] == launches[2] == launches[3]


def test_what_goes_the_plain_way(run: Any) -> None:
    said, calls = run(
        BEGIN
        + """
args, cpu = arguments(), arguments(device=(CUDA, 1))
other, undescribed = [Other(args[0].described), *args[1:]], [*args[:8], Tensor(None), *args[9:]]
class Int(int):
    pass
calls = [(args[:10], {}), ([*args, 1], {}), (args[:11], {"eps": 1}), (args[:10], {"rms_norm_eps": 1e-6}),
         (other, {}), (undescribed, {}), (cpu, {}), ([*args[:9], True, *args[10:]], {}),
         ([*args[:9], Int(8), *args[10:]], {}), ([*args[:9], 2**80, *args[10:]], {}),
         ([*args[:10], 128.0, args[11]], {}), ([*args[:11], 1], {}), ([1] * 12, {})]
said = [compress(*values, **named) for values, named in calls]
STREAM_CODE[0] = 1
said.append(compress(*args))
STREAM_CODE[0] = 0
odd.append(args[8])
said.append(compress(*args))
odd.clear()
closed.value = 1
said.append(compress(*args))
say([said, [each for each in seen if each[0] == "plain"], sys.exc_info()[0] is None])
"""
    )
    assert said[0] == ["plainly"] * 16 and said[2]
    assert [each[1] for each in said[1]] == [10, 13, 11, 10] + [12] * 12
    assert [each[2] for each in said[1]][:4] == [[], [], ["eps"], ["rms_norm_eps"]]
    assert harness.launches(calls) == []


def test_refusals_are_raised_by_python(run: Any) -> None:
    said, calls = run(
        BEGIN
        + """
said = [outcome(compress, *arguments(positions=tensor((7,), "int32"))),
        outcome(compress, *arguments(compress_ratio=64)[:11])]
kvb.close()
kvb.open(1)
say([*said, outcome(compress, *arguments())])
"""
    )
    assert said[0] == [1, "positions: wanted dtype int64, found int32", 12]
    assert said[1] == [2, "compress_ratio: wanted one that was compiled (128, 512), found 64", 11]
    assert said[2][0] == 2
    assert said[2][1].startswith("state_cache: wanted a tensor on the device that was opened (cuda:1)")
    assert harness.launches(calls) == []


def test_the_drivers_refusal(run: Any) -> None:
    said, _ = run(BEGIN + "say(outcome(compress, *arguments()))", KVB_STANDIN_FAIL="cuLaunchKernel=2")
    assert said == [3, "DeviceError: cuLaunchKernel: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory", 12]


def test_a_step(run: Any) -> None:
    said, calls = run(
        BEGIN
        + """
args = arguments()
by_name = dict(zip(NAMES, args))
fixed = (ctypes.py_object * 5)(*(by_name[name] for name in FIXED))
varying = [by_name[name] for name in VARYING]
step = make_step(given(), fixed, 8, 128, 1e-6)
said = [compress(*args) is args[8], step(*varying) is args[8],
        step(*varying[:2], boundary_token_indices=varying[2], kv_slot_mapping=varying[3]) is args[8],
        step(*varying[:3]), step(*varying[:3], 1)]
kept = by_name["block_table"].described
by_name["block_table"].described = tensor((2, 6), "int32", 0x500008, (9, 1))
said.append(outcome(step, *varying))
by_name["block_table"].described = None
said.append(outcome(step, *varying))
by_name["block_table"].described = kept
said.append(step(*varying) is args[8])
odd.append(varying[3])
said.append(step(*varying))
closed.value = 1
said.append(step(*varying))
say([said, sys.exc_info()[0] is None])
"""
    )
    changed = "block_table: wanted the tensor as it was bound, found "
    advice = ". Bind again after resizing or replacing a bound tensor's memory"
    assert said == [
        [
            True, True, True, "plainly", "plainly", [2, f"{changed}other memory{advice}", 4],
            [2, f"{changed}one that can no longer be looked at{advice}", 4], True, *["plainly"] * 2,
        ],
        True,
    ]  # fmt: skip
    launches = harness.launches(calls)
    assert len(launches) == 4 and all(launch == launches[0] for launch in launches)


@pytest.mark.parametrize(
    "wrong", ["given(api(2))", "given(API(1, 0, (ctypes.c_void_p * 4)(), DESCRIBE(), STREAM(stream)))",
              "given(API(1, 0, (ctypes.c_void_p * 4)(), DESCRIBE(describe), STREAM()))"],
)  # fmt: skip
def test_an_exchange_api_that_cannot_serve_makes_no_function(run: Any, wrong: str) -> None:
    said, _ = run(
        BEGIN
        + f"""
other = {wrong}
fixed = (ctypes.py_object * 5)(*(Tensor(operands()[name]) for name in FIXED))
say([make(other), make_step(other, fixed, 8, 128, 1e-6), make_step(given(), fixed, 9, 128, 1e-6)])
"""
    )
    assert said == [None, None, None]


def test_what_a_function_holds_it_lets_go(run: Any) -> None:
    said, _ = run(
        BEGIN
        + """
args = arguments()
by_name = dict(zip(NAMES, args))
held = [plain, refuse, usual, closed, *args[:9]]
before = [sys.getrefcount(each) for each in held]
made = [make(given()) for _ in range(3)]
for _ in range(3):
    fixed = (ctypes.py_object * 5)(*(by_name[name] for name in FIXED))
    made.append(make_step(given(), fixed, 8, 128, 1e-6))
    made.append(make_step(given(), fixed, 9, 128, 1e-6))
during = [sys.getrefcount(each) - one for each, one in zip(held, before)]
for _ in range(100):
    made[0](*args)
    outcome(made[0], *args[:10], 64)
    made[3](*(by_name[name] for name in VARYING))
made.clear()
del fixed
gc.collect()
say([during, [sys.getrefcount(each) - one for each, one in zip(held, before)]])
"""
    )
    during, after = said
    assert min(during[:4]) >= 6 and sum(during[4:]) >= 15
    assert max(map(abs, after)) <= 2
