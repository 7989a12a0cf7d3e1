"""JSON read without leniency: every field required, none unknown, each of the type that was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What reaches a terminal, a symbol table or C source: no control characters, no look-alikes.
_LABEL = re.compile(r"[!-~]([ -~]{0,254}[!-~])?")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

SHA256 = re.compile(r"[0-9a-f]{64}")

# Far above what any field needs, and within what every consumer holds in a signed 64-bit integer.
MAX_INT = 2**63 - 1


class JsonError(ValueError):
    """A JSON document that is not what was wanted; the text names the path, wanted and found."""


def canonical(value: object) -> bytes:
    """The canonical bytes of a JSON value: sorted keys, no spaces, UTF-8."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def parse(data: bytes) -> Any:
    """Parses UTF-8 JSON; refuses repeated keys, NaN and infinities. Raises JsonError."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
        if _SURROGATE.search(data):
            canonical(value)  # an escaped half of a pair is no text: it has no UTF-8
        return value
    except JsonError:
        raise
    except RecursionError:
        raise JsonError("wanted JSON, found values nested too deeply") from None
    except ValueError as error:
        raise JsonError(f"wanted JSON in UTF-8, found something else: {error}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise JsonError(f"wanted each key once, found {shown(repeated(key for key, _ in pairs))} repeated")
    return found


def _no_constant(name: str) -> NoReturn:
    raise JsonError(f"wanted finite numbers, found {name}")


def repeated(names: Iterable[str]) -> str:
    """The first name that stands a second time. ValueError where each stands once."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    raise ValueError("wanted a repeated name, found each once")


def shown(value: object) -> str:
    """A value as an error message shows it: JSON, cut to a readable length."""
    try:
        text = json.dumps(value, ensure_ascii=True, default=repr)
    except RecursionError:  # it was parsed a few calls further up the stack
        return "values nested too deeply"
    return text if len(text) <= 80 else text[:77] + "..."


class Node:
    """One value of a parsed document, together with the way that leads to it.

    step: a member's name, an element's index, or the path of a node without a parent.
    """

    __slots__ = ("parent", "step", "value")

    def __init__(self, value: object, step: str | int = "", parent: Node | None = None) -> None:
        self.value = value
        self.step = step
        self.parent = parent

    @property
    def path(self) -> str:
        """The way from the document's root, such as targets[0].arch."""
        if self.parent is None:
            return str(self.step)
        if isinstance(self.step, int):
            return f"{self.parent.path}[{self.step}]"
        step = f".{self.step}" if _PLAIN_NAME.fullmatch(self.step) else f"[{shown(self.step)}]"
        return (self.parent.path + step).lstrip(".")

    def fail(self, wanted: str, found: str | None = None) -> NoReturn:
        """Raises JsonError for this value."""
        where = f"{self.path}: " if self.path else ""
        raise JsonError(f"{where}wanted {wanted}, found {shown(self.value) if found is None else found}")

    def fields(self, names: Sequence[str]) -> dict[str, Node]:
        """The members of an object that has exactly these names."""
        value = self.value
        if not isinstance(value, dict):
            self.fail("an object")
        found = {name: Node(value[name], name, self) for name in names if name in value}
        if len(found) == len(names) == len(value):
            return found
        for name in names:
            if name not in value:
                Node(None, name, self).fail("a value", "no such field")
        unknown = next(name for name in value if name not in found)
        Node(None, unknown, self).fail(f"no field but {', '.join(names)}", "an unknown field")

    def members(self) -> dict[str, Node]:
        """The members of an object whose names are free."""
        if not isinstance(self.value, dict):
            self.fail("an object")
        return {name: Node(value, name, self) for name, value in self.value.items()}

    def labelled(self) -> dict[str, Node]:
        """The members of an object whose names are labels."""
        members = self.members()
        for name in members:
            Node(name, self.path).label()
        return members

    def items(self) -> Iterator[Node]:
        """The elements of an array."""
        if not isinstance(self.value, list):
            self.fail("an array")
        for index, value in enumerate(self.value):
            yield Node(value, index, self)

    def each(self, read: Callable[[Node], T]) -> tuple[T, ...]:
        """The elements of an array, each read by `read`."""
        return tuple(read(item) for item in self.items())

    def integer(self, low: int = 0, high: int = MAX_INT) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            bounds = f"an integer >= {low}" if high == MAX_INT else f"an integer from {low} to {high}"
            self.fail(f"the integer {low}" if low == high else bounds)
        return self.value

    def boolean(self) -> bool:
        if type(self.value) is not bool:
            self.fail("true or false")
        return self.value

    def string(self, *choices: str) -> str:
        """A non-empty string, one of `choices` where any are given."""
        if not isinstance(self.value, str) or not self.value or (choices and self.value not in choices):
            self.fail(" or ".join(shown(choice) for choice in choices) or "a non-empty string")
        return self.value

    def text(self) -> str:
        """A string, which may be empty."""
        if not isinstance(self.value, str):
            self.fail("a string")
        return self.value

    def line(self, empty: bool = False) -> str:
        """Text that a terminal shows as it is: up to 256 characters, none of control. empty: "" will do."""
        text = self.text() if empty else self.string()
        if len(text) > 256 or not text.isprintable():
            self.fail("at most 256 characters, none of control")
        return text

    def matching(self, pattern: re.Pattern[str], wanted: str) -> str:
        """A string that the whole pattern matches."""
        if not isinstance(self.value, str) or not pattern.fullmatch(self.value):
            self.fail(wanted)
        return self.value

    def label(self) -> str:
        """A name or a version: printable ASCII."""
        return self.matching(_LABEL, "1 to 256 printable ASCII characters, no space at either end")

    def sha256(self) -> str:
        return self.matching(SHA256, "a sha256 in 64 lower-case hex digits")


def field_names(cls: Any) -> tuple[str, ...]:
    """The names of a dataclass's fields, in order: the members its JSON object has."""
    return tuple(cls.__dataclass_fields__)
