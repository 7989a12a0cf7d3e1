"""What can go wrong in the builder, and the exit code each kind means on the command line."""

from __future__ import annotations


class BuilderError(Exception):
    """Base of the builder's errors. Its text is one or more sentences for people; no traceback is owed."""

    exit_code = 1


class BuildError(BuilderError):
    """Something that was asked for correctly could not be built, read or written."""

    exit_code = 1


class RequestError(BuilderError):
    """The request was wrong: an unknown name, a bad build.yaml, a path that cannot be used."""

    exit_code = 2


class ToolchainError(BuilderError):
    """A toolchain is missing or is not the one named; the text says which and how to get it."""

    exit_code = 3
