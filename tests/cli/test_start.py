"""How a command starts: the environment for mlx, and the log."""

from __future__ import annotations

import os
import subprocess
import sys

from cortexmlx.cli import start


def test_mlx_environment_is_set_by_the_command_line_only_and_gives_way_to_the_user() -> None:
    code = "import os; {}; print(os.environ.get('MLX_MAX_MB_PER_BUFFER'))"
    clean = {k: v for k, v in os.environ.items() if k != "MLX_MAX_MB_PER_BUFFER"}

    def value(action: str, environment: dict[str, str]) -> str:
        command = [sys.executable, "-c", code.format(action)]
        return subprocess.check_output(command, env=environment, text=True).splitlines()[-1]

    library = "import cortexmlx.engine"
    command = "from cortexmlx.cli.start import run; run(['--version'])"
    assert value(library, clean) == "None"
    assert value(command, clean) == start.MLX_ENVIRONMENT["MLX_MAX_MB_PER_BUFFER"]
    assert value(command, {**clean, "MLX_MAX_MB_PER_BUFFER": "7"}) == "7"
