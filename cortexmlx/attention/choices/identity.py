"""The identity of times: the machine, the versions and the texts for which they are true."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from importlib.metadata import version
from importlib.resources import files

import mlx.core as mx

from cortexmlx.system.machine import metal_device
from cortexmlx.timed_choice.table import Identity


def identity_here() -> Identity:
    """Return the identity of times that are taken now."""
    if mx.default_device() == mx.cpu:
        device = f"CPU, {platform.machine()}, {os.cpu_count()} cores"
    else:
        device = metal_device() or "GPU"
    system = platform.mac_ver()[0] if sys.platform == "darwin" else platform.release()
    return Identity(device, system, version("mlx"), kernel_digest(), version("cortexmlx"))


def kernel_digest() -> str:
    """Return a digest of the kernels' texts, and of the modules that say how they are called."""
    digest = hashlib.sha256()
    room = files("cortexmlx.metal")
    for folder, suffixes in ((room, (".py",)), (room / "products", (".py",)), (room / "shaders", (".metal", ".h"))):
        for file in sorted(folder.iterdir(), key=lambda file: file.name):
            if file.name.endswith(suffixes):
                digest.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
