"""Whether the system gives memory: asked under a limit of the process's own, and nothing is kept by asking."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cortexmlx.machine import obtainable

PROGRAM = """
import json, resource, sys
from cortexmlx.machine import obtainable

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)
sizes = [1 << 20, 150 << 20, 250 << 20, 4 << 30]
answers = [obtainable(size) for size in sizes]
again = [obtainable(150 << 20) for _ in range(20)]
print(json.dumps([answers, again, "mlx.core" in sys.modules]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is not enforced there")
def test_a_limit_of_the_process_is_the_answer_and_asking_takes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    answers, again, mlx = json.loads(done.stdout)
    assert answers == [True, True, False, False]
    assert again == [True] * 20, "twenty times what is there, one after the other"
    assert not mlx


def test_more_than_an_address_space_is_no_and_nothing_is_yes() -> None:
    assert [obtainable(size) for size in (0, 1, 1 << 62, 1 << 70)] == [True, True, False, False]
