"""What a request is answered with if it is the only one: the oracle.

The same checks, core, worker and front as in production, without network, event loop, other requests and faults.
"""

import functools
import hashlib
import json
import re
from dataclasses import replace

from executor_svc.fake.worker import FakeWorker
from executor_svc.worker.interface import execute
from octavo.calls.streamed_answer import StreamedAnswer
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.output_messages import event_from_proto
from octavo.values.outputs import Finished, FinishReason, Output
from octavo.values.prompts import generate_request
from octavo.values.sampling_params import with_keywords
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.step import Adapter
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.engine.live_request import LiveRequest, group_of
from scheduler_svc.engine.live_requests import LiveRequests
from scheduler_svc.executors.serving_limits import PlannerSettings, serving_limits
from scheduler_svc.front.api.generation import check_request
from scheduler_svc.front.api.generation_messages import finished_message
from scheduler_svc.front.api.request_limits import FrontSettings
from scheduler_svc.front.grammars.compiler import CompilerHere
from scheduler_svc.front.response import Response
from scheduler_svc.front.text.text_model import TextModel
from scheduler_svc.front.text.tokenizer import Tokenizer
from scheduler_svc.request.served_model import ServedModel
from scheduler_svc.telemetry.meter import Meter
from tests.simulation.shapes import MAX_ENCODER_TOKENS, MAX_MODEL_LEN, Shape
from tests.support.grammars import num_followed

EOS_PROBABILITY = 0.01
MAX_BEAM_WIDTH = 8

_OF_THE_CALL = ("tenant", "cache_salt", "encoder_prompt")


@functools.cache
def answer_alone(
    shape: Shape, sliding_window_tokens: int, max_model_len: int = MAX_MODEL_LEN, adapter: bytes | None = None
) -> Finished:
    """Return the last event of a good request that is accepted for sequences of a length, complete.

    `adapter`: the content of its adapter; None: it has none. Nothing of it depends on what else there is.
    """
    worker = FakeWorker(
        block_size_tokens=16,
        num_device_blocks=256,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        eos_probability=EOS_PROBABILITY,
        sliding_window_tokens=sliding_window_tokens,
        instance_id="alone",
        sleep=lambda _: None,
        num_adapter_slots=int(adapter is not None),
        read_adapter=lambda _: adapter or b"",
        max_encoder_tokens=MAX_ENCODER_TOKENS if shape.has_encoder else 0,
    )
    worker.reset(uses_groups=shape.has_encoder)
    info = worker.info
    model = TextModel(ServedModel(info, max_model_len, info.max_num_seqs), _tokenizer())
    request = request_of(shape)
    asked = check_request(request, model, FrontSettings(max_beam_width=MAX_BEAM_WIDTH))
    if asked.grammar is not None:
        grammar = _compiler().verdict(asked.grammar)
        assert isinstance(grammar, Grammar), grammar
        asked = replace(asked, engine=replace(asked.engine, grammar=grammar))
    if adapter is not None:
        content = Adapter("alone", hashlib.sha256(adapter).digest())
        asked = replace(asked, engine=replace(asked.engine, adapter=content))
    response = Response(asked.engine, asked.answer_options, model.tokenizer)
    fleet = Fleet(WaitingQueue(FcfsPolicy()), FcfsPolicy())
    planner = fleet.join(serving_limits(info, PlannerSettings()), epoch=1)
    requests = LiveRequests(fleet, lambda: None, Meter(), clock=lambda: 0.0, unix_s=lambda: 0.0)
    group, has_stop_strings = group_of(asked.engine, 1, max_model_len), asked.engine.has_stop_strings
    live = LiveRequest(group, response, 0.0, has_stop_strings=has_stop_strings)
    requests.add(live)
    while response.ended is None:
        step = fleet.schedule(planner, 0.0)[0].step
        assert step is not None, f"{shape} makes no progress"
        requests.deliver(planner, fleet.process(planner, execute(worker, step)))
    finished = pb.GenerateResponse(finished=finished_message(response, is_lean=False))
    event = StreamedAnswer(asked.engine.prompt_token_ids.tolist()).take(event_from_proto(finished), is_lean=False)
    assert isinstance(event, Finished)
    if asked.engine.grammar is not None:
        for output in event.outputs:
            _require_followed(asked.engine.grammar, shape, output)
    return event


def _require_followed(grammar: Grammar, shape: Shape, output: Output) -> None:
    """See that each token was allowed, and that an output which ended by itself is what was asked for."""
    is_whole = output.finish_reason is FinishReason.STOP
    token_ids = output.token_ids[:-1] if is_whole else output.token_ids
    num_allowed, may_end = num_followed(grammar, list(token_ids))
    assert num_allowed == len(token_ids), f"{shape}: {output}"
    assert may_end or not is_whole, f"{shape}: {output}"
    if is_whole and (regex := shape.options.get("regex")):
        assert re.fullmatch(regex, output.text), f"{shape}: {output}"
    elif is_whole and (choices := shape.options.get("choice")):
        assert output.text in choices, f"{shape}: {output}"
    elif is_whole:
        assert set(json.loads(output.text)) == {"a", "b"}, f"{shape}: {output}"


def request_of(shape: Shape) -> pb.GenerateRequest:
    """Return the request as octavo.Client sends it."""
    options = dict(shape.options)
    of_the_call = {name: options.pop(name) for name in _OF_THE_CALL if name in options}
    params = with_keywords(None, options, function="stream")
    return generate_request(list(shape.prompt), params, request_id="alone", priority=0, **of_the_call)


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer(_worker().tokenizer_files())


@functools.cache
def _compiler() -> CompilerHere:
    info = _worker().info
    return CompilerHere(_worker().tokenizer_files(), info.eos_token_ids, info.vocab_size)


def _worker() -> FakeWorker:
    return FakeWorker(num_device_blocks=1, max_num_seqs=1, instance_id="alone")
