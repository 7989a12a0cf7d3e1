"""A YAML document whose every value knows its file, line and field, for errors that point at it."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import yaml

from .errors import RequestError

# PyYAML takes a second or more for each MiB.
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Value:
    """One value of a document. Every reading method raises RequestError as `file:line: field: ...`."""

    node: yaml.Node
    file: str
    field: str

    @property
    def line(self) -> int:
        return int(self.node.start_mark.line) + 1

    def fail(self, message: str) -> NoReturn:
        raise RequestError(f"{self.file}:{self.line}: {self.field or 'document'}: {message}")

    def found(self) -> str:
        """The value as an error text shows it."""
        if isinstance(self.node, yaml.MappingNode):
            return "a mapping"
        if isinstance(self.node, yaml.SequenceNode):
            return "a list"
        return repr(self.scalar())

    def scalar(self) -> object:
        """The plain value of a scalar: str, int, float, bool or None."""
        if not isinstance(self.node, yaml.ScalarNode):
            self.fail(f"wanted a single value, found {self.found()}")
        value = _construct(self.node, self)
        if not isinstance(value, Hashable):  # an explicit tag: !!seq x
            self.fail(f"wanted a single value, found {self.node.tag.rpartition(':')[2]} by its tag")
        return value

    def integer(self) -> int:
        value = self.scalar()
        if type(value) is not int:
            self.fail(f"wanted an integer, found {value!r}")
        return value

    def boolean(self) -> bool:
        value = self.scalar()
        if not isinstance(value, bool):
            self.fail(f"wanted true or false, found {value!r}")
        return value

    def text(self) -> str:
        value = self.scalar()
        if not isinstance(value, str) or not value.strip():
            self.fail(f"wanted text, found {value!r}")
        return value

    def items(self) -> list[tuple[object, Value]]:
        """The (key, value) pairs of a mapping, in the file's order; a repeated key is refused."""
        if not isinstance(self.node, yaml.MappingNode):
            self.fail(f"wanted a mapping, found {self.found()}")
        pairs: list[tuple[object, Value]] = []
        lines: dict[object, int] = {}
        for key_node, value_node in self.node.value:
            key_at = Value(key_node, self.file, self.field)
            key = key_at.scalar()
            if key in lines:
                key_at.fail(f"key {key!r} stands twice, first on line {lines[key]}; keep one")
            lines[key] = key_at.line
            pairs.append((key, Value(value_node, self.file, f"{self.field}.{key}".lstrip("."))))
        return pairs

    def record(
        self, required: Collection[str], optional: Collection[str] = (), advice: str = ""
    ) -> dict[str, Value]:
        """The values of a mapping with fixed keys; unknown and missing keys are refused by name.

        advice: what to do where one is missing.
        """
        known = [*required, *optional]
        values: dict[str, Value] = {}
        for key, value in self.items():
            if not isinstance(key, str) or key not in known:
                value.fail(f"unknown key {key!r}; wanted one of {', '.join(known)}")
            values[key] = value
        for key in required:
            if key not in values:
                self.fail(f"key {key!r} is missing; wanted {', '.join(required)}{advice and '; '}{advice}")
        return values

    def list(self) -> list[Value]:
        """The entries of a list that is not empty."""
        if not isinstance(self.node, yaml.SequenceNode):
            self.fail(f"wanted a list, found {self.found()}")
        if not self.node.value:
            self.fail("wanted at least one entry, found an empty list")
        return [Value(node, self.file, f"{self.field}[{i}]") for i, node in enumerate(self.node.value)]


def _construct(node: yaml.ScalarNode, at: Value) -> object:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        reason = getattr(error, "problem", None) or str(error)
        at.fail(f"cannot be read: {reason}")
    except Exception:
        # PyYAML lets its readers stumble over a text that its tag does not fit: !!int '', !!bool x.
        at.fail(f"cannot be read: {node.value!r} is no {node.tag.rpartition(':')[2]}")
    finally:
        loader.dispose()


def read(path: Path) -> str:
    """The text of a file of settings. RequestError where it cannot be read, or is not one by its looks."""
    wanted = f"{path}: wanted a text file of at most {MAX_BYTES} bytes, found"
    try:
        # Opened so that a pipe does not wait; and a device or a huge file is never read to its end.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise RequestError(f"{wanted} a folder, device or pipe")
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise RequestError(f"{wanted} more")
        return data.decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise RequestError(f"{path}: cannot be read: {reason}") from None


def parse(text: str, file: str) -> Value:
    """The root value of a YAML text. RequestError with file and line if it is not YAML or is empty."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise RequestError(f"{file}:{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise RequestError(f"{file}:1: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise RequestError(f"{file}:1: not valid YAML: nested too deeply") from None
    if node is None:
        raise RequestError(f"{file}:1: document: wanted a mapping, found an empty file")
    return Value(node, file, "")
