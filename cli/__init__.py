"""The command line: `cortexmlx chat | generate | batch | eval | plan | cache | models | doctor | bench`.

Nothing here imports mlx until a model is needed, so that `--help` answers at once.
"""

from __future__ import annotations


def main() -> None:
    """The `cortexmlx` command."""
    from cortexmlx.cli.start import run

    raise SystemExit(run())
