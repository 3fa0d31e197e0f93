"""Executors for prompts and executors for the rest: who gets what, when a group moves, and that none is ever stuck."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from scheduler_svc.core.limits import Role
from tests.support.driving import group, max_tokens, small_limits
from tests.support.each_row import each_row
from tests.support.fleet import Member
from tests.support.fleet_driving import FleetBench
from tests.support.toy_executor import ToyNetwork


def fleet_of(*roles: Role, fails: Callable[[int], bool] = lambda number: False, **options: Any) -> FleetBench:
    limits = replace(small_limits(blocks=40, budget=8, max_model_len=80, prefix_caching=True), max_transfers=4)
    limits = replace(limits, prefill_role_tokens=12, **options)
    bench = FleetBench(*[replace(limits, role=role) for role in roles], network=ToyNetwork(fails))
    bench.fleet.dispatcher.transfers.least_tokens = bench.fleet.dispatcher.transfers.fixed_tokens = 4
    return bench


def play(bench: FleetBench) -> None:
    now_s = 0.0
    while any(bench.is_live(each) for each in bench.groups.values()) or bench.fleet.dispatcher.transfers:
        now_s += 0.05
        assert now_s < 20.0, "somebody waits for ever"
        bench.turn(now_s)
        bench.fleet.dispatch(now_s)
    bench.run()
    bench.check_all_is_free()


def admitted_to(member: Member) -> list[int]:
    """Return the first prompt token of each group that a member admitted."""
    return [int(each.token_ids[0]) for step in member.steps for each in step.delta.admissions]


def computed_by(member: Member) -> int:
    return sum(int(length) for step in member.steps for length in step.delta.prefill_chunks[:, 1])


def test_a_long_prompt_is_computed_by_one_executor_and_goes_on_at_the_other() -> None:
    bench = fleet_of(Role.PREFILL, Role.DECODE)
    prefill, decode = bench.members
    bench.add(group(0, 33, max_tokens(12)))
    bench.add(group(1, 5, max_tokens(12)))

    play(bench)

    assert (admitted_to(prefill), sorted(admitted_to(decode))) == ([100], [100, 200])
    assert computed_by(prefill) == 33
    assert computed_by(decode) <= 5 + 4, "the last block alone is computed again"
    assert bench.outputs[0, 0].token_ids == [*range(133, 145)]
    begun = [step.step_id for step in decode.steps if step.blocks_to_receive]
    last_chunk = [step.step_id for step in prefill.steps if len(step.delta.prefill_chunks)][-1]
    assert len(begun) > 1, "the blocks of the first chunks travel while the next ones are computed"
    assert bench.members[0].steps[0].step_id < last_chunk


@each_row((Role.PREFILL,), (Role.DECODE,), (Role.PREFILL, Role.PREFILL), (Role.DECODE, Role.DECODE))
def test_a_fleet_without_the_other_role_does_everything(*roles: Role) -> None:
    bench = fleet_of(*roles)
    bench.add(group(0, 33, max_tokens(5)))
    bench.add(group(1, 5, max_tokens(5)))

    play(bench)

    assert [len(bench.outputs[arrival, 0].token_ids) for arrival in (0, 1)] == [5, 5]


def test_who_attends_to_an_encoder_is_encoded_where_it_decodes() -> None:
    bench = fleet_of(Role.PREFILL, Role.DECODE, max_encoder_tokens=8, num_encoder_blocks=8)
    bench.add(group(0, 7, max_tokens(5), encoder=list(range(8))))

    assert bench.fleet.place(bench.groups[0], now_s=0.0) is bench.members[1].planner


def test_what_cannot_be_sent_decodes_where_it_is() -> None:
    bench = fleet_of(Role.PREFILL, Role.DECODE, fails=lambda number: True)
    bench.add(group(0, 33, max_tokens(12)))

    play(bench)

    assert admitted_to(bench.members[0]) == [100]
    assert bench.outputs[0, 0].token_ids == [*range(133, 145)]


def test_executors_that_exchange_nothing_keep_what_they_have() -> None:
    bench = fleet_of(Role.PREFILL, Role.DECODE, max_transfers=0)
    bench.add(group(0, 33, max_tokens(6)))
    bench.add(group(1, 5, max_tokens(6)))

    play(bench)

    assert (admitted_to(bench.members[0]), admitted_to(bench.members[1])) == ([100], [200])


def test_a_prefix_that_a_decoder_has_makes_a_long_prompt_short() -> None:
    bench = fleet_of(Role.PREFILL, Role.DECODE)
    bench.add(group(0, list(range(500, 533)), max_tokens(6)))
    play(bench)

    bench.add(group(1, [*range(500, 532), 7, 8], max_tokens(3)))
    play(bench)

    assert len(admitted_to(bench.members[0])) == 1


def test_several_outputs_move_together() -> None:
    bench = fleet_of(Role.PREFILL, Role.DECODE)
    bench.add(group(0, 32, max_tokens(9), num_sequences=3))

    play(bench)

    assert computed_by(bench.members[0]) == 32
    assert [bench.outputs[0, index].token_ids[:2] for index in range(3)] == [[132, 133], [133, 135], [134, 137]]
