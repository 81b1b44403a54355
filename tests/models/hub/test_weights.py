"""Large files of the hub: they arrive as they are, go on where they stopped, and every fault says what to do."""

from __future__ import annotations

import errno
import fcntl
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

from cortexmlx.errors import DownloadFailed
from cortexmlx.models import hub as weights
from cortexmlx.models.hub import fetch_repo
from cortexmlx.types.progress import Progress
from support.models.hub import Hub
from support.patience import PATIENCE, soon

BIG, SMALL = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


class Enough(Exception):
    """Raised by somebody who wants no more of it."""


def same(folder: Path, hub: Hub) -> bool:
    """Whether all files arrived as the hub has them, and nothing is left of the way."""
    published = hub.repos["org/tiny"]
    left = list(folder.parents[1].glob("blobs/*.incomplete"))
    return not left and all((folder / f.name).read_bytes() == f.read_bytes() for f in published.iterdir())


def fetch_until(hub: Hub, done: int) -> None:
    """A download that is stopped when so many bytes are there, and ends soon: it gets a few bytes more."""

    def told(news: Progress) -> None:
        if news.done >= done:
            raise Enough

    hub.most = hub.sent + 2 * done
    with pytest.raises(Enough):
        fetch_repo("org/tiny", told)
    hub.most = None
    assert soon(lambda: all(thread.name != "cortexmlx-download" for thread in threading.enumerate())), "it goes on"


def test_a_stopped_download_ends_at_once_and_goes_on_where_it_was(hub: Hub, empty_cache: Path) -> None:
    hub.bytes_per_second = 4e5
    fetch_until(hub, 100_000)
    kept = {path: path.stat().st_size for path in empty_cache.glob("*/blobs/*.incomplete")}
    assert len(kept) == 2 and 100_000 <= sum(kept.values()) < 600_000
    hub.bytes_per_second, seen = 0.0, list[Progress]()
    hub.asked.clear()
    assert same(fetch_repo("org/tiny", seen.append), hub)
    assert {(name, ask) for method, name, ask in hub.asked if method == "GET"} >= {
        (name, f"bytes={size}-") for name, size in zip((BIG, SMALL), sorted(kept.values()), strict=True)
    } or {ask for _, _, ask in hub.asked if ask} == {f"bytes={size}-" for size in kept.values()}
    assert (seen[-1].done, seen[-1].cached) == (seen[-1].total, sum(kept.values()))
    hub.asked.clear()
    fetch_repo("org/tiny")
    assert not hub.asked, "what is complete is not asked for"


def test_the_host_that_the_hub_sends_to_gets_the_range_and_not_the_token(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.elsewhere = True
    hub.bytes_per_second = 4e5
    fetch_until(hub, 100_000)
    hub.bytes_per_second = 0.0
    hub.asked.clear()
    assert same(fetch_repo("org/tiny"), hub)
    parts = [ask for method, _, ask in hub.asked if method == "GET"]
    assert len(parts) == 2 and "bytes=0-" not in parts
    assert len(hub.tokens) == 4 and {*hub.tokens} == {None}


@pytest.mark.parametrize("ranges", [True, False])
def test_broken_connections_are_made_again_from_where_they_broke(hub: Hub, ranges: bool) -> None:
    """Also where the hub sends all of a file again."""
    hub.ranges = ranges
    hub.break_after = [100_000, 100_000, 0, 200_000]
    assert same(fetch_repo("org/tiny"), hub)


def test_a_connection_that_breaks_at_the_same_byte_again_and_again_is_given_up(hub: Hub) -> None:
    hub.break_after = [50_000, 50_000] + [0] * 20
    with pytest.raises(DownloadFailed, match=r"stopped at 4\d\.\d KiB of .* try again to go on there") as caught:
        fetch_repo("org/tiny")
    assert "\n" not in str(caught.value)
    hub.break_after.clear()
    hub.asked.clear()
    assert same(fetch_repo("org/tiny"), hub)
    assert ("GET", BIG, "bytes=50000-") in hub.asked or ("GET", SMALL, "bytes=50000-") in hub.asked


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_hub_is_asked_again(hub: Hub, status: int) -> None:
    hub.refuse[f"/resolve/{'1' * 40}/model-0"] = [status, status, 200]
    hub.headers["Retry-After"] = "0"
    assert same(fetch_repo("org/tiny"), hub)


@pytest.mark.parametrize("stated", ["²", "9" * 5000, "-1", "1e3"])
def test_a_header_that_is_no_number_says_nothing(stated: str) -> None:
    """`str.isdigit` takes the first two, and `int` neither."""
    response = SimpleNamespace(headers={"Retry-After": stated, "Content-Length": stated})
    assert weights._retry_after(cast(Any, SimpleNamespace(response=response))) == 0
    assert weights._stated_file_size(response.headers, is_full_response=True) is None


def test_other_bytes_than_the_hub_promised_are_not_kept(hub: Hub, empty_cache: Path) -> None:
    published = (hub.repos["org/tiny"] / BIG).read_bytes()
    hub.wrong[BIG] = published[:-1] + b"?"
    with pytest.raises(DownloadFailed, match=f"{BIG} of org/tiny came damaged.*It is not kept"):
        fetch_repo("org/tiny")
    hub.wrong[BIG] = published + b"more"
    with pytest.raises(DownloadFailed, match=r"sends 600,\d\d\d bytes .* which has 600,\d\d\d"):
        fetch_repo("org/tiny")
    hub.wrong.clear()
    assert same(fetch_repo("org/tiny"), hub)


class Usage(NamedTuple):
    """Of a disk."""

    total: int
    used: int
    free: int


def test_a_disk_without_room_is_said_before_anything_comes(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(2**30, 2**30, 700_000))
    with pytest.raises(DownloadFailed, match=r"takes 879 KiB more, and 684 KiB are free in .*HF_HOME"):
        fetch_repo("org/tiny")
    assert hub.sent == 0


def test_a_disk_that_fills_up_keeps_what_came(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    real, room = weights.WeightsDownload._stream_bytes, threading.Event()

    def full(self: Any, file: Any, begin: int) -> Any:
        for data in real(self, file, begin):
            yield data
            if not room.is_set():
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights.WeightsDownload, "_stream_bytes", full)
    with pytest.raises(DownloadFailed, match=r"the disk is too full .* What has come stays there"):
        fetch_repo("org/tiny")
    room.set()
    hub.asked.clear()
    assert same(fetch_repo("org/tiny"), hub)
    assert any(ask not in ("", "bytes=0-") for _, _, ask in hub.asked)


def test_what_another_process_brings_is_waited_for(hub: Hub, empty_cache: Path) -> None:
    hub.bytes_per_second = 4e5
    fetch_until(hub, 100_000)
    (large,) = [path for path in empty_cache.glob("*/blobs/*.incomplete") if path.stat().st_size][:1]
    other = large.open("ab")
    fcntl.flock(other, fcntl.LOCK_EX)
    hub.bytes_per_second, folders = 0.0, list[Path]()
    waiting = threading.Thread(target=lambda: folders.append(fetch_repo("org/tiny")))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    other.close()
    waiting.join(PATIENCE)
    assert same(folders[0], hub)
