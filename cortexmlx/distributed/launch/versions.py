"""What must be equal on every host: the versions that the workers and the controller run. Without mlx."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("cortexmlx", "mlx", "mlx-lm")


def versions() -> dict[str, str]:
    """Return the version of each package whose numbers or messages must agree; "none" for one that is not installed."""
    return {package: _version(package) for package in _PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
