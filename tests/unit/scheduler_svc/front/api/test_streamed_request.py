"""A request of a stream before the core has said that it took it."""

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import UnavailableError
from scheduler_svc.front.api.request_body import RequestBody
from scheduler_svc.front.api.stream_batch import StreamBatch, StreamedRequest
from scheduler_svc.front.api_meter import ApiMeter


def test_what_is_new_of_a_request_is_told_once_it_is_accepted_or_refused() -> None:
    """A core in another process may push tokens in the moment in which it accepts; the front learns that a step later.

    Until then the stream's writer must not meet it: it has nothing to say of it, and all requests would end with it.
    """
    told: list[StreamedRequest] = []
    body, counted = RequestBody(b"", pb.GenerateRequest), ApiMeter().request("stream_requests")
    request = StreamedRequest(3, body, includes_text=False, tell=told.append, counted=counted)
    request.announce()
    assert not told
    request.fail(UnavailableError("no core has come"))
    assert told == [request]
    assert StreamBatch().add(request), "that is all of it"
