from pathlib import Path
from typing import ClassVar, Literal, Self

import pytest
from pydantic import Field, model_validator

import octavo
from executor_svc.config import ExecutorConfig, FakeConfig
from octavo_shared.process.config import ConfigError, load_config, load_config_or_exit
from octavo_shared.process.service_config import ServiceConfig
from scheduler_svc.config.client_side_config import FrontConfig
from scheduler_svc.config.scheduler_config import SchedulerConfig
from tests.support.each_row import each_row


class SampleConfig(ServiceConfig):
    """A service with a setting of each type."""

    service: ClassVar[str] = "executor"
    program: ClassVar[str] = "python -m executor"

    listen: str = Field("127.0.0.1:0", description="Address.")
    max_num_seqs: int = Field(4, ge=1, le=100, description="Sequences.")
    step_ms: float = Field(0.5, gt=0, description="Time, 100% of it.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where.")
    is_fast: bool = Field(False, description="Whether.")
    tokenizer: Path | None = Field(None, description="Directory.")
    peers: tuple[str, ...] = Field((), description="Addresses.")

    @model_validator(mode="after")
    def check_device(self) -> Self:
        if self.device == "cuda" and self.is_fast:
            raise ValueError("is_fast needs the device cpu")
        return self


class NeedyConfig(SampleConfig):
    model: str = Field(description="The model.")


def load(*argv: str, **environ: str) -> SampleConfig:
    return load_config(SampleConfig, argv, environ)


def mistakes(*argv: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*argv, **environ)
    return list(caught.value.mistakes)


def write_toml(directory: Path, text: str) -> str:
    path = directory / "octavo.toml"
    path.write_text(text)
    return str(path)


def test_defaults_hold_without_any_source() -> None:
    assert load().max_num_seqs == 4


def test_flag_wins_over_variable_over_file_over_default(tmp_path: Path) -> None:
    path = write_toml(tmp_path, "[executor]\nmax_num_seqs = 5\nstep_ms = 5.0\ndevice = 'cuda'")
    config = load(
        "--config", path, "--max-num-seqs", "7", OCTAVO_EXECUTOR_MAX_NUM_SEQS="6", OCTAVO_EXECUTOR_STEP_MS="6.5"
    )
    assert (config.max_num_seqs, config.step_ms, config.device, config.is_fast) == (7, 6.5, "cuda", False)


def test_the_file_can_be_named_by_a_variable(tmp_path: Path) -> None:
    assert load(OCTAVO_CONFIG=write_toml(tmp_path, "[executor]\nmax_num_seqs = 5")).max_num_seqs == 5


def test_one_file_serves_both_services(tmp_path: Path) -> None:
    path = write_toml(tmp_path, "[scheduler]\nwhatever = 1\n[executor]\nmax_num_seqs = 5")
    assert load("--config", path).max_num_seqs == 5


def test_booleans_have_a_flag_for_either_value() -> None:
    assert load("--is-fast").is_fast
    assert not load("--no-is-fast", OCTAVO_EXECUTOR_IS_FAST="true").is_fast


def test_tuples_are_split_at_commas() -> None:
    assert load("--peers", "a:1, b:2").peers == ("a:1", "b:2")


def test_paths_are_optional() -> None:
    assert load("--tokenizer", "/models/x").tokenizer == Path("/models/x")


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().max_num_seqs = 3  # type: ignore[misc]


def test_unknown_flag_is_a_mistake_with_a_suggestion() -> None:
    assert mistakes("--max-num-seq", "3") == ["--max-num-seq is not a flag; did you mean --max-num-seqs?"]


def test_the_prefix_of_all_variables_makes_none_of_them_near() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(SchedulerConfig, [], {"OCTAVO_SCHEDULER_LISTN": "a:1", "OCTAVO_SCHEDULER_COLOUR": "red"})
    assert caught.value.mistakes[:2] == (
        "OCTAVO_SCHEDULER_COLOUR is not a setting; --help lists all",
        "OCTAVO_SCHEDULER_LISTN is not a setting; did you mean OCTAVO_SCHEDULER_LISTEN?",
    )


@each_row(
    ("--listn", "did you mean --listen?"),
    ("--no-prefix-cachin", "did you mean --no-prefix-caching?"),
    ("--confg", "did you mean --config?"),
    ("--verson", "did you mean --version?"),
    ("--colour", "--help lists all"),
)
def test_a_flag_that_no_service_has_is_met_with_the_nearest_one(flag: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(SchedulerConfig, ["--executor", "a:1", flag, "x"], {})
    assert caught.value.mistakes == (f"{flag} is not a flag; {hint}",)


@each_row(
    *(
        (config_class, name)
        for config_class in (SchedulerConfig, FrontConfig, ExecutorConfig)
        for name in config_class.removed
    )
)
def test_a_setting_that_was_removed_says_what_to_use(
    config_class: type[ServiceConfig], name: str, *, tmp_path: Path
) -> None:
    path = write_toml(tmp_path, f"[{config_class.service}]\n{name} = 'x'\n")
    flag, variable = f"--{name.replace('_', '-')}", f"OCTAVO_{config_class.service.upper()}_{name.upper()}"
    with pytest.raises(ConfigError) as caught:
        load_config(config_class, [flag, "x", f"--no-{flag[2:]}", "--config", path], {variable: "x"})
    hint = config_class.removed[name]
    assert caught.value.mistakes[:4] == (
        f"{flag} is not a flag any more: {hint}",
        f"--no-{flag[2:]} is not a flag any more: {hint}",
        f"{variable} is not a setting any more: {hint}",
        f"{config_class.service}.{name} in {path} is not a setting any more: {hint}",
    )


@each_row(
    (["a:1"], {"": ("a:1",)}),
    (["a:1,dns:///b:2"], {"": ("a:1", "dns:///b:2")}),
    (["a:1", "b:2"], {"": ("a:1", "b:2")}),
    (["small=dns:///a:1,org/Large-2=b:2"], {"small": ("dns:///a:1",), "org/Large-2": ("b:2",)}),
    (["small=a:1", "large=b:2,small=[::1]:3"], {"small": ("a:1", "[::1]:3"), "large": ("b:2",)}),
)
def test_an_engine_may_have_the_name_of_its_model(flags: list[str], engines: dict[str, tuple[str, ...]]) -> None:
    config = load_config(FrontConfig, [word for flag in flags for word in ("--engine", flag)], {})
    assert config.engines_by_model == engines
    assert load_config(FrontConfig, [], {"OCTAVO_FRONT_ENGINE": ",".join(flags)}).engines_by_model == engines


@each_row(
    *(
        (engine, f"--engine is {engine.split(',')[-1]}; it must be {name}host:port, with a port from 0 to 65535")
        for name, engines in (
            ("", ("a", "a:1,b:x", ":1")),
            ("NAME=", ("=a:1", "small=", "small=:1", "small=a", "my model=a:1", "x\x1b=a:1", f"{'x' * 129}=a:1")),
        )
        for engine in engines
    ),
    ("small=a:1,b:2", "--engine has a model's name before some addresses and none before b:2; give all of them one"),
)
def test_a_wrong_engine_is_refused_with_what_is_right(engine: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(FrontConfig, ["--engine", engine], {})
    [mistake] = caught.value.mistakes
    assert mistake.startswith(told)


def test_a_tokenizer_of_the_operator_is_for_one_model() -> None:
    one, two = "small=a:1", "small=a:1,large=b:1"
    assert load_config(FrontConfig, ["--engine", one, "--tokenizer", "/x"], {}).tokenizer == Path("/x")
    with pytest.raises(ConfigError, match="--tokenizer holds for one model, and --engine names 2; without it"):
        load_config(FrontConfig, ["--engine", two, "--tokenizer", "/x"], {})


@each_row(SchedulerConfig, ExecutorConfig, FakeConfig)
def test_version_is_that_of_octavo(config_class: type[ServiceConfig], *, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(config_class, ["--version"], {})
    assert caught.value.code == 0
    assert capsys.readouterr() == (f"octavo {octavo.__version__}\n", "")


def test_unknown_variable_is_a_mistake_with_a_suggestion() -> None:
    assert mistakes(OCTAVO_EXECUTOR_DEVICES="cpu") == [
        "OCTAVO_EXECUTOR_DEVICES is not a setting; did you mean OCTAVO_EXECUTOR_DEVICE?"
    ]


@each_row(("OCTAVO_DEVICE", "OCTAVO_EXECUTOR_DEVICE"), ("OCTAVO_MAX_NUM_SEQ", "OCTAVO_EXECUTOR_MAX_NUM_SEQS"))
def test_a_variable_without_the_name_of_its_service_is_a_mistake(variable: str, meant: str) -> None:
    assert mistakes(**{variable: "1"}) == [f"{variable} is not a setting; did you mean {meant}?"]


def test_variables_of_the_commands_are_not_ours() -> None:
    load_config(SchedulerConfig, [], {"OCTAVO_TLS_CERT": "x", "OCTAVO_TOKEN_FILE": "x", "OCTAVO_CACHE_DIR": "/x"})


def test_a_variable_of_another_service_may_be_called_like_a_setting_of_ours() -> None:
    load_config(SchedulerConfig, [], {"OCTAVO_EXECUTOR_TLS_CERT": "x"})  # there is --executor-tls-cert too


def test_variables_of_other_services_are_not_ours() -> None:
    assert load(OCTAVO_SCHEDULER_DEVICES="cpu", HOME="/").device == "cpu"


def test_variables_that_kubernetes_sets_for_a_service_are_no_settings() -> None:
    load(
        OCTAVO_EXECUTOR_SERVICE_HOST="10.0.0.1",
        OCTAVO_EXECUTOR_SERVICE_PORT_GRPC="50061",
        OCTAVO_EXECUTOR_PORT="tcp://10.0.0.1:50061",
        OCTAVO_EXECUTOR_PORT_50061_TCP_ADDR="10.0.0.1",
    )


def test_unknown_key_and_table_of_the_file_are_mistakes(tmp_path: Path) -> None:
    path = write_toml(tmp_path, "[executor]\nmax_num_seq = 5\n[excutor]\n")
    assert mistakes("--config", path) == [
        f"[excutor] in {path} is not a known table; did you mean executor?",
        f"executor.max_num_seq in {path} is not a setting; did you mean max_num_seqs?",
    ]


def test_unknown_key_is_a_mistake_even_where_a_flag_would_win(tmp_path: Path) -> None:
    path = write_toml(tmp_path, "[executor]\nmax_num_seq = 5")
    assert len(mistakes("--config", path, "--max-num-seqs", "3")) == 1


def test_wrong_values_name_the_place_they_came_from(tmp_path: Path) -> None:
    path = write_toml(tmp_path, "[executor]\nmax_num_seqs = 101")
    assert sorted(mistakes("--config", path, "--device", "tpu", OCTAVO_EXECUTOR_STEP_MS="fast")) == [
        "--device is tpu; it must be one of 'cpu' or 'cuda'",
        "OCTAVO_EXECUTOR_STEP_MS is fast; it must be a number",
        f"executor.max_num_seqs in {path} is 101; it must be at most 100",
    ]


@each_row(
    (("--max-num-seqs", "0"), "--max-num-seqs is 0; it must be at least 1"),
    (("--max-num-seqs", "many"), "--max-num-seqs is many; it must be a whole number"),
    (("--step-ms", "0"), "--step-ms is 0; it must be more than 0"),
    (("--max-message-bytes", "2147483648"), "--max-message-bytes is 2147483648; it must be less than 2147483648"),
    (("--is-fast", "--device", "cuda"), "is_fast needs the device cpu"),
    (("stray",), "unexpected argument 'stray'"),
    (("--device",), "argument --device: expected one argument"),
    (("--config", "/nowhere.toml"), "cannot read the configuration file /nowhere.toml: No such file or directory"),
)
def test_each_wrong_flag_is_one_sentence(argv: tuple[str, ...], mistake: str) -> None:
    assert mistakes(*argv) == [mistake]


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    path = write_toml(tmp_path, "[executor\n")
    (mistake,) = mistakes("--config", path)
    assert mistake.startswith(f"{path} is not a TOML file: ")
    assert "\n" not in mistake


def test_a_required_setting_names_its_three_places() -> None:
    with pytest.raises(ConfigError, match=r"--model is required \(or OCTAVO_EXECUTOR_MODEL, or model in the file\)"):
        load_config(NeedyConfig, [], {})


def test_mistakes_go_to_stderr_one_a_line_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config_or_exit(SampleConfig, ["--max-num-seqs", "0", "--step-ms", "0"], {})
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "octavo executor: --max-num-seqs is 0; it must be at least 1",
        "octavo executor: --step-ms is 0; it must be more than 0",
    ]


def test_help_shows_description_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(*["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Time, 100% of it. (default: 0.5) [OCTAVO_EXECUTOR_STEP_MS]" in text


@each_row(ExecutorConfig, FakeConfig)
def test_every_setting_has_a_description(config_class: type[ServiceConfig]) -> None:
    assert [name for name, info in config_class.model_fields.items() if not info.description] == []


@each_row("50061", "127.0.0.1:65536", "127.0.0.1:99999", "127.0.0.1:")
def test_a_wrong_address_names_the_form(address: str) -> None:
    with pytest.raises(ConfigError, match=f"--listen is {address}; it must be host:port, with a port from 0 to 65535"):
        load_config(FakeConfig, ["--listen", address], {})


@each_row("127.0.0.1:0", "[::1]:50061", "host:65535")
def test_a_right_address_is_taken(address: str) -> None:
    assert load_config(FakeConfig, ["--listen", address], {}).listen == address


def test_a_batch_too_small_for_all_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 8; it must be at least max_num_seqs, 16"):
        load_config(FakeConfig, ["--max-num-seqs", "16", "--max-num-batched-tokens", "8"], {})


def test_a_wrong_item_of_a_list_is_one_mistake() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(SchedulerConfig, ["--executor", "nonsense"], {})
    [mistake] = caught.value.mistakes
    assert mistake == "--executor is nonsense; it must be host:port, with a port from 0 to 65535"
