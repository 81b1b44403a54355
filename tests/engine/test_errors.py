"""Every error that a program can meet."""

from __future__ import annotations

import cortexmlx
from cortexmlx import errors


def test_every_error_a_program_can_meet_is_public() -> None:
    raised = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert raised <= set(cortexmlx.__all__)
