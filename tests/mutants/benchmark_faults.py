"""Faults in the benchmarks of the whole stack: each would publish a wrong figure."""

from tests.mutants.fault import Fault

FOLDER = "benchmarks/end_to_end"
UNIT = "tests/unit/benchmarks/end_to_end"
COSTS = "tests/unit/benchmarks/test_costs.py"

FAULTS = (
    Fault(
        "make bench takes outputs that are too short",
        f"{FOLDER}/engine_process.py",
        "        if generation.output_tokens != wanted:\n",
        "        if False:\n",
        (f"{UNIT}/test_session.py::test_an_engine_that_fails_is_told_in_a_sentence",),
    ),
    Fault(
        "make bench: disturbed runs count like the others",
        f"{FOLDER}/summary.py",
        "for run in clean or runs]",
        "for run in runs]",
        (f"{UNIT}/test_summary.py::test_a_figure_is_the_median_of_the_undisturbed_runs",),
    ),
    Fault(
        "make bench: the most disturbed repetition of a run counts",
        f"{FOLDER}/session.py",
        "best = min(runs, key=",
        "best = max(runs, key=",
        (f"{UNIT}/test_session.py::test_a_run_that_others_disturb_is_repeated_and_the_least_disturbed_one_counts",),
    ),
    Fault(
        "make bench: a slow run of ours is left out of the median",
        f"{FOLDER}/session.py",
        "return not is_ours and name in first",
        "return name in first",
        (f"{UNIT}/test_session.py::test_what_is_missing_breaks_or_is_slow_is_written_down_and_the_others_go_on",),
    ),
    Fault(
        "make bench: one engine begins in every round",
        f"{FOLDER}/session.py",
        "start = by % len(names) if names else 0",
        "start = 0",
        (f"{UNIT}/test_session.py::test_engines_take_turns_at_each_workload_and_another_one_begins_in_each_round",),
    ),
    Fault(
        "make bench: the time to the first token counts as decoding",
        f"{FOLDER}/summary.py",
        "(run.seconds - first_token_s)",
        "run.seconds",
        (
            f"{UNIT}/test_summary.py::test_one_stream_is_judged_by_its_decoding_many_by_the_whole_run_a_prompt_by_its_first_token",
        ),
    ),
    Fault(
        "make bench: the best peer of a prompt is the slowest",
        f"{FOLDER}/summary.py",
        'choose = min if workload.unit == "first token" else max',
        "choose = max",
        (f"{UNIT}/test_summary.py::test_the_table_has_our_best_beside_every_peer_and_names_the_best_peer",),
    ),
    Fault(
        "make bench: a shared prefix is computed once for each request",
        f"{FOLDER}/model_costs.py",
        "begin = shape.shared_tokens if index else 0",
        "begin = 0",
        (f"{UNIT}/test_summary.py::test_a_workload_costs_its_tokens_its_attention_and_a_shared_prefix_once",),
    ),
    Fault(
        "make bench: prompts are the same in every round",
        f"{FOLDER}/workloads.py",
        'random.Random(f"{self.name} {seed}")',
        "random.Random(self.name)",
        (f"{UNIT}/test_parts.py::test_requests_have_their_lengths_and_ids_that_are_new_with_every_seed",),
    ),
    Fault(
        "make bench: what llama.cpp says of the first token is ignored",
        f"{FOLDER}/adapters/llama_cpp_server.py",
        'return ended_s - answer["timings"]["predicted_ms"] / 1e3 if num_tokens > 1 else ended_s',
        "return ended_s if num_tokens else 0.0",
        (f"{UNIT}/test_adapters.py::test_the_first_token_of_llama_cpp_comes_before_the_time_of_the_others",),
    ),
    Fault(
        "costs: one way begins in every pair",
        "benchmarks/costs/harness.py",
        "ways if number % 2 == 0 else reversed(ways)",
        "ways",
        (f"{COSTS}::test_ways_take_turns_and_the_other_one_begins_next",),
    ),
    Fault(
        "costs: the stack may give other tokens than the bare loop",
        "benchmarks/costs/model.py",
        "if self._outputs.setdefault(seed, made.token_ids) != made.token_ids:",
        "if False:",
        (f"{COSTS}::test_a_stack_that_gives_other_tokens_is_not_compared",),
    ),
    Fault(
        "costs: the bare loop stops at the end of a sequence",
        f"{FOLDER}/adapters/octavo_core.py",
        "StopConditions(request.output_tokens, ignore_eos=True)",
        "StopConditions(request.output_tokens)",
        ("tests/contract/test_stack_cost.py",),
    ),
)
