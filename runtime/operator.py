"""The callable a serving process uses, and how it comes out of a bundle."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from . import direct
from .arguments import explain, new_zeros, refuse_odd
from .bound import FIXED, VARYING, bind
from .bundle import Bundle, open_bundle
from .device import detect
from .discover import bundle_path
from .errors import BundleError, NoMatchingArtifact
from .facts import Facts
from .launcher import Launcher, load_launcher
from .manifest import Target, Variant
from .select import Choice, select
from .stream import teller
from .vendors import torch_type

if TYPE_CHECKING:
    from .staged import StagedVariant


def load(
    path: str | os.PathLike[str] | None = None,
    device: object = None,
    *,
    trusted_keys: Sequence[object] | None = None,
    strict: bool = False,
) -> Operator:
    """Loads the operator for a device from a bundle. All loading happens here, none in the first call.

    path:         the .kvb file; None for the one KVBUILD_BUNDLE names, else the installed bundle wheel's.
    device:       None for this process's current device, 'cpu', 'cuda', 'cuda:1', a torch.device, or an
                  accelerator's index.
    trusted_keys: where given, only a bundle signed by one of them is accepted. Schema 1 carries no
                  signatures, so every bundle of it is refused.
    strict:       accept code built for exactly this arch only.

    Raises BundleError (damaged, unsigned, of another schema, or not there), NoMatchingArtifact (its text is
    each target and why not), DeviceError (no such device, or its driver refused), and TypeError or ValueError
    for a wrong argument.
    """
    _refuse_subinterpreter()
    # Before the device: it brings in torch where torch is installed, and torch knows the current device.
    import tvm_ffi  # noqa: F401

    if trusted_keys is not None and (
        isinstance(trusted_keys, (str, bytes)) or not isinstance(trusted_keys, Sequence)
    ):
        raise TypeError(f"trusted_keys: wanted a list of keys, found {type(trusted_keys).__name__}")
    if not isinstance(strict, bool):
        raise TypeError(f"strict: wanted True or False, found {strict!r}")
    with open_bundle(bundle_path(path)) as bundle:
        if trusted_keys is not None:
            raise BundleError(
                f"{bundle.path}: unsigned: wanted a signature by one of {len(trusted_keys)} trusted keys, "
                "found none (this schema carries none); load it without trusted_keys if you trust its source"
            )
        facts = detect(device)
        try:
            choice = select(bundle.manifest, facts, strict)
        except NoMatchingArtifact as error:
            raise NoMatchingArtifact(f"{bundle.path}: {error}") from None
        return _open(bundle, choice, facts)


def _refuse_subinterpreter() -> None:
    """TVM-FFI and torch serve one interpreter of a process; loaded by a second one, they crash it."""
    python = ctypes.pythonapi
    current = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyInterpreterState_Get", python))()
    number = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(("PyInterpreterState_GetID", python))(current)
    if number != 0:
        raise RuntimeError(
            f"wanted the process's main interpreter, found subinterpreter {number}, where neither torch nor "
            "TVM-FFI can be loaded; load the operator in the main one, or in a process of its own"
        )


def _open(bundle: Bundle, choice: Choice, facts: Facts) -> Operator:
    blobs = {name: bundle.read(blob) for name, blob in choice.target.kernel_blobs.items()}
    # Read here, not when the launcher is first loaded, so that a damaged one is refused every time.
    content = bundle.read(choice.launcher)
    try:
        launcher = load_launcher(choice.launcher, content, facts.host)
        launcher.open(facts.index, bundle.manifest_bytes, blobs)
    except BundleError as error:
        raise BundleError(f"{bundle.path}: {error}") from None
    return Operator(launcher, choice.target, facts)


class Operator:
    """The KV-cache compressor on one device. Calls may come from any thread, on any stream, and under stream
    capture; operands on another device are a ValueError.

    `close` gives the device's memory back. An operator that is merely dropped does not, for a captured graph
    may still hold its kernels; loading the same bundle again then costs no further memory.
    """

    def __init__(self, launcher: Launcher, target: Target, facts: Facts) -> None:
        self._launcher = launcher
        self._compress = launcher.compress
        self._index = facts.index
        self._closed = ctypes.c_int32(0)
        self._closing = threading.Lock()
        self._target = target
        self._facts = facts
        self._tell_stream = teller(launcher, facts.index)
        if self._tell_stream is None and type(self).compress is Operator.compress:
            # What serves the calls that are not for the direct function. Not this object: each would hold the
            # other for good.
            plain = object.__new__(type(self))
            plain.__dict__.update(self.__dict__)
            self.compress = direct.whole(  # type: ignore[method-assign]
                launcher.library, plain.compress, self._closed, self.device
            )

    def compress(
        self,
        state_cache: Any,
        token_to_req: Any,
        positions: Any,
        boundary_token_indices: Any,
        block_table: Any,
        rms_norm_weight: Any,
        cos_sin_cache: Any,
        kv_slot_mapping: Any,
        kv_cache: Any,
        block_size: int,
        compress_ratio: int,
        rms_norm_eps: float = 1.0e-6,
    ) -> Any:
        """Compresses one window for each boundary into kv_cache, in place, on the current stream of torch.

        state_cache:            [num_blocks, block_size, 1024] float32: 512 values, then 512 scores, a row
        token_to_req:           [num_tokens] int32
        positions:              [num_tokens] int64
        boundary_token_indices: [num_outputs] int64; a negative entry is padding and is skipped
        block_table:            [num_reqs, blocks_per_req] int32
        rms_norm_weight:        [512] bfloat16 or float32
        cos_sin_cache:          [max_pos, 64] float32: 32 cosines, then 32 sines
        kv_slot_mapping:        [num_tokens] int64; an output whose slot is negative is skipped
        kv_cache:               [kv_pages, page_stride >= 37376] uint8
        block_size:             rows in a state page
        compress_ratio:         rows in a window: 128, 256 or 512

        Returns kv_cache; bytes that belong to no output keep their value. No gradient flows: a tensor that
        requires one is read like any other. Raises TypeError or ValueError naming the argument, what was
        wanted and what was found; DeviceError where the driver refused.
        """
        try:
            if self._closed:
                _refuse_closed()
            if self._launcher.several:
                self._check_device(kv_cache)
            if self._tell_stream is not None:
                self._tell_stream()
            refuse_odd(
                state_cache, token_to_req, positions, boundary_token_indices, block_table, rms_norm_weight,
                cos_sin_cache, kv_slot_mapping, kv_cache,
            )  # fmt: skip
            self._compress(
                state_cache,
                token_to_req,
                positions,
                boundary_token_indices,
                block_table,
                rms_norm_weight,
                cos_sin_cache,
                kv_slot_mapping,
                kv_cache,
                block_size,
                compress_ratio,
                rms_norm_eps,
            )
        except Exception as error:
            arguments = (
                state_cache, token_to_req, positions, boundary_token_indices, block_table, rms_norm_weight,
                cos_sin_cache, kv_slot_mapping, kv_cache, block_size, compress_ratio, rms_norm_eps,
            )  # fmt: skip
            raise explain(error, arguments) from None
        return kv_cache

    def c128_256_512_compress(
        self,
        state_cache: Any,
        token_to_req: Any,
        positions: Any,
        boundary_token_indices: Any,
        block_table: Any,
        rms_norm_weight: Any,
        cos_sin_cache: Any,
        kv_slot_mapping: Any,
        kv_cache: Any,
        block_size: int,
        compress_ratio: int,
        rms_norm_eps: float = 1.0e-6,
    ) -> Any:
        """Like `compress`, but into a new, zeroed, contiguous tensor of kv_cache's shape, which it returns;
        kv_cache (a torch tensor or a numpy array) is read for its shape, dtype and device only."""
        return self.compress(
            state_cache,
            token_to_req,
            positions,
            boundary_token_indices,
            block_table,
            rms_norm_weight,
            cos_sin_cache,
            kv_slot_mapping,
            new_zeros(kv_cache),
            block_size,
            compress_ratio,
            rms_norm_eps,
        )

    def bind(
        self,
        *,
        state_cache: Any,
        block_table: Any,
        rms_norm_weight: Any,
        cos_sin_cache: Any,
        kv_cache: Any,
        block_size: int,
        compress_ratio: int,
        rms_norm_eps: float = 1.0e-6,
    ) -> Callable[[Any, Any, Any, Any], Any]:
        """Checks the operands that stay the same from step to step, and returns the function for the rest.

        `step(token_to_req, positions, boundary_token_indices, kv_slot_mapping)` does what `compress` does
        with all of them, and returns kv_cache. It may be called from several threads, on any
        stream and under stream capture. It keeps the bound tensors alive. Their contents may change; where
        one has been resized or has got other memory since, a step is refused with a ValueError that names it.

        Shapes, dtypes and errors are those of `compress`.
        """
        fixed = (state_cache, block_table, rms_norm_weight, cos_sin_cache, kv_cache)
        if self._closed:
            _refuse_closed()
        try:
            if self._launcher.several:
                self._check_device(kv_cache)
            refuse_odd(*fixed)
            launch = bind(self._launcher.bind, fixed, block_size, compress_ratio, rms_norm_eps)
        except Exception as error:
            raise explain(error, (*fixed, block_size, compress_ratio, rms_norm_eps), FIXED) from None

        # Not this object, which may come to hold the step: collection does not see into a built-in function.
        closed, tell_stream = self._closed, self._tell_stream

        def step(token_to_req: Any, positions: Any, boundary_token_indices: Any, kv_slot_mapping: Any) -> Any:
            try:
                if closed:
                    _refuse_closed()
                if tell_stream is not None:
                    tell_stream()
                refuse_odd(token_to_req, positions, boundary_token_indices, kv_slot_mapping)
                launch(token_to_req, positions, boundary_token_indices, kv_slot_mapping)
            except Exception as error:
                varying = (token_to_req, positions, boundary_token_indices, kv_slot_mapping)
                raise explain(error, varying, VARYING) from None
            return kv_cache

        if tell_stream is not None:
            return step
        scalars = (block_size, compress_ratio, rms_norm_eps)
        return direct.step(self._launcher.library, step, self._closed, self.device, fixed, VARYING, *scalars)

    @property
    def target(self) -> Target:
        """The target of the bundle that was chosen."""
        return self._target

    @property
    def variants(self) -> tuple[Variant | StagedVariant, ...]:
        """What a call may launch, in the order of preference; empty for the cpu."""
        return self._target.launchable

    @property
    def facts(self) -> Facts:
        """The facts about host and device that the target was chosen by."""
        return self._facts

    @property
    def device(self) -> str:
        """The device it serves, as torch names it: cpu, cuda:0, musa:0."""
        return "cpu" if self._facts.vendor == "cpu" else f"{torch_type(self._facts.vendor)}:{self._index}"

    def counters(self) -> dict[str, Any]:
        """What was done on this device through this bundle's code since it was opened, by all operators.

        calls: calls that passed their checks; general_calls: those that took a general variant; launches: by
        variant, such as c128-aligned-64 (any: with no limit of outputs).
        """
        if self._closed:
            _refuse_closed()
        calls, general, *launches = self._launcher.counters(self._index)
        by_variant: dict[str, int] = {}
        for variant, count in zip(self.variants, launches, strict=True):
            by_variant[variant.name] = by_variant.get(variant.name, 0) + count
        return {"calls": calls, "general_calls": general, "launches": by_variant}

    def pin(self, variant: int | None) -> None:
        """For measuring and tests: every later call on this device launches `variants[variant]`, whatever its
        number of outputs, until `pin(None)`. Other operators of this bundle on the device are pinned too.

        A call that the variant is not for (by its ratio, or the layout of its operands) is then a ValueError.
        Raises ValueError where there is no such variant, BundleError where the launcher is too old.
        """
        if self._closed:
            _refuse_closed()
        self._launcher.pin(self._index, -1 if variant is None else variant)

    def close(self) -> None:
        """Ends the operator: its calls are over, and the last one of a device unloads its code, which no
        captured graph may use any more. Waits for calls in flight in other threads; may be called twice."""
        with self._closing:
            if self._closed:
                return
            self._closed.value = 1
        self._launcher.close(self._index)

    def __enter__(self) -> Operator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<kvbuild operator {self._target.name} on {self.device}{state}>"

    def _check_device(self, kv_cache: Any) -> None:
        """The launcher accepts any device it has open; this operator serves one of them."""
        locate = getattr(kv_cache, "__dlpack_device__", None)
        _, index = locate() if locate is not None else (0, self._index)
        if index != self._index:
            raise ValueError(
                f"kv_cache: wanted a tensor on {self.device}, which this operator was loaded for, "
                f"found one on device {index}; load another operator for that device"
            )


def _refuse_closed() -> NoReturn:
    raise ValueError("the operator is closed; load it again")
