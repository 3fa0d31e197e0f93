"""Every setting of both services, by the same names and rules in `octavo up`, `octavo demo` and `octavo.LLM`."""

import subprocess
import sys
from typing import Any

import click
import pytest

from executor_svc.config import ExecutorConfig
from octavo import LLM
from octavo.commands.command_line import run
from octavo.commands.demo import demo
from octavo.commands.up import up
from octavo.errors import LocalServiceError, SettingsError
from octavo.local.options import LocalOptions
from octavo.local.service_settings import CONFIG_CLASSES, plain_names
from octavo.local.services import LocalServices
from octavo_shared.process.config import ConfigError, load_config
from scheduler_svc.config.scheduler_config import SchedulerConfig
from tests.support.each_row import each_row

# These belong to one of the two services, which must be named.
OF_ONE_SERVICE = {"listen", "health_listen", "metrics_listen", "tls_cert", "tls_key", "tls_client_ca"}

# These are given by Octavo where it starts both.
FIXED = {"model", "executor", "exit_on_stdin_close"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[LocalOptions]:
    """What services would have been started with."""
    options: list[LocalOptions] = []

    def from_options(wanted: LocalOptions, **_: object) -> LocalServices:
        options.append(wanted)
        raise LocalServiceError("as asked")

    monkeypatch.setattr(LocalServices, "from_options", from_options)
    return options


def test_every_setting_can_be_given_by_its_name_or_with_that_of_its_service() -> None:
    every_name = {name for config_class in CONFIG_CLASSES for name in config_class.model_fields}
    assert every_name - set(plain_names()) == OF_ONE_SERVICE | FIXED


@each_row(up, demo)
def test_every_setting_with_a_name_of_its_own_is_a_flag(command: click.Command) -> None:
    assert set(plain_names()) - {"admin_listen", "page_listen", "openai_listen"} <= {
        param.name for param in command.params
    }


def test_the_help_describes_or_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", "--help"]) == 0
    said = capsys.readouterr().out
    flags = [param for param in up.params if isinstance(param, click.Option)]
    assert [flag.opts for flag in flags if flag.opts[0] not in said] == []


def test_flags_and_keywords_reach_the_services_alike(started: list[LocalOptions]) -> None:
    flags = "--block-size-tokens 32 --policy priority --no-prefix-caching --tenants-file t.toml --log-level debug"
    one_service = "--set executor.log_level=error --set scheduler.metrics-listen=127.0.0.1:0"
    ports = "--listen 127.0.0.1:0 --scheduler-id same"  # an `octavo up` of this machine may have the usual ones
    assert run(["up", "--model", "some/model", *flags.split(), *one_service.split(), *ports.split()]) == 1
    with pytest.raises(LocalServiceError, match="as asked"):
        LLM(
            "some/model",
            block_size_tokens=32,
            policy="priority",
            prefix_caching=False,
            tenants_file="t.toml",
            log_level="debug",
            kv_cache_gib=None,
            executor={"log_level": "error"},
            scheduler_id="same",
            scheduler={f"{name}listen": "127.0.0.1:0" for name in ("", "admin_", "page_", "metrics_", "openai_")},
            progress=False,
        )
    by_flags, by_keywords = started
    assert by_flags.executor.config == by_keywords.executor.config
    assert by_flags.scheduler.config == by_keywords.scheduler.config
    assert set(by_flags.executor_command()) == set(by_keywords.executor_command())
    assert set(by_flags.scheduler_command()) == set(by_keywords.scheduler_command())
    assert by_flags.executor.config.log_level == "error"
    scheduler = by_flags.scheduler.config
    assert (scheduler.policy, scheduler.prefix_caching, scheduler.log_level) == ("priority", False, "debug")


@each_row(
    ({"block_size_tokens": 0}, "block_size_tokens is 0; it must be at least 1"),
    ({"kv_cache_gib": "much"}, "kv_cache_gib is much; it must be a number"),
    ({"policy": "prio"}, "policy is prio; it must be one of 'fcfs' or 'priority'"),
    ({"trusted_clients": 7}, "trusted_clients is 7; it must be a list"),
    ({"tp": 1.5, "max_beam_width": 1}, "tp is 1.5; it must be a whole number; max_beam_width is 1; it must be at"),
    ({"executor": {"tp": 0}}, "executor.tp is 0; it must be at least 1"),
    ({"executor": {"block_size": 3}}, "executor.block_size is not a setting; did you mean executor.block_size_tok"),
    (
        {"scheduler": {"vllm_engine": True}},
        "scheduler.vllm_engine is not a setting any more: OpenAI clients",
    ),
    ({"executor": {"policy": "fcfs"}}, "executor.policy is not a setting of the executor; it is scheduler.policy"),
    ({"scheduler": {"executor": "a:1"}}, "scheduler.executor cannot be set here: Octavo sets it"),
    ({"executor": "127.0.0.1:1"}, "executor is a str; it must be a dict of settings, such as {'log_level':"),
    ({"tokens_file": "x"}, "scheduler.tokens_file is set, but this process calls the scheduler in plaintext"),
)
def test_a_wrong_setting_is_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LocalServiceError) as caught:
        LLM("some/model", **settings, progress=False)
    assert str(caught.value).startswith(sentence)


@each_row(
    (("m", {"block_size": 32}), "LLM: block_size is not a setting; did you mean block_size_tokens?"),
    (("m", {"colour": "red"}), "LLM: colour is not a setting"),
    (("m", {"gateway_tenant": "web"}), "LLM: gateway_tenant is not a setting any more: a client's token determines"),
    (
        ("m", {"metrics_listen": "a:1"}),
        "LLM: metrics_listen applies to one service: use executor={'metrics_listen': ...} or scheduler={'metrics",
    ),
    ((7, {}), "LLM: model is an int; it must be a Hugging Face directory, a hub id, or the name of a demo model"),
)
def test_an_argument_that_llm_does_not_have_is_a_type_error(
    arguments: tuple[Any, dict[str, Any]], sentence: str
) -> None:
    model, settings = arguments
    with pytest.raises(TypeError) as caught:
        LLM(model, **settings, progress=False)
    assert str(caught.value).startswith(sentence)


@each_row(
    ("--block-size-tokens 0", ExecutorConfig),
    ("--max-num-seqs 4096", ExecutorConfig),
    ("--lease-s soon", SchedulerConfig),
    ("--executor-tls-server-name x", SchedulerConfig),
)
def test_the_command_line_says_what_the_service_itself_would(
    flags: str, service: Any, *, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(service, ["--model", "m", *flags.split()] if service is ExecutorConfig else flags.split(), {})
    [mistake] = caught.value.mistakes
    assert run(["up", "--model", "some/model", *flags.split()]) == 2
    assert capsys.readouterr().err == f'octavo: {mistake}; see "octavo up --help"\n'


@each_row("--vllm-engine", "--no-vllm-engine")
def test_a_flag_of_a_setting_that_was_removed_says_what_to_use(
    flag: str, *, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", "--model", "some/model", flag]) == 2
    assert f"{flag} is not a flag any more: OpenAI clients use the port of --openai-listen" in capsys.readouterr().err


@each_row("policy=fcfs", "executor.tp", "gateway.tp=1")
def test_an_assignment_without_its_service_or_value_is_refused(
    assignment: str, *, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", "--model", "some/model", "--set", assignment]) == 2
    assert f"{assignment!r} is not SERVICE.NAME=VALUE, such as executor.log_level=debug" in capsys.readouterr().err


def test_a_wrong_variable_is_said_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_EXECUTOR_DTYP", "float32")
    with pytest.raises(
        SettingsError, match=r"OCTAVO_EXECUTOR_DTYP is not a setting; did you mean OCTAVO_EXECUTOR_DTYPE\?"
    ):
        LocalOptions("some/model")


def test_the_api_for_clients_loads_nothing_of_the_services() -> None:
    """A client alone does without their packages, and nobody who imports `octavo` waits for torch."""
    program = """
import sys
sys.modules["pydantic"] = None  # as if it were not installed
from octavo import LLM, Client, SamplingParams
from octavo.commands.command_line import cli
from octavo.commands import up
from octavo.errors import LocalServiceError
try:
    LLM("some/model", progress=False)
except LocalServiceError as error:
    print(error)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "scheduler_svc", "transformers"}))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    needed = "the services need the package pydantic: pip install '.[scheduler,executor]' in a clone"
    assert ended.stdout.splitlines() == [needed, ""], ended.stdout
