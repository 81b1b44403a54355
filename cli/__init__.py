"""The command line: `cortexmlx chat | generate | batch | bench | plan | cache | models | doctor`.

Nothing here imports mlx until a model is really needed, so that `--help` answers at once.
"""

from __future__ import annotations


def main() -> None:
    """The `cortexmlx` command."""
    from cortexmlx.cli.start import run

    raise SystemExit(run())
