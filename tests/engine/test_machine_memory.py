"""Whether the system gives memory: asked under a limit of the process's own, and nothing is kept by asking."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cortexmlx.errors import KVCacheFull, MemoryRefused
from cortexmlx.system.machine import can_allocate, is_memory_refusal

PROGRAM = """
import json, resource, sys
from cortexmlx.system.machine import can_allocate

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)
sizes = [1 << 20, 150 << 20, 250 << 20, 4 << 30]
answers = [can_allocate(size) for size in sizes]
again = [can_allocate(150 << 20) for _ in range(20)]
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
    assert [can_allocate(size) for size in (0, 1, 1 << 62, 1 << 70)] == [True, True, False, False]


REFUSALS = (
    RuntimeError("[malloc] Unable to allocate 1048576 bytes."),
    RuntimeError("[metal::malloc] Resource limit (499000) exceeded."),
    RuntimeError(
        "[metal::malloc] Attempting to allocate 40000000000 bytes which is greater than the maximum allowed buffer "
        "size of 30000000000 bytes."
    ),
    RuntimeError(
        "[METAL] Command buffer execution failed: Insufficient Memory "
        "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
    ),
    MemoryError(),
    MemoryRefused("the system refuses 4 KiB for the KV cache"),
)
OTHERS = (
    RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error"),
    RuntimeError("[matmul] Last dimension of first input with shape (1,2) must match"),
    ValueError("unable to allocate"),
    KVCacheFull("the KV cache is full"),
    KeyboardInterrupt(),
)


@pytest.mark.parametrize("error", REFUSALS)
def test_a_refusal_is_known_by_its_kind_or_by_the_words_of_mlx(error: BaseException) -> None:
    assert is_memory_refusal(error)


@pytest.mark.parametrize("error", OTHERS)
def test_other_errors_are_no_refusals(error: BaseException) -> None:
    assert not is_memory_refusal(error)
