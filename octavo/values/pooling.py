"""Embeddings and scores: what callers give, and what they get.

What is no input is refused here, in one sentence that names the place; all else is the scheduler's to say. Next:
octavo/calls/pooling_calls.py, which sends the messages.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from octavo.errors import InternalError, InvalidRequestError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.prompts import list_items, set_prompt, to_list
from octavo.values.wording import kind_of

# A text, or token ids.
EmbedInput: TypeAlias = str | Sequence[int]

# What one call of the scheduler takes at most, less than its own limits: 2,048 inputs, and 4 MiB by default.
MAX_INPUTS_OF_CALL = 512
_MAX_BYTES_OF_CALL = 2**20

_Request = TypeVar("_Request", pb.EmbedRequest, pb.ScoreRequest)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of texts.

    Attributes:
        embeddings: A vector for each text, in their order; `numpy.array(embeddings, "f4")` is a matrix of them.
        num_prompt_tokens: Tokens of all texts, special tokens included.
    """

    embeddings: tuple[tuple[float, ...], ...]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of pairs of texts.

    Attributes:
        all_scores: The scores of each pair, in their order; most models have one.
        num_prompt_tokens: Tokens of all pairs, special tokens included.
    """

    all_scores: tuple[tuple[float, ...], ...]
    num_prompt_tokens: int

    @property
    def scores(self) -> tuple[float, ...]:
        """The first score of each pair: the only one of a model that reranks."""
        return tuple(scores[0] for scores in self.all_scores)


@dataclass(frozen=True, slots=True)
class PoolingOptions:
    """What a call says beside its inputs; see `Client.embed`."""

    truncate_prompt_tokens: int | None
    priority: int
    tenant: str
    model: str
    prompt_name: str | None = None
    dimensions: int | None = None

    def set(self, request: pb.EmbedRequest | pb.ScoreRequest) -> None:
        """Put it into a request. Raises InvalidRequestError: a value does not fit its field at all."""
        for name in self.__slots__:
            value = getattr(self, name)
            if value is None:
                continue
            try:
                if isinstance(value, bool):
                    raise TypeError("it is neither a number nor a string")
                setattr(request, name, value)
            except (TypeError, ValueError, AttributeError) as error:
                kind = "a string" if name in ("tenant", "model", "prompt_name") else "a whole number"
                raise InvalidRequestError(f"{name} is {value!r}; it must be {kind} that fits", field=name) from error


def embed_requests(inputs: object, options: PoolingOptions) -> Iterator[tuple[int, pb.EmbedRequest]]:
    """Yield messages for inputs, so many in each that a scheduler takes it, with the index of the first.

    Raises: InvalidRequestError: there are no inputs, or one is none.
    """
    each = _one_or_several(inputs)
    if each is None:
        kinds = "it must be a text, a list of token ids, or a list of either"
        raise InvalidRequestError(f"inputs is {kind_of(inputs)}; {kinds}", field="inputs")
    if not each:
        raise InvalidRequestError("inputs is empty; it must have at least 1 text", field="inputs")
    items = [_embed_input(item, f"inputs[{index}]") for index, item in enumerate(each)]
    for first, end in _parts([item.ByteSize() for item in items]):
        request = pb.EmbedRequest(inputs=items[first:end])
        options.set(request)
        yield first, request


def score_requests(
    queries: object, documents: object, options: PoolingOptions
) -> Iterator[tuple[int, pb.ScoreRequest]]:
    """Yield messages for pairs, as `embed_requests` does."""
    first_texts, second_texts = _texts(queries, "queries"), _texts(documents, "documents")
    if len(first_texts) not in (1, len(second_texts)):
        rule = f"1 text for all documents, or {len(second_texts)}: one for each"
        raise InvalidRequestError(f"queries is {len(first_texts)} long; it must be {rule}", field="queries")
    each = first_texts * (len(second_texts) if len(first_texts) == 1 else 1)
    sizes = [len(first) + len(second) for first, second in zip(each, second_texts, strict=True)]
    for first, end in _parts(sizes):
        own = first_texts if len(first_texts) == 1 else first_texts[first:end]
        try:
            request = pb.ScoreRequest(queries=own, documents=second_texts[first:end])
        except UnicodeEncodeError as error:
            raise InvalidRequestError("a text has a lone surrogate, which is not valid Unicode") from error
        options.set(request)
        yield first, request


def rows_from_proto(values: bytes, width: int, num_rows: int) -> list[tuple[float, ...]]:
    """Return vectors or scores as they travel. Raises InternalError: there are not so many."""
    if not width or len(values) != 4 * width * num_rows:
        raise InternalError(f"the scheduler sent {len(values)} bytes for {num_rows} inputs of {width} numbers")
    return [struct.unpack_from(f"<{width}f", values, 4 * width * row) for row in range(num_rows)]


def _embed_input(item: object, name: str) -> pb.EmbedInput:
    holder = pb.GenerateRequest()
    set_prompt(holder, item, name=name)
    if holder.WhichOneof("prompt") == "messages":
        raise InvalidRequestError(f"{name} is a conversation; it must be text or a list of token ids", field="inputs")
    if holder.WhichOneof("prompt") == "text":
        return pb.EmbedInput(text=holder.text)
    return pb.EmbedInput(token_ids=holder.token_ids)


def _one_or_several(inputs: object) -> list[object] | None:
    """Return the inputs; None: there is nothing that holds some."""
    if isinstance(inputs, str):
        return [inputs]
    items = list_items(inputs)
    is_token_ids = items and not isinstance(items[0], str) and to_list(items[0]) is None
    return [items] if is_token_ids else items


def _texts(texts: object, name: str) -> list[str]:
    each = [texts] if isinstance(texts, str) else list_items(texts)
    if not each:
        shown = "empty" if each == [] else kind_of(texts)
        raise InvalidRequestError(f"{name} is {shown}; it must be a text or a list of texts", field=name)
    wrong = next((index for index, text in enumerate(each) if not isinstance(text, str)), None)
    if wrong is not None:
        raise InvalidRequestError(f"{name}[{wrong}] is {kind_of(each[wrong])}; it must be a text", field=name)
    return [text for text in each if isinstance(text, str)]


def _parts(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of parts that have few inputs, and few bytes unless one input alone has more."""
    begin, num_bytes = 0, 0
    for index, size in enumerate(sizes):
        if index > begin and (index - begin == MAX_INPUTS_OF_CALL or num_bytes + size > _MAX_BYTES_OF_CALL):
            yield begin, index
            begin, num_bytes = index, 0
        num_bytes += size
    yield begin, len(sizes)
