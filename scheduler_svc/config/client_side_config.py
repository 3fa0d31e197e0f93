"""Settings of everything that clients reach; a scheduler has them, and a standalone front, with those of its engine."""

import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from octavo_shared.process.service_config import ADDRESS_PATTERN, ServiceConfig, check_pair

# A name in a certificate.
CertificateName = Annotated[str, Field(min_length=1)]

# Longest name that a front gives to a model.
MAX_MODEL_NAME_CHARS = 128


def named_engine(target: str) -> tuple[str, str]:
    """Return the name of the model, "" if there is none, and the address of an item of --engine."""
    name, equals, address = target.partition("=")
    return (name, address) if equals and not target.startswith("unix:") else ("", target)


def check_engine(target: str) -> str:
    """Return an item of --engine. Raises ValueError: it is malformed."""
    name, address = named_engine(target)
    is_name = name.isprintable() and not any(map(str.isspace, name)) and len(name) <= MAX_MODEL_NAME_CHARS
    has_name = address != target
    if re.fullmatch(ADDRESS_PATTERN, address) and (not has_name or (name and is_name)):
        return target
    rule = f"; NAME is at most {MAX_MODEL_NAME_CHARS} characters without spaces" if has_name else ""
    raise ValueError(f"{'NAME=' if has_name else ''}host:port, with a port from 0 to 65535{rule}")


class ClientSideConfig(ServiceConfig):
    """Settings of what clients reach: ports, tokens, texts."""

    removed: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "vllm_engine": "OpenAI clients use the port of --openai-listen",
            "gateway_tenant": "a client's token determines its tenant, see --tokens-file",
        }
    )

    listen: str = Field(
        "127.0.0.1:50051",
        pattern=ADDRESS_PATTERN,
        description=(
            "Listen address for clients, host:port. Port 0 picks a free port. To serve other machines, also set "
            "--tls-cert and --tokens-file."
        ),
    )
    max_request_bytes: int = Field(
        4 * 2**20,
        ge=2**10,
        lt=2**31,
        description="Maximum size of a client's request, in bytes. gRPC rejects larger ones with RESOURCE_EXHAUSTED.",
    )
    tokens_file: Path | None = Field(
        None,
        description=(
            "File with the clients' bearer tokens, one TENANT TOKEN per line; tenant * may act for any tenant and use "
            "AdminService. The file is reloaded when it changes. By default no token is required."
        ),
    )
    trusted_clients: tuple[CertificateName, ...] = Field(
        (),
        description=(
            "Comma-separated names in client certificates. These clients need no token and may act for any tenant. "
            "Requires --tls-client-ca."
        ),
    )
    tokenizer: Path | None = Field(
        None, description="Directory with tokenizer.json. By default the executor sends the model's tokenizer."
    )
    escape_special_tokens: bool = Field(
        False,
        description=(
            "Treat special tokens such as <eos> in the text of chat messages as ordinary text, so that a message "
            "cannot imitate another turn. By default they are parsed as special tokens, as in vLLM and transformers."
        ),
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description=(
            "Where default sampling parameters come from. auto: the model's generation_config.json, if it has one. "
            "none: the API's own defaults."
        ),
    )
    max_beam_width: int = Field(
        16, ge=2, description="Maximum beam width of a request. A search of width w uses w slots."
    )
    openai_listen: str | None = Field(
        None,
        pattern=ADDRESS_PATTERN,
        description=(
            "Listen address of the OpenAI-compatible HTTP API, host:port, with TLS and tokens as at --listen. Port 0 "
            "picks a free port. Off by default."
        ),
    )
    chat_page: Literal["on", "off"] = Field(
        "on", description="Whether the port of --openai-listen serves a chat page for browsers, at /."
    )
    trainer_api: Literal["on", "off"] = Field(
        "off",
        description=(
            "Whether the port of --openai-listen lets trainers and tools change what is served, as in vLLM: adapters, "
            "weights, pauses and sleep. With --tokens-file they need an operator's token; without it everybody who "
            "reaches the port may call them."
        ),
    )
    openai_unknown_fields: Literal["refuse", "ignore"] = Field(
        "refuse",
        description=(
            "How the OpenAI-compatible API handles unknown fields. refuse: the request is rejected, and the error "
            "names the field. ignore: the field is ignored and listed in the response header x-octavo-ignored-fields."
        ),
    )
    tool_call_parser: Literal[
        "auto",
        "none",
        "hermes",
        "llama3_json",
        "mistral",
        "qwen3_coder",
        "deepseek_v3",
        "deepseek_v31",
        "glm45",
        "granite",
        "hunyuan_a13b",
        "kimi_k2",
        "minimax_m2",
        "olmo3",
        "openai",
        "phi4_mini_json",
        "pythonic",
        "seed_oss",
        "json",
    ] = Field(
        "auto",
        description=(
            "Tool-call format of the model, for the OpenAI-compatible API. auto: detected from its chat template. "
            "none: requests with tools are rejected. The others are model families."
        ),
    )
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3", "mistral", "seed_oss", "openai_gptoss"] = Field(
        "auto",
        description=(
            "Reasoning format of the model, for the OpenAI-compatible API. auto: detected from its chat template. "
            "none: reasoning stays in the answer. The others are model families."
        ),
    )

    @property
    def own_name(self) -> str:
        """A name for this process: host and listen address, which a restart keeps.

        With port 0 it would be the same for all processes on the host, so it is new each time.
        """
        host, port = socket.gethostname(), self.listen.rpartition(":")[2]
        return f"{host}/{secrets.token_hex(8)}" if int(port) == 0 else f"{host}/{self.listen}"

    @field_validator("openai_listen", "page_listen", mode="before", check_fields=False)
    @classmethod
    def _open_no_port_if_off(cls, value: object) -> object:
        """Take `off` for None: a file may have set an address, and a flag or a variable takes it back."""
        return None if value == "off" else value

    @model_validator(mode="after")
    def _check_trainer_api(self) -> Self:
        if self.trainer_api == "on" and self.openai_listen is None:
            raise ValueError("--trainer-api on requires --openai-listen: its routes are at that port")
        return self

    @model_validator(mode="after")
    def _check_trusted_clients(self) -> Self:
        if self.trusted_clients and self.tls_client_ca is None:
            raise ValueError("--trusted-clients requires --tls-client-ca: without it clients present no certificate")
        return self


class FrontConfig(ClientSideConfig):
    """Hold the calls of clients for the engine of a scheduler elsewhere: texts, tokenizer, streams."""

    service: ClassVar[str] = "front"
    program: ClassVar[str] = "python -m scheduler_svc.processes.front_process"
    removed: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **ClientSideConfig.removed,
            "core": "it is --engine now",
            "core_tls_ca": "it is --engine-tls-ca now",
            "core_tls_cert": "it is --engine-tls-cert now",
            "core_tls_key": "it is --engine-tls-key now",
            "core_tls_server_name": "it is --engine-tls-server-name now",
        }
    )

    engine: tuple[Annotated[str, AfterValidator(check_engine)], ...] = Field(
        min_length=1,
        description=(
            "Comma-separated addresses of the schedulers' --engine-listen, host:port. dns:///name:port stands for "
            "every address of that name; the lookup is repeated every --resolve-interval-s. The front joins all. To "
            "serve several models, put the model's name before each address: small=a:50054,large=dns:///b:50054. "
            "Clients then choose by these names."
        ),
    )
    resolve_interval_s: float = Field(
        5.0, gt=0, description="Interval between DNS lookups of the names in --engine, in seconds."
    )
    engine_tls_ca: Path | None = Field(
        None,
        description=(
            "PEM file with the certificate authorities of --engine. Enables TLS to the scheduler. Read at each "
            "connection."
        ),
    )
    engine_tls_cert: Path | None = Field(
        None,
        description="PEM file with the certificate that the front presents to --engine. Read at each connection.",
    )
    engine_tls_key: Path | None = Field(
        None, description="PEM file with the private key of --engine-tls-cert. Read at each connection."
    )
    engine_tls_server_name: str | None = Field(
        None,
        min_length=1,
        description=("Server name in the certificate of --engine, if it differs from the host in --engine."),
    )
    front_id: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description=(
            "Identity of this front at the scheduler. A restarted front with the same id replaces the earlier one at "
            "once. By default host name and listen address; with port 0 a new id at each start."
        ),
    )

    @property
    def is_started_by_scheduler(self) -> bool:
        """Whether it joins an engine on this machine, and shares its ports with that scheduler's other fronts."""
        return self.engine[0].startswith("unix:")

    @property
    def engines_by_model(self) -> Mapping[str, tuple[str, ...]]:
        """Addresses of the engines of each model, by the name in --engine; "": they have no names."""
        engines: dict[str, tuple[str, ...]] = {}
        for name, address in map(named_engine, self.engine):
            engines[name] = (*engines.get(name, ()), address)
        return engines

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = self.engines_by_model
        if "" in names and len(names) > 1:
            raise ValueError(
                f"--engine has a model's name before some addresses and none before {names[''][0]}; give all of them "
                "one, NAME=host:port, or none"
            )
        if self.tokenizer is not None and len(names) > 1:
            raise ValueError(
                f"--tokenizer holds for one model, and --engine names {len(names)}; without it the executors send each "
                "model's own"
            )
        return self

    @model_validator(mode="after")
    def _check_engine_tls(self) -> Self:
        check_pair("--engine-tls", self.engine_tls_cert, self.engine_tls_key)
        if self.engine_tls_ca is None and (self.engine_tls_cert or self.engine_tls_server_name):
            raise ValueError(
                "--engine-tls-cert and --engine-tls-server-name require --engine-tls-ca: without it the front uses "
                "plaintext to the scheduler"
            )
        return self
