"""The errors of both services, as one tree.

    CallerError  the caller's fault: fix the request, do not retry
    WorldError   no fault of the caller or the service: retry later
    the others   a request that was ended, a fault of a step, an executor, a tokenizer or a model

Broken invariants are `AssertionError`s. `octavo_shared/grpc/grpc_status.py` is the one table that turns this
tree into gRPC status codes. This module imports words only, so the scheduler's pure core may use it.
"""

from octavo.values.wording import sentence

_MAX_SHOWN_CHARS = 200


class OctavoServiceError(Exception):
    """Any failure that a service reports to its caller in one sentence.

    The sentence may quote files and peers: it is cut, and cannot steer a terminal.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(sentence(message))


class CallerError(OctavoServiceError):
    """The request is wrong as it stands; sending it again will fail again."""


class InvalidFieldError(CallerError):
    """A field of a request is wrong.

    Args:
        field: Path of the field in the request message, for example `sampling_params.top_p`.
        value: What was sent; the message shows its beginning.
        limit: What would be right, as the end of the sentence "... must be".
    """

    def __init__(self, field: str, value: object, limit: str) -> None:
        self.field = field
        self.value = value
        self.limit = limit
        text = str(value)
        shown = text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
        super().__init__(f"{field} is {shown}; it must be {limit}")


class MalformedMessageError(CallerError):
    """The bytes are no message of the method."""

    def __init__(self) -> None:
        super().__init__("the request cannot be decoded as this method's message")


class RequestExistsError(CallerError):
    """A live request of the same tenant has the same id."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"request_id {request_id!r} is in use by a live request")


class UnknownNameError(CallerError):
    """The caller named something that does not exist (any more)."""


class FencedError(CallerError):
    """The epoch is not the current one, or another scheduler holds the lease."""


class SlowCallerError(CallerError):
    """A caller did not read what it had asked for.

    Args:
        limit_s: How long there was something to read, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__(
            f"the client read nothing for {limit_s:g} s while messages were waiting; its requests were aborted"
        )


class TooManyUntakenError(CallerError):
    """A caller has requests on a stream whose ends it does not read, and sends more.

    Args:
        most: How many such requests there may be.
    """

    def __init__(self, most: int) -> None:
        super().__init__(
            f"the stream has {most} finished requests whose results the client has not read, and it sent another one; "
            "all were aborted"
        )


class UnauthenticatedError(CallerError):
    """A call has no credentials, or unknown ones."""


class PermissionDeniedError(CallerError):
    """The caller is known, and may not do this."""


class WorldError(OctavoServiceError):
    """The request is fine but cannot be served now; it may be sent again."""


class QueueFullError(WorldError):
    """The waiting queue is full.

    Args:
        retry_after_s: When to retry, in seconds.
        tenant: The tenant whose share of the queue is full; None or empty: the whole queue is full.
        num_waiting_tokens: Prompt tokens in the queue, if their number is the limit; None: the number of requests is.
        gives_way: Whether the request had waited, and gives way to a request of a tenant with less than its share.
    """

    def __init__(
        self,
        num_waiting_requests: int,
        retry_after_s: float,
        tenant: str | None = None,
        *,
        queue: str = "the waiting queue",
        num_waiting_tokens: int | None = None,
        gives_way: bool = False,
    ) -> None:
        self.retry_after_s = retry_after_s
        whose = f" of tenant {tenant!r}" if tenant else ""
        requests = "1 request" if num_waiting_requests == 1 else f"{num_waiting_requests} requests"
        tokens = "" if num_waiting_tokens is None else f" with {num_waiting_tokens} prompt tokens"
        what = "is full, and the request was displaced by another tenant's request" if gives_way else "is full"
        super().__init__(f"{queue}{whose} {what} ({requests}{tokens}); retry in {retry_after_s:g} s")


class TokenQuotaError(WorldError):
    """A tenant, or an adapter, has fewer tokens left than a request needs at least.

    Args:
        name: Its name.
        num_tokens: What the request needs: its prompt, or 1 while that is unknown.
        per_minute: Its tokens in a minute.
        num_left: The tokens that it has left now; below 0: by how much its answers exceeded them.
        retry_after_s: When it has enough, in seconds; None: never, the request needs more than a minute's tokens.
        kind: "tenant" or "adapter".
    """

    def __init__(
        self,
        name: str,
        num_tokens: int,
        per_minute: int,
        num_left: int,
        retry_after_s: float | None,
        *,
        kind: str = "tenant",
    ) -> None:
        self.retry_after_s = retry_after_s
        whose = f"{kind} {name!r}"
        needed = "1 token" if num_tokens == 1 else f"{num_tokens} tokens"
        if retry_after_s is None:
            message = (
                f"the prompt has {needed}, and {whose} may use {per_minute} tokens a minute, so it can never "
                "run; send a shorter prompt"
            )
        else:
            used_up = (
                f"has {num_left} of its {per_minute} tokens a minute left"
                if num_left >= 0
                else f"has used {-num_left} tokens more than its {per_minute} tokens a minute"
            )
            message = f"{whose} {used_up}, and the request needs at least {needed}; retry in {retry_after_s:g} s"
        super().__init__(message)


class DeadlineTooShortError(WorldError):
    """The answer would come long after the deadline of the call; do not send the request again as it is.

    Args:
        what: What takes that long: "begin in" or "take".
        estimate_s: The estimated time, in seconds.
        time_left_s: The time that the call has left, in seconds.
    """

    def __init__(self, what: str, estimate_s: float, time_left_s: float) -> None:
        self.estimate_s = estimate_s
        self.time_left_s = time_left_s
        super().__init__(
            f"the answer would {what} about {estimate_s:.2g} s; the call's deadline is in {max(0.0, time_left_s):.2g} s"
        )


class CacheTooSmallError(WorldError):
    """The request needs more of the KV cache than there is, even alone; do not send it again as it is."""


class UnavailableError(WorldError):
    """The service is draining, or not there yet; another one may be."""


class AddressError(UnavailableError):
    """A port cannot be opened.

    Args:
        flag: The setting that has the address.
        address: host:port.
    """

    def __init__(self, flag: str, address: str) -> None:
        super().__init__(
            f"cannot listen on {address}: it is in use, or not an address of this machine; set {flag} to another one"
        )


class DrainingError(UnavailableError):
    """The service shuts down and takes nothing new; another one may."""


class LostTooOftenError(UnavailableError):
    """A request lost its executor too often in a row while it ran alone: it seems to break executors everywhere."""

    def __init__(self, num_losses: int) -> None:
        super().__init__(f"the executor was lost {num_losses} times in a row while running this request alone")


class NoExecutorError(WorldError):
    """No executor takes requests.

    Args:
        what: The state of the service.
        trouble: Why, with addresses and the like; empty: unknown.
        advice: What the caller can do.

    Attributes:
        brief: The message without `trouble`, for callers who may not see the inside of the deployment.
    """

    def __init__(self, what: str, trouble: str, advice: str = "retry in a moment") -> None:
        self.brief = f"{what}; {advice}"
        super().__init__(f"{what} ({trouble}); {advice}" if trouble else self.brief)


class RequestAbortedError(OctavoServiceError):
    """The request was ended by Abort, by an operator, or because its client left."""


class WeightsChangedError(RequestAbortedError):
    """The weights have changed, and the request does not go on with other ones."""

    def __init__(self) -> None:
        super().__init__("the weights have changed, and the request requires the same numerics (require_same_numerics)")


class NotFiniteError(OctavoServiceError):
    """The model's logits for a token have NaN or infinity, or rule out every token; no other request is affected.

    Args:
        place: Which token: "output 0 are not finite at token 17".
    """

    def __init__(self, place: str) -> None:
        super().__init__(f"the model's logits for {place} (NaN or infinity, or every token is ruled out)")


class PooledNotFiniteError(NotFiniteError):
    """The model's vector or scores for a text have NaN or infinity; no other request is affected.

    Args:
        what: "the vector of the text".
    """

    def __init__(self, what: str) -> None:
        OctavoServiceError.__init__(self, f"the model's numbers are not finite in {what} (NaN or infinity)")


class NothingAllowedError(CallerError):
    """The grammar of a request and its other rules leave an output no token, and it may not end there.

    Args:
        place: "output 0 at token 17".
    """

    def __init__(self, place: str) -> None:
        super().__init__(
            f"{place}: the grammar allows no token that the other rules of the request allow (min_tokens, banned or "
            "allowed tokens, no_repeat_ngram_size, logit_bias); change these rules or the grammar"
        )


class GrammarTooCostlyError(CallerError):
    """Following the grammar of a request takes more time or memory than an output may have.

    Args:
        place: "output 0 at token 17".
    """

    def __init__(self, place: str) -> None:
        super().__init__(f"{place}: the grammar takes too much time or memory to follow; make it simpler")


class GrammarNotFollowedError(OctavoServiceError):
    """The executor cannot compile the grammar of a request, or the earlier tokens do not follow it.

    Args:
        place: "output 0 at token 17".
    """

    def __init__(self, place: str) -> None:
        super().__init__(
            f"{place}: the executor cannot follow the grammar, or the answer that is continued does not follow it; "
            "make sure that the scheduler and its executors have the same version of llguidance"
        )


class GrammarNotLoadedError(GrammarNotFollowedError):
    """The executor cannot load the grammar of a request."""

    def __init__(self, reason: str) -> None:
        OctavoServiceError.__init__(
            self,
            f"the executor cannot load the grammar: {reason}; make sure that the scheduler and its executors have the "
            "same version of llguidance",
        )


class AdapterNotLoadedError(OctavoServiceError):
    """The executor cannot load the adapter of a request."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the executor cannot load the adapter: {reason}")


class InvalidStepError(OctavoServiceError):
    """A step does not fit the batch table or the cache; it was refused before anything was written."""


class StepGapError(OctavoServiceError):
    """A step id was skipped, or the stored responses do not reach back far enough."""


class StepFailedError(OctavoServiceError):
    """A step failed while it ran; the cache contents are in doubt."""


class ExecutorFaultError(OctavoServiceError):
    """An executor answered something that no correct executor answers; it is treated as lost."""


class DeviceLostError(StepFailedError):
    """The device computes nothing any more; only a new process can use it again."""


class TokenizerFailedError(OctavoServiceError):
    """The tokenizer's library fails at a text or at tokens, or hangs; no other request is affected."""


class TokenizerFileError(OctavoServiceError):
    """A tokenizer file is missing or broken; the model cannot be served.

    Args:
        file: Name or path of the file.
        reason: The rest of the sentence, for example "is missing".
    """

    def __init__(self, file: str, reason: str) -> None:
        self.file = file
        super().__init__(f"{file} {' '.join(reason.split())}")


class ModelLoadError(OctavoServiceError):
    """The model cannot be loaded; the message is one sentence that names the file or the setting."""


class UnsupportedModelError(ModelLoadError):
    """Our own code lacks what the model needs; transformers' code may have it."""


class UnknownArchitectureError(UnsupportedModelError):
    """We have no code of our own for this architecture."""
