"""How fast a device can read: what reads bytes and does nothing else, the best of many ways.

On NVIDIA these are plain kernels, compiled by NVRTC, which torch brings; elsewhere reductions of torch alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from . import timing
from .timing import Timing

THREADS = (128, 256, 512)
UNROLLS = (1, 2, 4, 8, 16)
BLOCKS_PER_MULTIPROCESSOR = (4, 8)
REPLAYS = 8
# What torch does with one pass over a float32 tensor; the integer sums cannot wait for a rounding.
HOST_READS: Mapping[str, Callable[[Tensor], object]] = {
    "torch.sum": torch.sum,
    "torch.amax": torch.amax,
    "torch.sum of int32": lambda data: torch.sum(data.view(torch.int32), dtype=torch.int32),
}

# `count` float4 are a multiple of what a block reads at a time, so there is no bounds check in the loop.
SOURCE = """
#define READ(NAME, UNROLL)                                                                             \\
  extern "C" __global__ void NAME(const float4 *data, unsigned long long count, float *sink) {         \\
    const unsigned long long chunk = (unsigned long long)blockDim.x * UNROLL;                          \\
    float sum = 0.0f;                                                                                  \\
    for (unsigned long long at = blockIdx.x * chunk; at < count; at += gridDim.x * chunk) {            \\
      float4 v[UNROLL];                                                                                \\
      _Pragma("unroll") for (int i = 0; i < UNROLL; ++i)                                               \\
        asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"                     \\
                     : "=f"(v[i].x), "=f"(v[i].y), "=f"(v[i].z), "=f"(v[i].w)                          \\
                     : "l"(data + at + i * blockDim.x + threadIdx.x));                                 \\
      _Pragma("unroll") for (int i = 0; i < UNROLL; ++i) sum += v[i].x + v[i].y + v[i].z + v[i].w;      \\
    }                                                                                                  \\
    if (sum == 1.0e30f) *sink = sum;                                                                   \\
  }
"""


class Reader:
    """The compiled kernels, loaded into torch's current context. RuntimeError where that is refused."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        entries = {unroll: f"read_{unroll}" for unroll in UNROLLS}
        text = SOURCE + "\n".join(f"READ({name}, {unroll})" for unroll, name in entries.items())
        image = _compile(text)
        self._module = ctypes.c_void_p()
        self._check("cuModuleLoadData", ctypes.byref(self._module), image)
        self._functions = {}
        for unroll, name in entries.items():
            function = ctypes.c_void_p()
            self._check("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
            self._functions[unroll] = function
        self._sink = torch.zeros(1, device="cuda")

    def shapes(self, count: int) -> list[tuple[int, int, int]]:
        """(threads, unroll, blocks) that read `count` float4 exactly."""
        most = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        found = set()
        for threads in THREADS:
            for unroll in UNROLLS:
                if count % (threads * unroll) == 0:
                    blocks = count // (threads * unroll)
                    caps = (blocks, *(most * each for each in BLOCKS_PER_MULTIPROCESSOR))
                    found |= {(threads, unroll, min(blocks, cap)) for cap in caps}
        return sorted(found)

    def launch(self, data: Tensor, shape: tuple[int, int, int]) -> None:
        """Reads all of `data`, contiguous float32, on the current stream."""
        threads, unroll, blocks = shape
        values = (ctypes.c_void_p(data.data_ptr()), ctypes.c_uint64(data.numel() // 4),
                  ctypes.c_void_p(self._sink.data_ptr()))
        parameters = (ctypes.c_void_p * 3)(*(ctypes.cast(ctypes.byref(value), ctypes.c_void_p)
                                             for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._check("cuLaunchKernel", self._functions[unroll], blocks, 1, 1, threads, 1, 1, 0, stream,
                    parameters, None)

    def _check(self, call: str, *arguments: object) -> None:
        code = getattr(self._driver, call)(*arguments)
        if code != 0:
            raise RuntimeError(f"{call}: error {code}")


def reader() -> tuple[Reader | None, str]:
    """The plain kernels; None, and why, where there are none."""
    try:
        return Reader(), ""
    except (OSError, RuntimeError) as error:
        return None, str(error)


def best(
    found: Reader | None, sets: Sequence[Tensor], rounds: int, replays: int = REPLAYS
) -> tuple[Timing, str]:
    """The least time in which one of `sets`, float32 tensors of equal size, is read, and by what.

    A graph reads all of them in turn, `rounds` times; by the plain kernels, where there are any, and torch.
    """
    results: list[tuple[Timing, str]] = []
    if found is not None:
        for shape in found.shapes(sets[0].numel() // 4):
            name = "{} threads, {} float4 each, {} blocks".format(*shape)
            results.append((_time(partial(found.launch, shape=shape), sets, rounds, replays), name))
    sink = torch.zeros((), device=sets[0].device)
    results.append((_time(lambda data: torch.sum(data, dim=0, out=sink), sets, rounds, replays), "torch.sum"))
    return min(results, key=lambda result: result[0].median)


def _time(read: Callable[[Tensor], object], sets: Sequence[Tensor], rounds: int, replays: int) -> Timing:
    def body() -> None:
        for _ in range(rounds):
            for data in sets:
                read(data)

    read(sets[0])
    return timing.replay(timing.capture(body), rounds * len(sets), replays)


def host(sets: Sequence[Tensor], repeats: int) -> tuple[Timing, str]:
    """The same for the host's memory, by all of torch's threads or by one: one set after the other."""
    threads = torch.get_num_threads()
    results = []
    try:
        for count in sorted({1, threads}):
            torch.set_num_threads(count)
            for name, read in HOST_READS.items():
                one = timing.until_done(_in_turn(read, sets), lambda: None, repeats)
                results.append((one, f"{name}, threads: {count}"))
    finally:
        torch.set_num_threads(threads)
    return min(results, key=lambda result: result[0].median)


def _in_turn(read: Callable[[Tensor], object], sets: Sequence[Tensor]) -> Callable[[], object]:
    turn = cycle(sets)
    return lambda: read(next(turn))


def _compile(source: str) -> bytes:
    library = _nvrtc()
    program = ctypes.c_void_p()
    major, minor = torch.cuda.get_device_capability()

    def check(call: str, *arguments: object) -> None:
        code = getattr(library, call)(*arguments)
        if code != 0:
            raise RuntimeError(f"{call}: error {code}{_log(library, program)}")

    check("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"read.cu", 0, None, None)
    # For this very chip: device code, so that the driver need not compile anything.
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture=sm_{major}{minor}".encode())
    check("nvrtcCompileProgram", program, 1, options)
    size = ctypes.c_size_t()
    check("nvrtcGetCUBINSize", program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    check("nvrtcGetCUBIN", program, image)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


def _log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    if not program or library.nvrtcGetProgramLogSize(program, ctypes.byref(size)) != 0:
        return ""
    text = ctypes.create_string_buffer(size.value + 1)
    library.nvrtcGetProgramLog(program, text)
    return ": " + text.value.decode(errors="replace")[:600]


def _nvrtc() -> ctypes.CDLL:
    """The library that torch was built with, wherever it lies."""
    name = f"libnvrtc.so.{(torch.version.cuda or '0').split('.')[0]}"
    beside = Path(torch.__file__).parent.parent / "nvidia"
    places = [name, *map(str, sorted(beside.glob(f"*/lib/{name}"))), "libnvrtc.so"]
    refusals = []
    for place in places:
        try:
            library = ctypes.CDLL(place)
        except OSError as error:
            refusals.append(str(error))
            continue
        _load_builtins()
        return library
    raise RuntimeError(f"wanted NVRTC to measure how fast this GPU reads, found: {'; '.join(refusals)}")


def _load_builtins() -> None:
    """NVRTC looks for this library by its name alone, and finds it where it is loaded already."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        places = {line.split()[-1] for line in maps if "/libnvrtc.so" in line}
    for place in places:
        for builtins in Path(place).parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))
