"""The command line, `cortexmlx`. Its commands are listed in `app.py`.

Nothing here imports mlx until a model is needed, so that `--help` answers at once.
"""

from __future__ import annotations


def main() -> None:
    """Run the `cortexmlx` command."""
    from cortexmlx.cli.start import run

    raise SystemExit(run())
