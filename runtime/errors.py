"""What the runtime raises for anything but a wrong argument (that is a TypeError or a ValueError)."""

from __future__ import annotations


class KvbuildError(Exception):
    """Base of every error kvbuild names itself."""


class BundleError(KvbuildError):
    """The bundle cannot be trusted or read: damaged, foreign, unsigned, of another schema, or not there."""


class NoMatchingArtifact(KvbuildError):
    """No target of the bundle serves this host and device; the text lists each one and why not."""


class DeviceError(KvbuildError):
    """The device's driver refused, or the device is not there; carries the driver's own words."""
