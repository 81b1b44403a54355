"""Every error that a user can meet. Its message has the numbers and the next step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = [
    "AdapterRefused",
    "ConversationFileError",
    "CortexError",
    "DownloadFailed",
    "EmbeddingRefused",
    "EngineClosed",
    "ForkedProcess",
    "FormRefused",
    "HostLost",
    "HostRefused",
    "InvalidRequest",
    "KVBlockError",
    "KVCacheFull",
    "KernelCompileError",
    "KernelFault",
    "LogitsProcessorError",
    "MemoryRefused",
    "ModelCorrupt",
    "ModelNotFound",
    "ModelUnsupported",
    "NoTokenToChoose",
    "OutOfMemory",
    "PinRefused",
    "PrefixRefused",
    "PromptTooLong",
    "RequestTimeout",
    "StructuredOutputError",
    "ToolchainMissing",
    "UnknownAdapter",
]


class CortexError(Exception):
    """Base of all errors that cortexmlx raises on purpose. The message is one line: what happened, what to do next."""


class KVCacheFull(CortexError):
    """The KV arena has no room for what was asked: shorten the prompt, raise the KV memory, or wait."""


class MemoryRefused(KVCacheFull):
    """The system does not give the memory that the KV arena needs: free some, or ask for a smaller KV memory."""


class OutOfMemory(CortexError):
    """A step was refused memory again after everything that can be freed was freed: the request that took most of it
    fails. Or a model was refused memory while it was loaded, or the images of open prompts take all they may. Free
    memory, or ask for less: a shorter prompt, a smaller KV memory, smaller pieces of prompts.
    """


class PinRefused(KVCacheFull):
    """Pins would exceed their share of the KV memory: unpin something, or raise the KV memory."""


class PrefixRefused(CortexError):
    """A stored prefix cannot be exported or imported: its pieces are not on disk, or a file is damaged or of another
    model.
    """


class KVBlockError(CortexError, ValueError):
    """KV blocks are not in the state that a call needs: freed twice, still in use, outside the arena, or miscounted."""


class ModelNotFound(CortexError):
    """No model has that name: a missing path, an unknown hub id, or no network."""


class DownloadFailed(ModelNotFound):
    """The hub has the model, but it could not be downloaded completely: no room on disk, a connection that broke again
    and again, or a hub that is busy or refuses. What has arrived is kept.
    """


class ModelCorrupt(CortexError):
    """The model's files exist but cannot be read: cut short, damaged or inconsistent."""


class ModelUnsupported(CortexError):
    """The model's files are fine, but this version cannot run that architecture, tensor type or quantization."""


class AdapterRefused(CortexError):
    """An adapter cannot be served per request: its kind, a changed layer, or no room. The message says which."""


class UnknownAdapter(CortexError):
    """No adapter of that name is loaded. The message names those that are."""


class PromptTooLong(CortexError):
    """The prompt, or the prompt with its answer, can never fit the model's context or the KV arena. `tokens` is how
    many the prompt has (or at least has), and `limit` the most that it may have, with one token of an answer.
    """

    def __init__(self, message: str, *, tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.tokens, self.limit = tokens, limit


class InvalidRequest(CortexError, ValueError):
    """The request itself is wrong: an empty prompt, or sampling parameters out of range. `field` is the path of the
    wrong field, such as `messages[2].role` or `temperature`, if one field is wrong.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class EmbeddingRefused(CortexError):
    """The model cannot make embeddings or scores of documents, or not as asked: it has no files that say how, its files
    ask for something else than this version has, or an argument does not fit them.
    """


class RequestTimeout(CortexError, TimeoutError):
    """The request did not end within its `timeout`: give it more time, or ask for less."""


class ConversationFileError(CortexError):
    """A conversation cannot be written to its file, or the file is damaged or not one of ours."""


class LogitsProcessorError(CortexError):
    """A logits processor of the caller raised, or did not return logits. Only its request failed."""


class StructuredOutputError(CortexError):
    """An answer does not have the form that was asked for: the form left no token to choose, the answer was cut before
    its form was complete, or the grammar's parser failed. Only this request is affected.
    """


class FormRefused(StructuredOutputError):
    """The form that was asked for became too complex while the answer was written, or no text fits it. The same request
    fails again: simplify the schema or the expression, or the schemas of the tools.
    """


class NoTokenToChoose(CortexError):
    """A request's logits were NaN or all -inf; only it failed. Weights may be damaged, or numbers exceed their type."""


class EngineClosed(CortexError):
    """The engine was closed, or its thread failed, before the request could finish."""


class ForkedProcess(EngineClosed):
    """This process was forked from one that uses mlx: engines do not survive that, and none can be made here."""


class HostLost(CortexError):
    """A worker on another machine, or in another process, ended, hung or could not be reached. The requests that ran
    there did not finish. `host` names it, if one is known.
    """

    def __init__(self, message: str, *, host: str | None = None) -> None:
        super().__init__(message)
        self.host = host


class HostRefused(CortexError):
    """The hosts and this process, or the hosts and the model, do not fit together: other versions or weights, a key
    that is wrong, or a model that cannot be cut into so many parts.
    """


class ToolchainMissing(CortexError):
    """The kernel simulator found no compiler that it can use."""


class KernelCompileError(CortexError):
    """A Metal kernel does not compile, or breaks the language's address-space rules."""


class KernelFault(CortexError):
    """A simulated Metal kernel did what no GPU defines, such as a race, divergent barrier or access out of bounds."""


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all errors in its chain of `__cause__` and `__context__`, each once."""
    pending_errors: list[BaseException | None] = [error]
    seen_ids: set[int] = set()
    while pending_errors:
        current_error = pending_errors.pop()
        if current_error is not None and id(current_error) not in seen_ids:
            seen_ids.add(id(current_error))
            yield current_error
            pending_errors += [current_error.__cause__, current_error.__context__]
