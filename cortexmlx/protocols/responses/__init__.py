"""`/v1/responses`: the reader, the body of a reply, and the events of a stream."""

from cortexmlx.protocols.responses.reader import ENCRYPTED, FIELDS, LOGPROBS, URL, read
from cortexmlx.protocols.responses.reply import ResponseEvents, unfinished_body, write

__all__ = ["ENCRYPTED", "FIELDS", "LOGPROBS", "URL", "ResponseEvents", "read", "unfinished_body", "write"]
