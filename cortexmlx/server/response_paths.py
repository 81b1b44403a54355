"""The paths of stored responses: to read one, its input items, and to delete it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.openai.errors import NotStored
from cortexmlx.protocols.responses import URL
from cortexmlx.server.access import CLIENT
from cortexmlx.server.http import json_reply
from cortexmlx.server.stored import Kept, StoredResponses

ONE = f"{URL}/{{id}}"
"""The path of a stored response."""
INPUT_ITEMS = f"{ONE}/input_items"

MOST_LISTED = 100
"""Items of one page."""


class ResponsePaths:
    """Answers what is asked of stored responses. A client finds its own only."""

    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored

    async def one(self, request: Request) -> Response:
        """Answer with a response, or forget it (DELETE)."""
        if request.method == "DELETE":
            id = request.path_params["id"]
            if not self._stored.of(request.scope.get(CLIENT)).delete(id):
                raise NotStored(id)
            return json_reply({"id": id, "object": "response", "deleted": True})
        if request.query_params.get("stream", "false") != "false":
            raise InvalidRequest("a stored response is not streamed again: ask without `stream`", field="stream")
        return json_reply(self._kept(request).body)

    async def input_items(self, request: Request) -> Response:
        """Answer with a page of the items that the model was given."""
        items = self._kept(request).given()
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

    def _kept(self, request: Request) -> Kept:
        id = request.path_params["id"]
        kept = self._stored.of(request.scope.get(CLIENT)).response(id)
        if kept is None:
            raise NotStored(id)
        return kept
