"""What the engine makes of a request with a grammar before any executor computes it."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo_shared.errors import CallerError, UnavailableError
from octavo_shared.grammar.grammar import MAX_GRAMMAR_BYTES, Grammar
from octavo_shared.step_wire.step import SamplingRow
from octavo_shared.step_wire.wire import encode_step
from scheduler_svc.engine.live_request import group_of
from scheduler_svc.executors.serving_limits import PlannerSettings, serving_limits
from scheduler_svc.link.messages import decode_submission, encode_submission
from scheduler_svc.link.submission_check import check_submission
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions
from scheduler_svc.request.served_model import ServedModel
from tests.support.driving import Bench, small_limits
from tests.support.each_row import each_row
from tests.support.idle_engine import IdleEngine
from tests.support.live_requests import RecordingSink

GRAMMAR = Grammar(b'{"grammars": []}')


def guided(**options: object) -> EngineRequest:
    conditions = StopConditions(max_tokens=4, ignore_eos=True)
    options = {"grammar": GRAMMAR, **options}
    return EngineRequest("r", np.zeros(3, np.int32), SamplingRow(), conditions, **options)  # type: ignore[arg-type]


def test_the_end_of_the_sequence_ends_what_follows_a_grammar_though_it_is_to_be_ignored() -> None:
    assert not group_of(guided(), 1, 24).stop_conditions.ignore_eos
    assert group_of(guided(grammar=None), 1, 24).stop_conditions.ignore_eos


def test_what_a_front_has_checked_goes_to_executors_with_its_matcher_only() -> None:
    admissions = Bench(small_limits(grammar_slots=1)).planner.admissions
    for matcher_id, is_taken in (("toy", True), ("", True), ("of another release", False)):
        submitted = decode_submission(encode_submission(1, guided(matcher_id=matcher_id), "", 24))
        assert admissions.can_ever_admit(group_of(submitted, 1, 24)) is is_taken


async def test_where_no_executor_follows_grammars_it_is_refused_at_once() -> None:
    idle = IdleEngine(["a"], small_limits())
    idle.engine.fleet_model.model = model = ServedModel(FakeWorker().info, 24, 4)
    with pytest.raises(UnavailableError, match=r"this executor follows none \(the capability GRAMMARS\)"):
        await idle.engine.submit(guided(), RecordingSink(), model)
    idle.join("b", small_limits(grammar_slots=1))
    await idle.engine.submit(guided(), RecordingSink(), model)


REFUSED: Mapping[str, tuple[dict[str, object], str]] = {
    "beams": ({"beam_search": BeamSearchParams(2)}, "has a grammar and beams, which follow none"),
    "long": ({"grammar": Grammar(bytes(MAX_GRAMMAR_BYTES + 1))}, "has a grammar of 262145 bytes; at most 262144"),
}


@each_row(*REFUSED)
def test_a_front_that_did_not_look_is_refused(what: str) -> None:
    options, sentence = REFUSED[what]
    submitted = decode_submission(encode_submission(1, guided(**options), "", 24, was_queued=False))
    with pytest.raises(CallerError, match=sentence):
        check_submission(submitted, ServedModel(FakeWorker().info, 24, 4), 24)


def test_a_grammar_fits_into_a_message_beside_any_sequence() -> None:
    info = FakeWorker().info
    assert serving_limits(info, PlannerSettings()).max_grammar_bytes == info.max_grammar_bytes == MAX_GRAMMAR_BYTES
    tight = serving_limits(replace(info, max_model_len=64, max_message_bytes=180_000), PlannerSettings())
    assert 0 < tight.max_grammar_bytes < MAX_GRAMMAR_BYTES
    prompt = np.zeros(63, np.int32)
    for size, fits in ((tight.max_grammar_bytes, True), (tight.max_grammar_bytes + 1, False)):
        bench = Bench(tight)
        longest = group_of(replace(guided(grammar=Grammar(bytes(size))), prompt_token_ids=prompt), 1, 64)
        assert bench.planner.admissions.can_ever_admit(longest) is fits
        bench.queue.add(longest)
        step = bench.try_schedule()
        assert (step is not None) is fits
        assert step is None or encode_step(step).ByteSize() <= 180_000
