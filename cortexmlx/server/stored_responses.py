"""Stored responses of `/v1/responses`: kept in memory within limits for each client, with the endpoints to read and
delete them.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cortexmlx.core.blocking_calls import run_on_thread
from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.openai.errors import ResponseNotFound
from cortexmlx.protocols.request import Body, Request
from cortexmlx.protocols.responses import URL
from cortexmlx.protocols.responses.reader import response_details
from cortexmlx.server.http import SCOPE_CLIENT, json_reply, to_json_bytes

RESPONSE_OVERHEAD = 1024
"""Bytes that count for a response besides its texts: for the objects that hold them."""

_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})(?:_[a-z0-9]+)?")
"""The id of an item. It names its response."""


@dataclass(eq=False)
class StoredTurn:
    """The input and output items that one response added to its conversation, as JSON; later responses share it."""

    items: tuple[bytes, ...]
    """What the client sent."""
    output: tuple[bytes, ...]
    """What the model wrote."""
    previous: StoredTurn | None
    size: int
    """Bytes."""
    references: int = 0
    """The kept response that ended here, and held turns that came after it. A turn counts while it has holders."""

    def conversation(self) -> list[StoredTurn]:
        """Return all turns of the conversation up to this one."""
        turns: list[StoredTurn] = []
        turn: StoredTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return turns[::-1]


@dataclass(frozen=True)
class StoredResponse:
    """A stored response: its turn, which has the items, and the other fields of its body."""

    turn: StoredTurn
    rest: bytes
    """The body without its output."""

    @property
    def body(self) -> Body:
        """The JSON body of the response, as it was sent."""
        body: Body = json.loads(self.rest)
        return {**body, "output": _parse_items(self.turn.output)}

    def items(self) -> list[Body]:
        """Return the conversation's input and output items up to the end of this response, without instructions."""
        return [*self.input_items(), *_parse_items(self.turn.output)]

    def input_items(self) -> list[Body]:
        """Return the items that the model was given for this response, without instructions."""
        *earlier_turns, last_turn = self.turn.conversation()
        return [
            *(item for turn in earlier_turns for item in _parse_items(turn.items + turn.output)),
            *_parse_items(last_turn.items),
        ]


def _parse_items(items: Sequence[bytes]) -> list[Body]:
    """Parse items that are stored as JSON bytes."""
    return [json.loads(item) for item in items]


class ClientResponses:
    """One client's stored responses, within limits: the least recently used ones are removed. For any thread."""

    def __init__(self, max_bytes: int, max_count: int) -> None:
        self._max_bytes = max_bytes
        self._max_count = max_count
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._lock = threading.RLock()
        self.size = 0
        """Bytes of all kept responses, and of the turns before them."""

    def __len__(self) -> int:
        return len(self._responses)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the responses' ids, the least recently used first."""
        return iter(self._responses)

    def find_response(self, id: str) -> StoredResponse | None:
        """Return a stored response, or None, and mark it as the most recently used."""
        with self._lock:
            if id in self._responses:
                self._responses.move_to_end(id)
            return self._responses.get(id)

    def find_item(self, id: str) -> Body | None:
        """Return an item that the client sent or the model wrote, or None."""
        id_match = _ITEM_ID.fullmatch(id)
        response = self._responses.get(f"resp_{id_match[1]}") if id_match else None
        if response is None:
            return None
        stored_items = response.turn.output + response.turn.items
        named_items = _parse_items([item for item in stored_items if id.encode() in item])
        return next((item for item in named_items if item.get("id") == id), None)

    def store(self, request: Request, body: Body) -> None:
        """Store a finished response if its request asks for that, and remove old ones beyond the limits. The items
        of its input get new ids, since clients repeat ids, and a list is paged by its last item's id.
        """
        details = response_details(request)
        if not details.store or self._max_count < 1:
            return
        number = body["id"].removeprefix("resp_")
        items = tuple(
            to_json_bytes({**item, "id": f"in_{number}_{index}"}) for index, item in enumerate(details.input_items)
        )
        output = tuple(to_json_bytes(item) for item in body["output"])
        body_without_output = to_json_bytes({name: part for name, part in body.items() if name != "output"})
        previous_turn = details.previous.turn if isinstance(details.previous, StoredResponse) else None
        turn = StoredTurn(items, output, previous_turn, RESPONSE_OVERHEAD + sum(map(len, items + output)))
        with self._lock:
            self.delete(body["id"])
            self._responses[body["id"]] = StoredResponse(turn, body_without_output)
            self.size += len(body_without_output)
            self._add_reference(turn)
            while self._responses and (self.size > self._max_bytes or len(self._responses) > self._max_count):
                self.delete(next(iter(self._responses)))

    def delete(self, id: str) -> bool:
        """Delete a response; return whether there was one. Responses that continue it keep its items."""
        with self._lock:
            response = self._responses.pop(id, None)
            if response is None:
                return False
            self.size -= len(response.rest)
            self._drop_reference(response.turn)
            return True

    def _add_reference(self, turn: StoredTurn | None) -> None:
        """Count one more reference to a turn, and its bytes if it is the first."""
        while turn is not None:
            turn.references += 1
            if turn.references > 1:
                return
            self.size += turn.size
            turn = turn.previous

    def _drop_reference(self, turn: StoredTurn | None) -> None:
        """Count one reference less to a turn, and free its bytes if it was the last."""
        while turn is not None:
            turn.references -= 1
            if turn.references:
                return
            self.size -= turn.size
            turn = turn.previous


class StoredResponses:
    """The stored responses of all clients. Each client has an equal share of the limits."""

    def __init__(self, max_bytes: int, max_count: int, clients: int) -> None:
        self._share = (max_bytes // max(1, clients), max_count // max(1, clients))
        self._clients: dict[str | None, ClientResponses] = {}

    def for_client(self, client: Any) -> ClientResponses:
        """Return the stored responses of a client."""
        if client not in self._clients:
            self._clients[client] = ClientResponses(*self._share)
        return self._clients[client]


RESPONSE_PATH = f"{URL}/{{id}}"
"""The path of a stored response."""
INPUT_ITEMS_PATH = f"{RESPONSE_PATH}/input_items"

MAX_PAGE_ITEMS = 100
"""Items of one page."""


class ResponseEndpoints:
    """The HTTP endpoints for stored responses. A client finds only its own."""

    def __init__(self, stored_responses: StoredResponses) -> None:
        self._stored_responses = stored_responses

    async def read_or_delete(self, request: HttpRequest) -> Response:
        """Handle GET and DELETE of one stored response."""
        if request.method == "DELETE":
            id = request.path_params["id"]
            if not self._stored_responses.for_client(request.scope.get(SCOPE_CLIENT)).delete(id):
                raise ResponseNotFound(id)
            return json_reply({"id": id, "object": "response", "deleted": True})
        if request.query_params.get("stream", "false") != "false":
            raise InvalidRequest("a stored response is not streamed again: ask without `stream`", field="stream")
        response = self._find_response(request)
        return await run_on_thread(lambda: json_reply(response.body))

    async def input_items(self, request: HttpRequest) -> Response:
        """Handle GET of a stored response's input items, page by page."""
        items = await run_on_thread(self._find_response(request).input_items)
        query = request.query_params
        order, limit, after_id = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order is {order!r:.80}, but must be asc or desc", field="order")
        if not limit.isascii() or not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= MAX_PAGE_ITEMS:
            raise InvalidRequest(f"limit is {limit!r:.80}, but must be 1 to {MAX_PAGE_ITEMS}", field="limit")
        if order == "desc":
            items.reverse()
        if after_id is not None:
            matching_indices = [index for index, item in enumerate(items) if item["id"] == after_id]
            if not matching_indices:
                raise InvalidRequest(f"there is no item {after_id!r:.80} in this response", field="after")
            items = items[matching_indices[0] + 1 :]
        page = items[: int(limit)]
        page_ids = (
            {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        )
        return json_reply({"object": "list", "data": page, **page_ids, "has_more": len(items) > len(page)})

    def _find_response(self, request: HttpRequest) -> StoredResponse:
        """Return the stored response that the path names. Raises ResponseNotFound."""
        id = request.path_params["id"]
        response = self._stored_responses.for_client(request.scope.get(SCOPE_CLIENT)).find_response(id)
        if response is None:
            raise ResponseNotFound(id)
        return response
