"""What is absurd is refused by its bytes alone; what is not counts as protobuf itself counts it."""

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError, MalformedMessageError
from scheduler_svc.front.api import message_scan
from scheduler_svc.front.api.message_scan import CountLimit, MessageScan, peek
from tests.support.each_row import each_row

PATHS = ("token_ids.ids", "messages.messages", *(f"sampling_params.{name}" for name in ("stop", "logit_bias")))


def scan(content: bytes, message_class: type[Message] = pb.GenerateRequest, **most: int) -> None:
    limits = {path.replace("__", "."): CountLimit(number) for path, number in most.items()}
    MessageScan(limits).check(content, message_class)


def field(number: int, payload: bytes) -> bytes:
    """Return a length-delimited field of fewer than 16 and 128 bytes."""
    return bytes([number << 3 | 2, len(payload)]) + payload


@given(
    num_ids=st.integers(0, 5),
    num_messages=st.integers(0, 5),
    num_stops=st.integers(0, 5),
    num_biases=st.integers(0, 5),
    is_chat=st.booleans(),
    ids=st.integers(-(2**31), 2**31 - 1),
)
def test_it_counts_what_protobuf_counts(
    num_ids: int, num_messages: int, num_stops: int, num_biases: int, is_chat: bool, ids: int
) -> None:
    request = pb.GenerateRequest(request_id="é", priority=-1, tenant="t")
    if is_chat:
        request.messages.messages.extend([pb.ChatMessage(role="user", content="c" * 200)] * num_messages)
    else:
        request.token_ids.ids.extend([ids] * num_ids)
    params = request.sampling_params
    params.temperature, params.seed, params.min_tokens = 0.5, 2**64 - 1, 3
    params.stop.extend(["a"] * num_stops)
    params.logit_bias.extend([generation_pb2.LogitBias(token_id=ids, bias=1.5)] * num_biases)
    counts = dict(zip(PATHS, (0 if is_chat else num_ids, num_messages * is_chat, num_stops, num_biases), strict=True))

    content = request.SerializeToString()

    MessageScan({path: CountLimit(count) for path, count in counts.items()}).check(content, pb.GenerateRequest)
    for path in (path for path, count in counts.items() if count):
        limits = {other: CountLimit(count - (other == path)) for other, count in counts.items()}
        with pytest.raises(
            InvalidFieldError, match=rf"^{path} is .*elements long; it must be at most {counts[path] - 1}"
        ):
            MessageScan(limits).check(content, pb.GenerateRequest)


REFUSED = {
    "packed": (
        field(3, field(1, b"\x01\x81\x01\x01")),
        "token_ids.ids is 3 elements long; it must be at most 2 elements",
    ),
    "one by one": (field(3, b"\x08\x01" * 3), "token_ids.ids is 3 elements long; it must be at most 2"),
    "in two lists": (field(3, field(1, b"\x01\x01") + field(1, b"\x01")), "token_ids.ids is 3 elements long"),
    "twice": (field(5, b"") * 2, "sampling_params is repeated; it must be set at most once"),
    "twice inside": (field(4, field(1, field(1, b"a") * 2)), "messages.messages.role is repeated"),
    "of a newer release": (b"\xa2\x06\x01\x41", "field 100 of GenerateRequest is set; it must be unset: this release"),
    "of a newer release, inside": (field(5, b"\xa0\x06\x01"), "field 100 of SamplingParams is set"),
}


@each_row(*REFUSED)
def test_what_is_too_much_is_refused_with_field_value_and_limit(name: str) -> None:
    content, sentence = REFUSED[name]
    with pytest.raises(InvalidFieldError) as caught:
        scan(content, token_ids__ids=2)
    assert str(caught.value).startswith(sentence)


def test_errors_have_the_name_and_the_cause_that_people_know() -> None:
    limit = CountLimit(2, "tokens long", "token_ids", "max_model_len is 3")
    sentence = r"^token_ids is 3 tokens long; it must be at most 2 tokens long \(max_model_len is 3\)$"
    with pytest.raises(InvalidFieldError, match=sentence):
        MessageScan({"token_ids.ids": limit}).check(field(3, field(1, b"\x01\x01\x01")), pb.GenerateRequest)


def test_elements_of_two_messages_share_a_limit_and_single_fields_do_not() -> None:
    two = field(4, field(1, field(1, b"a") + field(2, b"b")) * 2)
    scan(two, messages__messages=2)
    with pytest.raises(InvalidFieldError, match=r"^messages\.messages is 2 elements long"):
        scan(two, messages__messages=1)


MALFORMED = {
    "a length beyond the end": b"\x12\x05abc",
    "a length beyond the message around it": field(5, b"\x42\x05abc") + b"xxxxxxx",
    "half a number": b"\x30\x80",
    "a number without end": b"\x30" + b"\xff" * 11,
    "half a float": field(5, b"\x0d\x00"),
    "a group": b"\x0b\x0c",
    "half a tag": b"\x80",
}


@each_row(*MALFORMED)
def test_what_is_no_message_is_refused(name: str) -> None:
    with pytest.raises(MalformedMessageError):
        scan(MALFORMED[name])


def test_the_scan_ends_soon_after_the_limit_and_not_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    num_values, value = 0, message_scan._value

    def counted(*args: object) -> tuple[int, int]:
        nonlocal num_values
        num_values += 1
        return value(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(message_scan, "_value", counted)
    inside = b"\x0a\x00" * 2**20
    with pytest.raises(InvalidFieldError, match="is more than 1034 elements long; it must be at most 10 elements long"):
        scan(b"\x22\x80\x80\x80\x01" + inside, messages__messages=10)
    assert num_values == 1 + 10 + 1024 + 1


def test_a_number_is_found_before_the_scan_and_only_among_the_first_fields() -> None:
    path = (pb.GenerateRequest.CONTINUATION_FIELD_NUMBER, pb.Continuation.MAX_MODEL_LEN_FIELD_NUMBER)
    continuation = pb.Continuation(outputs=[pb.ContinuedOutput(token_ids=[1, 2])] * 3, max_model_len=2**31)
    message = pb.GenerateRequest(text="a", continuation=continuation, require_same_numerics=True)
    content = message.SerializeToString()
    assert peek(content, path, 4) == 2**31
    assert peek(content, path, 3) == 0  # behind three outputs
    message.continuation.Clear()
    assert peek(message.SerializeToString(), path, 4) == 0
    assert peek(pb.GenerateRequest(text="a").SerializeToString(), path, 4) == 0
    for length in range(len(content)):  # cut anywhere, it is for the scan to refuse
        assert peek(content[:length], path, 4) in (0, 2**31)
