"""Stored responses: kept in memory within bounds, for each client apart; and the paths that read and delete them."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.openai.errors import NotStored
from cortexmlx.protocols.request import Body, Request
from cortexmlx.protocols.responses import URL
from cortexmlx.protocols.responses.reader import details_of
from cortexmlx.server.http import CLIENT, dumped, json_reply

OVERHEAD = 1024
"""Bytes that count for a response besides its texts: for the objects that hold them."""

_ITEM = re.compile(r"[a-z]+_([0-9a-f]{32})(?:_[a-z0-9]+)?")
"""The id of an item. It names its response."""


@dataclass(eq=False)
class StoredTurn:
    """What one response added to its conversation, as JSON. All responses after it share it."""

    items: tuple[bytes, ...]
    """What the client sent."""
    output: tuple[bytes, ...]
    """What the model wrote."""
    before: StoredTurn | None
    size: int
    """Bytes."""
    holders: int = 0
    """The kept response that ended here, and held turns that came after it. A turn counts while it has holders."""

    def chain(self) -> list[StoredTurn]:
        """Return all turns up to this one."""
        turns: list[StoredTurn] = []
        turn: StoredTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        return turns[::-1]


@dataclass(frozen=True)
class StoredResponse:
    """A response that is kept."""

    turn: StoredTurn
    rest: bytes
    """The body without its output."""

    @property
    def body(self) -> Body:
        """The response as it was answered."""
        body: Body = json.loads(self.rest)
        return {**body, "output": _parse_items(self.turn.output)}

    def items(self) -> list[Body]:
        """Return what the model was given and wrote, up to the end of this response, without instructions."""
        return [*self.input_items(), *_parse_items(self.turn.output)]

    def input_items(self) -> list[Body]:
        """Return what the model was given for this response, without instructions."""
        *earlier, last = self.turn.chain()
        return [
            *(item for turn in earlier for item in _parse_items(turn.items + turn.output)),
            *_parse_items(last.items),
        ]


def _parse_items(items: Sequence[bytes]) -> list[Body]:
    return [json.loads(item) for item in items]


class ClientResponses:
    """The responses of one client. Which was asked for least recently goes first."""

    def __init__(self, most_bytes: int, most: int) -> None:
        self._most_bytes = most_bytes
        self._most = most
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self.size = 0
        """Bytes of all kept responses, and of the turns before them."""

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[str]:
        """The ids, in the order in which they would go."""
        return iter(self._kept)

    def response(self, id: str) -> StoredResponse | None:
        """Return a kept response, or None. It is the last to go then."""
        if id in self._kept:
            self._kept.move_to_end(id)
        return self._kept.get(id)

    def item(self, id: str) -> Body | None:
        """Return an item that the client sent or the model wrote, or None."""
        named = _ITEM.fullmatch(id)
        kept = self._kept.get(f"resp_{named[1]}") if named else None
        if kept is None:
            return None
        both = _parse_items(kept.turn.output + kept.turn.items)
        return next((item for item in both if item.get("id") == id), None)

    def keep(self, request: Request, body: Body) -> None:
        """Keep a response that has ended, if its request wants that."""
        details = details_of(request)
        if not details.store or self._most < 1:
            return
        number = body["id"].removeprefix("resp_")
        items = tuple(dumped({"id": f"in_{number}_{place}", **item}) for place, item in enumerate(details.items))
        output = tuple(dumped(item) for item in body["output"])
        rest = dumped({name: part for name, part in body.items() if name != "output"})
        before = details.previous.turn if isinstance(details.previous, StoredResponse) else None
        turn = StoredTurn(items, output, before, OVERHEAD + sum(map(len, items + output)))
        self.delete(body["id"])
        self._kept[body["id"]] = StoredResponse(turn, rest)
        self.size += len(rest)
        self._hold(turn)
        while self._kept and (self.size > self._most_bytes or len(self._kept) > self._most):
            self.delete(next(iter(self._kept)))

    def delete(self, id: str) -> bool:
        """Forget a response; return whether there was one. Responses that continue it keep its items."""
        kept = self._kept.pop(id, None)
        if kept is None:
            return False
        self.size -= len(kept.rest)
        self._let_go(kept.turn)
        return True

    def _hold(self, turn: StoredTurn | None) -> None:
        while turn is not None:
            turn.holders += 1
            if turn.holders > 1:
                return
            self.size += turn.size
            turn = turn.before

    def _let_go(self, turn: StoredTurn | None) -> None:
        while turn is not None:
            turn.holders -= 1
            if turn.holders:
                return
            self.size -= turn.size
            turn = turn.before


class StoredResponses:
    """The responses of all clients. Each client has an equal share of the bounds, so that none makes another's go."""

    def __init__(self, most_bytes: int, most: int, clients: int) -> None:
        self._share = (most_bytes // max(1, clients), most // max(1, clients))
        self._clients: dict[str | None, ClientResponses] = {}

    def of(self, client: Any) -> ClientResponses:
        """Return the responses of a client."""
        if client not in self._clients:
            self._clients[client] = ClientResponses(*self._share)
        return self._clients[client]


ONE = f"{URL}/{{id}}"
"""The path of a stored response."""
INPUT_ITEMS = f"{ONE}/input_items"

MOST_LISTED = 100
"""Items of one page."""


class ResponseEndpoints:
    """Answers what is asked of stored responses. A client finds its own only."""

    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored

    async def read_or_delete(self, request: HttpRequest) -> Response:
        """Answer with a response, or forget it (DELETE)."""
        if request.method == "DELETE":
            id = request.path_params["id"]
            if not self._stored.of(request.scope.get(CLIENT)).delete(id):
                raise NotStored(id)
            return json_reply({"id": id, "object": "response", "deleted": True})
        if request.query_params.get("stream", "false") != "false":
            raise InvalidRequest("a stored response is not streamed again: ask without `stream`", field="stream")
        return json_reply(self._find(request).body)

    async def input_items(self, request: HttpRequest) -> Response:
        """Answer with a page of the items that the model was given."""
        items = self._find(request).input_items()
        asked = request.query_params
        order, limit, after = asked.get("order", "desc"), asked.get("limit", "20"), asked.get("after")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order is {order!r:.80}, but must be asc or desc", field="order")
        if not limit.isascii() or not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= MOST_LISTED:
            raise InvalidRequest(f"limit is {limit!r:.80}, but must be 1 to {MOST_LISTED}", field="limit")
        if order == "desc":
            items.reverse()
        if after is not None:
            places = [place for place, item in enumerate(items) if item["id"] == after]
            if not places:
                raise InvalidRequest(f"there is no item {after!r:.80} in this response", field="after")
            items = items[places[0] + 1 :]
        page = items[: int(limit)]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return json_reply({"object": "list", "data": page, **ends, "has_more": len(items) > len(page)})

    def _find(self, request: HttpRequest) -> StoredResponse:
        id = request.path_params["id"]
        kept = self._stored.of(request.scope.get(CLIENT)).response(id)
        if kept is None:
            raise NotStored(id)
        return kept
