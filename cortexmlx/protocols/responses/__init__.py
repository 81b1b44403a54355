"""`/v1/responses`: the reader, the body of a reply, and the events of a stream."""

from cortexmlx.protocols.responses.body import unanswered, write
from cortexmlx.protocols.responses.events import Chunks
from cortexmlx.protocols.responses.reader import ENCRYPTED, FIELDS, LOGPROBS, URL, read

__all__ = ["ENCRYPTED", "FIELDS", "LOGPROBS", "URL", "Chunks", "read", "unanswered", "write"]
