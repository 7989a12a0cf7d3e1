"""What the commands share: printing for people and for programs, path checks, exit codes of errors."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from ..errors import BuilderError, RequestError, ToolchainError

DEFAULT_BUNDLE = Path("artifacts") / "kvcompress.kvb"

EXIT_DONE, EXIT_FAILED, EXIT_REQUEST, EXIT_TOOLCHAIN = 0, 1, 2, 3


def combine(codes: Iterable[int]) -> int:
    """One exit code for several: 2 before 3 before 1 before 0."""
    seen = set(codes)
    for code in (EXIT_REQUEST, EXIT_TOOLCHAIN, EXIT_FAILED):
        if code in seen:
            return code
    return EXIT_DONE


def is_known(error: BaseException) -> bool:
    """True for errors whose text was written for people."""
    from ...runtime.errors import KvbuildError

    return isinstance(error, click.ClickException | OSError | BuilderError | KvbuildError)


def exit_code(error: BaseException) -> int:
    """The exit code of an error: its own `exit_code`, 2 for wrong usage and paths, else 1."""
    if isinstance(error, click.UsageError | click.FileError):
        return EXIT_REQUEST
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return code
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError):
        return EXIT_REQUEST
    return EXIT_FAILED


def message_of(error: BaseException) -> str:
    """The text of a known error; an OSError says which path."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'output'}: {error.strerror}"
    return str(error)


def emit_json(value: object) -> None:
    """One JSON document on stdout; in ASCII, so that no locale and no odd file name can spoil it."""
    click.echo(json.dumps(value, indent=2, sort_keys=False, ensure_ascii=True))


def plain(text: str) -> str:
    """The text with what would steer a terminal written out: it may quote files and programs."""
    return "".join(c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in text)


def paint(text: str, colour: str) -> str:
    """The text in a colour; plain where NO_COLOR is set (click drops it where stdout is no terminal)."""
    return text if os.environ.get("NO_COLOR") else click.style(text, fg=colour)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()) -> str:
    """A plain table: columns aligned, two spaces between; columns named in `right` are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(head), *cells]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, head, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([line(head), *(line(row) for row in cells)])


def size_text(size: int) -> str:
    """Bytes for people: 1,234 B, 56.7 KiB, 1.2 MiB."""
    if size < 10_000:
        return f"{size:,} B"
    if size < 1 << 20:
        return f"{size / 1024:.1f} KiB"
    return f"{size / (1 << 20):.1f} MiB"


def existing_file(path: str | Path, what: str, advice: str, pipes: bool = False) -> Path:
    """The path, if a regular file is there that can be opened for reading; else RequestError.

    pipes: a pipe will do as well, such as a shell makes for `<(command)`; it is not opened here.
    """
    found = Path(path)
    wanted = f"{what}: wanted a readable file, found"
    try:
        mode = found.stat().st_mode
        if pipes and stat.S_ISFIFO(mode):
            return found
        if not stat.S_ISREG(mode):
            # Opening a pipe may wait for ever, and reading a device may never end.
            kind = "a folder" if stat.S_ISDIR(mode) else "a device, socket or pipe"
            raise RequestError(f"{wanted} {kind} at {found}; {advice}")
        with open(found, "rb"):
            return found
    except FileNotFoundError:
        raise RequestError(f"{wanted} nothing at {found}; {advice}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"{wanted} that {found} cannot be read ({reason}); {advice}") from None


def existing_bundle(path: str | Path) -> Path:
    """A bundle file named on the command line."""
    return existing_file(path, "bundle", "name a .kvb file, or build one with `kvbuild compile`")


def writable_file(path: str | Path, option: str = "-o") -> Path:
    """The path, if a file can be put there by writing beside it and renaming; else RequestError."""
    target = Path(path)
    if str(path).endswith(os.sep) and not target.is_dir():
        raise RequestError(f"{option} {path}: wanted a file's name, found a folder's; name a file")
    if target == DEFAULT_BUNDLE and not target.parent.exists():
        _make_folder(target.parent, option)
    wanted = f"{option} {target}: wanted a place for a file, found"
    try:
        if target.exists() and not target.is_file():
            kind = "a folder" if target.is_dir() else "a device, socket or pipe"
            raise RequestError(f"{wanted} {kind} there; name a file")
        if not target.parent.is_dir():
            raise RequestError(f"{wanted} no folder {target.parent}; make it, or name another place")
        handle, name = tempfile.mkstemp(prefix=".kvbuild-", dir=target.parent)
        os.close(handle)
        os.unlink(name)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        advice = "name another place"
        found = f"{wanted} that no file can be made in {target.parent} ({reason})"
        raise RequestError(f"{found}; {advice}") from None
    return target


def _make_folder(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"{option}: wanted to make the folder {folder}, found that it cannot be made ({error.strerror}); "
            "name another place with -o"
        ) from None


def device_name(text: str | None) -> None:
    """RequestError where --device is no name of a device; whether there is such a device is not asked."""
    from ...runtime.device import parse_device

    if text is None:
        return
    try:
        parse_device(text)
    except ValueError:
        raise RequestError(
            f"--device: wanted cpu, cuda, cuda:1, npu:0 or another device as torch names it, found {text!r}"
        ) from None


def require(module: str, purpose: str, pip: str) -> None:
    """ToolchainError with the pip line, where a package is not installed."""
    import importlib.util

    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise ToolchainError(
            f"{purpose} needs the Python package {module!r}, which is not installed here; get it with: {pip}"
        )


def json_option(function: click.decorators.FC) -> click.decorators.FC:
    """The --json flag of every command."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout instead of text.")(
        function
    )
