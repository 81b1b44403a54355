"""`/v1/responses`: the reader, the body of a reply, and the events of a stream."""

from cortexmlx.protocols.openai.responses.body import unanswered, write
from cortexmlx.protocols.openai.responses.events import Chunks
from cortexmlx.protocols.openai.responses.reader import ENCRYPTED, FIELDS, LOGPROBS, URL, read

__all__ = ["ENCRYPTED", "FIELDS", "LOGPROBS", "URL", "Chunks", "read", "unanswered", "write"]
