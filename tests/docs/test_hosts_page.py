"""The page on several hosts: its host file is one."""

from __future__ import annotations

from pathlib import Path

from cortexmlx.distributed.spec import Hosts
from support.pages import blocks


def test_the_host_file_of_the_page_is_one(tmp_path: Path) -> None:
    (block,) = (block for block in blocks("json") if block.page == "docs/hosts.md")
    file = tmp_path / "hosts.json"
    file.write_text(block.text)
    hosts = Hosts.parse(str(file))
    assert hosts.names == ("studio-1", "studio-2") and hosts.backend == "ring"
