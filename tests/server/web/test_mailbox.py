"""Events for many streams wake the loop once, and none is lost."""

from __future__ import annotations

import asyncio
import threading

from cortexmlx.server.generation import Mailbox
from cortexmlx.types.request import TokenEvent


def test_events_that_come_together_wake_the_loop_once() -> None:
    async def read() -> None:
        mailbox, got = Mailbox(asyncio.get_running_loop()), list[str]()

        def put() -> None:
            for number in range(1000):
                mailbox.put(lambda event: got.append(event.text), TokenEvent(str(number)))

        thread = threading.Thread(target=put)
        thread.start()
        thread.join()  # the loop is busy meanwhile
        await asyncio.sleep(0)
        assert got == list(map(str, range(1000))) and mailbox.wakeups == 1

    asyncio.run(read())


def test_no_event_is_left_behind_while_the_loop_reads() -> None:
    async def read() -> None:
        mailbox, got, done = Mailbox(asyncio.get_running_loop()), list[int](), asyncio.Event()

        def take(event: TokenEvent) -> None:
            got.append(int(event.text))
            if len(got) == 20_000:
                done.set()

        def put(first: int) -> None:
            for number in range(first, 20_000, 2):
                mailbox.put(take, TokenEvent(str(number)))

        threads = [threading.Thread(target=put, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        await done.wait()
        assert sorted(got) == list(range(20_000))
        assert [n for n in got if n % 2] == list(range(1, 20_000, 2)), "each stream's events come in order"

    asyncio.run(read())


def test_a_closed_loop_is_told_nothing() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    loop.close()
    mailbox.put(lambda event: None, TokenEvent("a"))
