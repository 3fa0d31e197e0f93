import itertools
from dataclasses import replace
from typing import Any

import pytest

from octavo.bench.config import BenchError, DatasetName
from octavo.bench.plan import WORDS, DatasetEntry, Prompts, ordinary_token_ids, plan_load, plan_probe, plan_warmup
from octavo.bench.record import PlannedRequest, TargetInfo
from tests.support.each_row import each_row
from tests.unit.octavo.bench.settings import bench_config

INFO = TargetInfo("octavo", "here", "tiny", max_model_len=1024, vocab_size=1000)
TEXT = TargetInfo("chat", "there", "other")


def requests(info: TargetInfo = INFO, **fields: Any) -> list[PlannedRequest]:
    return list(plan_load(bench_config(**fields), info, ()).requests())


def test_equal_seeds_give_equal_loads_and_others_another_one() -> None:
    fields: dict[str, Any] = {
        "rate": 9.0,
        "input_len": "uniform:5:90",
        "output_len": "normal:50:20",
        "shared_prefix_len": 4,
    }
    first, second, other = (requests(**fields, seed=seed) for seed in (3, 3, 4))
    assert first == second
    assert first != other
    assert [request.max_tokens for request in first] != [request.max_tokens for request in other]
    assert {request.scheduled_s for request in first}.isdisjoint(request.scheduled_s for request in other)


def test_prompts_have_the_lengths_that_were_drawn() -> None:
    made = requests(input_len="uniform:5:90", shared_prefix_len=7, num_requests=50)
    assert all(len(request.prompt) == request.num_prompt_tokens for request in made)
    assert {(request.num_prompt_tokens or 0) - 7 for request in made} <= set(range(5, 91))
    assert len({request.num_prompt_tokens for request in made}) > 20


def test_prompts_that_come_with_octavo_are_conversations_where_there_is_a_template() -> None:
    entries = [DatasetEntry("Why?", 5, {"type": "object"})]
    config = bench_config(dataset=DatasetName.SCHEMA, num_requests=None)
    [with_template] = plan_load(config, replace(INFO, has_chat_template=True), entries).requests()
    [without] = plan_load(config, INFO, entries).requests()
    assert with_template.prompt == [{"role": "user", "content": "Why?"}]
    assert replace(with_template, prompt="Why?") == without
    assert (without.max_tokens, without.json_schema) == (5, {"type": "object"})


def test_token_ids_are_of_the_middle_of_the_vocabulary() -> None:
    ids = {token for request in requests(num_requests=200) for token in request.prompt}
    assert ids <= set(range(125, 875))
    assert len(ids) > 700


@each_row(1, 2, 7, 8, 259, 128_256)
def test_every_vocabulary_has_ordinary_token_ids(vocab_size: int) -> None:
    ids = ordinary_token_ids(vocab_size)
    assert len(ids) >= 1
    assert ids.stop <= vocab_size


def test_prompts_of_other_servers_are_words() -> None:
    [request] = requests(TEXT, num_requests=1, input_len="20")
    assert isinstance(request.prompt, str)
    assert set(request.prompt.split(" ")) <= set(WORDS)
    assert len(request.prompt.split(" ")) == 20


def test_words_are_all_different_ones() -> None:
    assert len(WORDS) == len(set(WORDS))
    assert all(word.isalpha() and word.islower() for word in WORDS)


def test_prompts_begin_with_one_of_the_shared_prefixes_and_differ_behind_it() -> None:
    prompts = [request.prompt for request in requests(shared_prefix_len=32, num_prefixes=3, num_requests=60)]
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 3
    assert len({tuple(prompt[32:]) for prompt in prompts}) == 60


def test_phases_differ_and_share_their_prefixes() -> None:
    measured, warmup = (Prompts(INFO, seed=5, phase=phase, prefix_len=8) for phase in (0, 1))
    assert measured.make(0, 20)[:8] == warmup.make(0, 20)[:8]
    assert measured.make(0, 20)[8:] != warmup.make(0, 20)[8:]


def test_the_warm_up_does_not_change_what_is_measured() -> None:
    assert requests(rate=5.0, warmup=30) == requests(rate=5.0)
    config = bench_config(rate=5.0, warmup=30)
    prompts = {tuple(request.prompt) for request in plan_warmup(config, INFO, ()).requests()}
    assert len(prompts) == 30
    assert prompts.isdisjoint(tuple(request.prompt) for request in requests(rate=5.0))


def test_an_open_loop_has_as_many_requests_as_arrive() -> None:
    assert len(requests(rate=100.0, num_requests=50)) == 50
    by_time = requests(rate=100.0, num_requests=None, duration_s=3.0)
    assert 250 < len(by_time) < 350
    assert max(request.scheduled_s or 0 for request in by_time) < 3
    both = requests(rate=100.0, num_requests=50, duration_s=0.2)
    assert both == requests(rate=100.0, num_requests=50)[: len(both)]
    assert 5 < len(both) < 40


def test_a_closed_loop_of_a_duration_has_more_requests_than_can_be_sent() -> None:
    plan = plan_load(bench_config(num_requests=None, duration_s=2.0), INFO, ())
    assert len(plan) == 10_004
    assert next(plan.requests()).scheduled_s is None


def test_the_dataset_is_used_in_its_order_and_again() -> None:
    entries = [DatasetEntry("one", 7), DatasetEntry("two", None)]
    made = list(plan_load(bench_config(num_requests=3, output_len="9"), INFO, entries).requests())
    assert [(request.prompt, request.max_tokens) for request in made] == [("one", 7), ("two", 9), ("one", 7)]
    assert len(plan_load(bench_config(num_requests=None), INFO, entries)) == 2


def test_without_a_number_there_are_64_requests() -> None:
    assert len(requests(num_requests=None)) == 64


def test_requests_that_do_not_fit_the_model_are_refused_with_the_limit() -> None:
    plan_load(bench_config(input_len="1000", output_len="24"), INFO, ()).check_fits(INFO)
    plan = plan_load(bench_config(input_len="1000", output_len="20", shared_prefix_len=5), INFO, ())
    with pytest.raises(BenchError, match="1005 prompt tokens and 20 output tokens, and tiny takes at most 1024"):
        plan.check_fits(INFO)
    with pytest.raises(BenchError, match="has 2000 output tokens, and tiny"):
        plan_load(bench_config(), INFO, [DatasetEntry("a", 2000)]).check_fits(INFO)


def test_prompts_of_a_model_with_an_encoder_are_the_encoders() -> None:
    info = replace(INFO, max_encoder_tokens=60)
    plan_load(bench_config(input_len="60", output_len="1023"), info, ()).check_fits(info)
    for lengths, said in (
        (("61", "4"), "has 61 prompt tokens, and the encoder of tiny takes at most 60: bound"),
        (("60", "1024"), "has a start token and 1024 output tokens, and tiny takes at most 1024 tokens in all"),
    ):
        with pytest.raises(BenchError, match=said):
            plan_load(bench_config(input_len=lengths[0], output_len=lengths[1]), info, ()).check_fits(info)


def test_a_server_that_does_not_say_what_it_takes_gets_all() -> None:
    plan_load(bench_config(input_len="99999"), TEXT, ()).check_fits(TEXT)


def test_of_a_closed_loop_that_ends_by_time_only_what_is_sure_to_be_sent_is_judged() -> None:
    lengths = {"input_len": "lognormal:600:300", "output_len": "4", "num_requests": None}
    plan = plan_load(bench_config(**lengths, duration_s=1.0, concurrency=2), INFO, ())
    too_long = next(i for i, length in enumerate(plan.prompt_lens) if length + 4 > 1024)
    assert too_long >= 2
    plan.check_fits(INFO)
    more_clients = plan_load(bench_config(**lengths, duration_s=1.0, concurrency=too_long + 1), INFO, ())
    with pytest.raises(BenchError, match=f"request {too_long + 1} of the load has"):
        more_clients.check_fits(INFO)
    by_number = plan_load(bench_config(**{**lengths, "num_requests": too_long + 1}), INFO, ())
    with pytest.raises(BenchError, match=f"request {too_long + 1} of the load has"):
        by_number.check_fits(INFO)


@each_row((INFO, "900", 16), (INFO, "3", 3 + 10), (TEXT, "900", 910), (TEXT, "99999", 2048))
def test_the_probe_is_short_unless_the_server_does_not_say_what_it_takes(
    info: TargetInfo, input_len: str, probe_len: int
) -> None:
    config = bench_config(input_len=input_len, shared_prefix_len=10)
    [probe] = plan_probe(config, info, (plan_load(config, info, ()),)).requests()
    assert (probe.num_prompt_tokens, probe.max_tokens) == (probe_len, 1)


def test_the_probe_is_like_none_of_the_prompts() -> None:
    config = bench_config(input_len="uniform:5:90", shared_prefix_len=10)
    plan = plan_load(config, INFO, ())
    [probe] = plan_probe(config, INFO, (plan,)).requests()
    for made in itertools.islice(plan.requests(), 8):
        assert made.prompt[:5] != probe.prompt[:5]
