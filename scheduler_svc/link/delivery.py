"""What the engine says to the requests of a front, each by its number."""

from collections.abc import Mapping
from itertools import repeat

from octavo.core.v1 import core_service_pb2 as pb
from scheduler_svc.link.ends import decode_pooled, decode_reason, decode_search_end, decode_span
from scheduler_svc.link.remote_request import RemoteRequest
from scheduler_svc.link.submissions import decode_losses
from scheduler_svc.request.outputs import Alternatives


def deliver(message: pb.JoinResponse, requests: Mapping[int, RemoteRequest]) -> None:
    """Tell requests what a message says of them, but not which have ended; requests that are gone hear nothing.

    Raises: TokenGapError: tokens are missing. ArithmeticError, LookupError, TypeError, ValueError: no engine sends it.
    """
    for number in message.accepted:
        if (request := requests.get(number)) is not None:
            request.begin()
    for prompt in message.prompt_logprobs:
        if (request := requests.get(prompt.number)) is not None:
            alternatives = Alternatives(list(prompt.alternative_token_ids), list(prompt.alternative_logprobs))
            request.sink.push_prompt(list(prompt.logprobs), alternatives)
    for begin in message.span_begins:
        if (request := requests.get(begin.number)) is not None:
            request.sink.begin_span(decode_span(begin.span))
    for told in message.losses:
        if (request := requests.get(told.number)) is not None:
            request.losses = decode_losses(told.losses)
    if message.HasField("tokens"):
        _deliver_tokens(message.tokens, requests)
    for end in message.output_ends:
        if (request := requests.get(end.number)) is not None:
            request.end_output(end.output_index, end.num_tokens, decode_reason(end.reason))
    for search in message.search_ends:
        if (request := requests.get(search.number)) is not None:
            request.sink.finish_search(decode_search_end(search))
    for pooled in message.pooled_answers:
        if (request := requests.get(pooled.number)) is not None:
            request.take_pooled(decode_pooled(pooled))


def _deliver_tokens(tokens: pb.Tokens, requests: Mapping[int, RemoteRequest]) -> None:
    """Give tokens to their requests, in the order in which they came.

    Raises: TokenGapError: some are missing. ValueError: columns do not fit each other.
    """
    num_tokens = len(tokens.numbers)
    num_alternatives = sum(tokens.alternative_counts)
    if {len(tokens.alternative_token_ids), len(tokens.alternative_logprobs)} != {num_alternatives}:
        raise ValueError(f"{num_alternatives} alternatives were counted")
    rows = zip(
        tokens.numbers,
        tokens.output_indexes or repeat(0, num_tokens),
        tokens.positions,
        tokens.token_ids,
        tokens.logprobs or repeat(None, num_tokens),
        tokens.alternative_counts or repeat(0, num_tokens),
        strict=True,
    )
    first = 0
    for number, output_index, position, token_id, logprob, num_alternatives in rows:
        alternatives = None
        if num_alternatives:
            ends = first + num_alternatives
            alternatives = Alternatives(
                list(tokens.alternative_token_ids[first:ends]), list(tokens.alternative_logprobs[first:ends])
            )
            first = ends
        request = requests.get(number)
        if request is not None:
            known = None if logprob is None or logprob != logprob else logprob  # NaN: not computed
            request.push(output_index, position, token_id, known, alternatives)
