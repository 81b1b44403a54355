"""What a worker is told."""

from __future__ import annotations

import io

import pytest

from cortexmlx.distributed.launch.assignment import WorkerAssignment, read_key, read_rank, restore_temporary_folder
from cortexmlx.errors import HostRefused

TASK = WorkerAssignment((("127.0.0.1", 4000), ("fe00::1", 4001)), 3, 2, "ring", 90.0)


def test_an_assignment_is_read_as_it_was_written() -> None:
    name, _, value = TASK.environment_entry().partition("=")
    assert WorkerAssignment.from_environment({name: value}) == TASK


@pytest.mark.parametrize("value", [None, "", "7", "[]", "{}", '{"addresses": [["a"]]}', '{"addresses": [], "more": 1}'])
def test_what_is_no_assignment_is_refused(value: str | None) -> None:
    with pytest.raises(HostRefused, match="workers are started by cortexmlx, with --hosts"):
        WorkerAssignment.from_environment({} if value is None else {"CORTEXMLX_WORKER": value})


def test_the_rank_is_the_launchers() -> None:
    assert read_rank({"MLX_RANK": "3"}) == 3 and read_rank({"OMPI_COMM_WORLD_RANK": "1"}) == 1
    for environment in ({}, {"MLX_RANK": "-1"}, {"MLX_RANK": "x"}):
        with pytest.raises(HostRefused, match="none of MLX_RANK"):
            read_rank(environment)


def test_the_temporary_folder_is_the_users_again() -> None:
    kept = "CORTEXMLX_WORKER_TMPDIR"
    for told, left in (({}, {"TMPDIR": "/group"}), ({kept: ""}, {}), ({kept: "/theirs"}, {"TMPDIR": "/theirs"})):
        environment = {"TMPDIR": "/group", **told}
        restore_temporary_folder(environment)
        assert environment == left


def test_the_key_is_taken_out_of_the_environment_or_is_the_first_line() -> None:
    one, other = "0f" * 32, "beef" * 16
    environment = {"CORTEXMLX_WORKER_KEY": one}
    assert read_key(environment, io.StringIO(f"{other}\n")) == b"\x0f" * 32 and environment == {}
    assert read_key(environment, io.StringIO(f"{other}\r\nmore")) == b"\xbe\xef" * 16


@pytest.mark.parametrize("text", ["", "\n", "no key\n", "ff\n", "f" * 1_000_000])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(HostRefused, match="needs its group's key"):
        read_key({}, io.StringIO(text))
