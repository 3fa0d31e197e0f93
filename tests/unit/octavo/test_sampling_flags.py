"""Each sampling flag of the command line reaches the request; a value that cannot is one sentence."""

import asyncio
from dataclasses import fields
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToDict

from octavo.cli import main
from octavo.commands.generate import generate
from octavo.commands.options import DEFAULT_MAX_TOKENS
from octavo.values.sampling_params import SamplingParams
from tests.support.each_row import each_row
from tests.unit.octavo.stand_in import StandIn

LICENSE = Path(__file__).parents[3] / "LICENSE"

# The flag and its value, as typed; the field of the message and its value, as JSON has it (64-bit integers are text).
# The numbers are powers of two, which float32 holds exactly.
FLAGS: list[tuple[str, str, object]] = [
    ("--temperature 0.5", "temperature", 0.5),
    ("--temperature 0", "temperature", 0),
    ("--top-k 40", "top_k", 40),
    ("--top-p 0.75", "top_p", 0.75),
    ("--min-p 0.125", "min_p", 0.125),
    ("--typical-p 0.25", "typical_p", 0.25),
    ("--repetition-penalty 1.25", "repetition_penalty", 1.25),
    ("--presence-penalty -0.5", "presence_penalty", -0.5),
    ("--frequency-penalty 0.5", "frequency_penalty", 0.5),
    ("--no-repeat-ngram-size 3", "no_repeat_ngram_size", 3),
    ("--logit-bias 42=-1.5", "logit_bias", [{"token_id": 42, "bias": -1.5}]),
    ("--logit-bias 7=2 --logit-bias 3=1", "logit_bias", [{"token_id": 7, "bias": 2}, {"token_id": 3, "bias": 1}]),
    ("--logit-bias 7=2 --logit-bias 7=1", "logit_bias", [{"token_id": 7, "bias": 1}]),
    ("--ban sky", "banned_words", ["sky"]),
    ("--ban sky --ban blue", "banned_words", ["sky", "blue"]),
    ("--ban-token-id 5 --ban-token-id 0", "banned_token_ids", [5, 0]),
    ("--allow-token-id 1 --allow-token-id 3", "allowed_token_ids", [1, 3]),
    ("--min-tokens 2", "min_tokens", 2),
    ("--seed 18446744073709551615", "seed", "18446744073709551615"),
    ("--max-tokens 3", "max_tokens", 3),
    ("--stop a --stop b", "stop", ["a", "b"]),
    ("--stop-token-id 9", "stop_token_ids", [9]),
    ("--ignore-eos", "ignore_eos", True),
    (f"--json-schema {LICENSE}", "grammar", {"json_schema": LICENSE.read_text()}),
    ("--json-object", "grammar", {"json_object": True}),
    ("--regex a+", "grammar", {"regex": "a+"}),
    ("--choice yes --choice no", "grammar", {"choice": {"choices": ["yes", "no"]}}),
    (f"--grammar {LICENSE}", "grammar", {"lark": LICENSE.read_text()}),
    ("--n 2", "n", 2),
    ("--best-of 3", "best_of", 3),
    ("--beam-width 4", "beam_width", 4),
    ("--length-penalty -0.5", "length_penalty", -0.5),
    ("--early-stopping true", "early_stopping", "EARLY_STOPPING_TRUE"),
    ("--early-stopping false", "early_stopping", "EARLY_STOPPING_FALSE"),
    ("--early-stopping never", "early_stopping", "EARLY_STOPPING_NEVER"),
    ("--json --logprobs 2", "logprobs", 2),
    ("--json --prompt-logprobs 0", "prompt_logprobs", 0),
]


def status_of(address: str, flags: str) -> object:
    """Run `octavo generate` in this process with the flags; return its exit status."""
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", "Why?", "--raw", "--address", address, *flags.split()])
    return exit_info.value.code


@each_row(*FLAGS)
async def test_a_flag_reaches_its_field_and_no_other(
    flags: str, name: str, value: object, *, stand_in: StandIn
) -> None:
    stand_in.requests.clear()
    status = await asyncio.to_thread(status_of, stand_in.address, flags)

    assert status == 0
    [request] = stand_in.requests
    sent = MessageToDict(request.sampling_params, preserving_proto_field_name=True)
    assert sent == {"max_tokens": DEFAULT_MAX_TOKENS, name: value}


@each_row(("", 512), ("--min-tokens 600", 600), ("--max-tokens 600", 600))
async def test_max_tokens_has_a_default_for_people(flags: str, max_tokens: int, *, stand_in: StandIn) -> None:
    await asyncio.to_thread(status_of, stand_in.address, flags)

    assert stand_in.requests[-1].sampling_params.max_tokens == max_tokens


def test_the_table_has_every_sampling_flag() -> None:
    names = {field.name for field in fields(SamplingParams)}
    of_command = {flag for param in generate.params if param.name in names for flag in param.opts}

    in_table = {word for flags, _, _ in FLAGS for word in flags.split() if word.startswith("--")}

    assert of_command == in_table - {"--json"}


@each_row(
    ("--top-k -1", "octavo: --top-k is -1; "),
    ("--logit-bias 42", "'--logit-bias': '42' is not ID=BIAS"),
    ("--logit-bias =1", "'--logit-bias': '=1' is not ID=BIAS"),
    ("--logit-bias sky=1", "'--logit-bias': 'sky=1' is not ID=BIAS"),
    ("--logit-bias 42=much", "'--logit-bias': '42=much' is not ID=BIAS"),
    ("--logit-bias 1=1 --logit-bias 2", "'--logit-bias': '2' is not ID=BIAS"),
    ("--logit-bias 4294967296=1", "octavo: --logit-bias is "),
    ("--ban", "'--ban' requires an argument"),
    ("--ban-token-id 4294967296", "octavo: --ban-token-id is "),
    ("--allow-token-id 4294967296", "octavo: --allow-token-id is "),
    ("--stop-token-id 4294967296", "octavo: --stop-token-id is "),
    ("--min-tokens -2", "octavo: --min-tokens is -2; "),
    ("--max-tokens -2", "octavo: --max-tokens is -2; "),
    ("--seed -3", "octavo: --seed is -3; "),
    ("--seed 18446744073709551616", "octavo: --seed is 18446744073709551616; "),
    ("--n -1", "octavo: --n is -1; "),
    ("--json-schema /nowhere", "'--json-schema': '/nowhere' cannot be read: No such file or directory"),
    ("--regex a --json-object", "octavo: --regex is set, and so is --json-object; an output follows one of them"),
    ("--beam-width -1", "octavo: --beam-width is -1; "),
)
async def test_a_value_that_no_field_takes_is_one_sentence(
    flags: str, sentence: str, *, stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    status = await asyncio.to_thread(status_of, stand_in.address, flags)

    captured = capsys.readouterr()
    assert status in (1, 2)
    assert captured.out == ""
    assert captured.err.startswith("octavo: ")
    assert captured.err.count("\n") == 1
    assert sentence in captured.err
    assert not stand_in.requests
