"""What every command has in common: finds the command's file, runs it, turns what went wrong into words and
a code.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

import click

from . import output

# Name -> module. Loaded on use, so that a command costs only what it imports itself.
COMMANDS = (
    "compile",
    "merge",
    "list",
    "inspect",
    "verify",
    "explain",
    "check",
    "tune",
    "bench",
    "doctor",
    "toolchain",
    "finish",
)

# What click raises for a bare `kvbuild` from 8.2 on; before, it prints the help by itself.
_NO_ARGUMENTS: tuple[type[click.UsageError], ...] = tuple(
    error for error in (getattr(click.exceptions, "NoArgsIsHelpError", None),) if error is not None
)


class CommandGroup(click.Group):
    """Loads each command from the module of the same name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__package__}.{cmd_name}")
        command: click.Command = module.command
        command.short_help = command.help  # the whole sentence: click would cut it in the list of commands
        return command


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvbuild")
    except PackageNotFoundError:
        return "unknown (not installed)"


def _print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"kvbuild {_version()}")
        ctx.exit(0)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
              help="Print the version and stop.")  # fmt: skip
def cli() -> None:
    """Builds the KV-cache compressor ahead of time, and runs what was built.

    Exit codes: 0 done, 1 something failed, 2 the request was wrong, 3 a toolchain is missing.
    """


def _usage_message(error: click.ClickException) -> str:
    message = error.format_message()
    ctx = getattr(error, "ctx", None)
    return f"{message} (see `{ctx.command_path} --help`)" if ctx is not None else message


def _report(error: BaseException, as_json: bool) -> int:
    """Says what went wrong, without a traceback, and gives the exit code."""
    code = output.exit_code(error)
    kind = type(error).__name__
    if isinstance(error, click.ClickException):
        message = _usage_message(error)
    elif output.is_known(error):
        message = output.message_of(error)
    else:
        message = f"internal error: {kind}: {error}. Set KVBUILD_DEBUG=1 to see the traceback"
    _say(kind, message, code, as_json)
    if os.environ.get("KVBUILD_DEBUG") and not isinstance(error, click.ClickException):
        traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)
    return code


def _say(kind: str, message: str, code: int, as_json: bool) -> None:
    # stdout may be full or closed, and then stderr too; there is nobody left to tell.
    with contextlib.suppress(OSError):
        if as_json:
            try:
                output.emit_json({"error": {"kind": kind, "message": message, "exit_code": code}})
                return
            except OSError:
                pass
        click.echo(f"kvbuild: {output.plain(message)}", err=True)


def _never_fail_to_print() -> None:
    """Names from outside (files, archives) may hold what the locale cannot write: it is shown escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. An interrupt passes, as KeyboardInterrupt."""
    as_json = "--json" in arguments
    _never_fail_to_print()
    if os.environ.get("NO_COLOR"):
        os.environ.pop("FORCE_COLOR", None)
    try:
        result = cli.main(args=list(arguments), prog_name="kvbuild", standalone_mode=False)
    except click.Abort:
        raise KeyboardInterrupt from None
    except _NO_ARGUMENTS as error:
        click.echo(error.format_message(), err=True)
        return output.EXIT_REQUEST
    except Exception as error:
        return _report(error, as_json)
    return result if isinstance(result, int) else 0
