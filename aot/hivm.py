"""What the builder reads from memory-planned HIVM text: the kernel, its parameters, its unified buffer."""

from __future__ import annotations

import re
from dataclasses import dataclass

# What the driver puts before a kernel's own parameters, and behind them.
_LEADING = ("ffts_base_address", "sync_block_lock", "workspace")
_GRID = ("i32", "i32", "i32")

# Every expression reads from one place of one line, so that none takes longer than the text is long.
_FUNCTION, _ATTRIBUTES, _END = "  func.func @", ") attributes {", "} {"
_PARAMETER = re.compile(
    r"%arg\d+: (memref<\?x(?P<element>\w+), [^>]{0,400}>>|\w+)(?P<attributes> \{[^}]{0,400}\})?"
)
_ARGUMENT_KIND = re.compile(r"hacc\.arg_type = #hacc\.arg_type<(\w+)>")
_CONSTANT = re.compile(r"^ *(%\w+) = arith\.constant (\d+) : i64$", re.MULTILINE)
_CAST, _SPACE, _IN_UB = "hivm.hir.pointer_cast(", "#hivm.address_space<", "#hivm.address_space<ub>>"
_BUFFER = re.compile(
    r"(?P<addresses>%[^)]*)\)[^:]* : memref<(?P<shape>(?:\d+x)*)(?P<element>[a-z]+\d+)\b"
)
_BITS = re.compile(r"[a-z]+(\d+)")
# Host functions by which a kernel would ask for a workspace or locks of its launcher.
_WANTS = ("_infer_workspace_shape_function", "_infer_sync_block_lock_num_function")


@dataclass(frozen=True)
class Hivm:
    """One kernel. parameters: its own, as Triton types. ub_bytes: up to where it uses the unified buffer."""

    entry: str
    parameters: tuple[str, ...]
    ub_bytes: int


def read(text: str) -> Hivm:
    """Reads one module. ValueError where it is not a vector kernel that a launcher can launch."""
    entries = _entries(text)
    if len(entries) != 1:
        raise ValueError(f"wanted HIVM with one entry function, found {len(entries)}")
    name, parameters, attributes = entries[0]
    if "hivm.func_core_type<AIV>" not in attributes:
        raise ValueError(f"{name}: wanted a kernel for the vector cores alone, found another kind")
    for wish in _WANTS:
        if f"@{name}{wish}" in text:
            raise ValueError(f"{name}: wanted no workspace and no locks, found {wish.strip('_')}")
    return Hivm(name, _own_parameters(name, parameters), _ub_bytes(name, text))


def _entries(text: str) -> list[tuple[str, str, str]]:
    """Name, parameters and attributes of each entry function."""
    found = []
    for line in text.split("\n"):
        if line.startswith(_FUNCTION) and line.endswith(_END):
            head, _, attributes = line[len(_FUNCTION) : -len(_END)].rpartition(_ATTRIBUTES)
            name, _, parameters = head.partition("(")
            if re.fullmatch(r"\w+", name) and "hacc.entry" in attributes:
                found.append((name, parameters, attributes))
    return found


def _own_parameters(name: str, text: str) -> tuple[str, ...]:
    found = list(_PARAMETER.finditer(text))
    kinds = tuple(
        kind[1] if (kind := _ARGUMENT_KIND.search(each["attributes"] or "")) else "" for each in found
    )
    types = tuple(_type(each["element"], each[1]) for each in found)
    if kinds[:3] != _LEADING or types[-3:] != _GRID or any(kinds[3:]):
        raise ValueError(
            f"{name}: wanted the parameters {', '.join(_LEADING)}, its own and three i32, found {text[:500]}"
        )
    return types[3:-3]


def _type(element: str | None, whole: str) -> str:
    """As Triton writes it: *fp32, i64, fp32."""
    kind = element or whole
    kind = kind.replace("f", "fp") if re.fullmatch(r"f\d+", kind) else kind
    return f"*{kind}" if element else kind


def _ub_bytes(name: str, text: str) -> int:
    constants = {constant: int(value) for constant, value in _CONSTANT.findall(text)}
    end = 0
    for line in text.split("\n"):
        _, cast, rest = line.partition(_CAST)
        if not cast or (_IN_UB not in rest and _SPACE in rest):
            continue
        buffer = _BUFFER.match(rest) if _IN_UB in rest and _CAST not in rest else None
        if buffer is None:
            raise ValueError(f"{name}: wanted buffers of fixed shapes, found some whose size cannot be read")
        bits = _BITS.fullmatch(buffer["element"])
        assert bits
        size = int(bits[1])
        for extent in buffer["shape"].split("x")[:-1]:
            size *= int(extent)
        for address in buffer["addresses"].split(","):
            if address.strip() not in constants:
                raise ValueError(f"{name}: wanted planned addresses, found {address.strip()}")
            end = max(end, constants[address.strip()] + -(-size // 8))
    return end
