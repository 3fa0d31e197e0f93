"""The settings of what clients meet, which a scheduler has, and a front of its own beside its way to the core."""

import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from octavo_shared.process.service_config import ADDRESS_PATTERN, ServiceConfig

# A name in a certificate.
CertificateName = Annotated[str, Field(min_length=1)]

# In place of an address: the port is not opened.
OFF = "off"


class ClientSideConfig(ServiceConfig):
    """What clients meet: ports, tokens, texts."""

    removed: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "vllm_engine": "clients of OpenAI's API use the port of --openai-listen",
            "gateway_tenant": "the token of a client says its tenant, see --tokens-file",
        }
    )

    listen: str = Field(
        "127.0.0.1:50051",
        pattern=ADDRESS_PATTERN,
        description="Address for clients, host:port. Port 0 takes a free one. To serve other machines, set "
        "--tls-cert and --tokens-file too.",
    )
    max_request_bytes: int = Field(
        4 * 2**20,
        ge=2**10,
        lt=2**31,
        description="Largest request of a client, in bytes. gRPC refuses a larger one with RESOURCE_EXHAUSTED.",
    )
    tokens_file: Path | None = Field(
        None,
        description="File with the tokens of clients, one TENANT TOKEN a line; tenant * may act for any tenant and "
        "use AdminService. It is read again when it changes. By default no token is needed.",
    )
    trusted_clients: tuple[CertificateName, ...] = Field(
        (),
        description="Names in client certificates, separated by commas. These clients need no token and may act for "
        "any tenant. Needs --tls-client-ca.",
    )
    tokenizer: Path | None = Field(
        None, description="Directory with tokenizer.json. By default the executor sends the model's own."
    )
    escape_special_tokens: bool = Field(
        False,
        description="Make ordinary text of special tokens such as <eos> in the conversations of requests, so that "
        "nobody can imitate a turn with them. By default they become special tokens, as in vLLM and transformers.",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Defaults of sampling parameters. auto: those in the model's generation_config.json, if it has "
        "one. none: always those of the API.",
    )
    max_beam_width: int = Field(
        16, ge=2, description="Widest beam search that a request may ask for. A search of width w takes w slots."
    )
    openai_listen: str | None = Field(
        None,
        pattern=ADDRESS_PATTERN,
        description="Address for OpenAI's API over HTTP, host:port, with TLS and tokens as at --listen. Port 0 takes a "
        "free one. By default, and with the word off, it is not served.",
    )
    openai_unknown_fields: Literal["refuse", "ignore"] = Field(
        "refuse",
        description="What becomes of a field that OpenAI's API here does not know. refuse: the request is refused, and "
        "the field is named. ignore: the header x-octavo-ignored-fields of the answer names it.",
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
        "phi4_mini_json",
        "pythonic",
        "seed_oss",
        "json",
    ] = Field(
        "auto",
        description="How the model writes tool calls, for OpenAI's API. auto: as its chat template shows. none: "
        "requests with tools are refused. The others are families of models.",
    )
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3", "mistral", "seed_oss"] = Field(
        "auto",
        description="How the model marks its reasoning, for OpenAI's API. auto: as its chat template shows. none: "
        "reasoning is part of the answer. The others are families of models.",
    )

    @property
    def own_name(self) -> str:
        """A name for this process: host and listen address, which a restart keeps.

        With port 0 that would be the same for all of the host: it is a new one each time.
        """
        host, port = socket.gethostname(), self.listen.rpartition(":")[2]
        return f"{host}/{secrets.token_hex(8)}" if int(port) == 0 else f"{host}/{self.listen}"

    @field_validator("openai_listen", mode="before")
    @classmethod
    def _serve_nothing_if_off(cls, value: object) -> object:
        """A file may have set an address: the word takes it back, in a flag or a variable."""
        return None if value == OFF else value

    @model_validator(mode="after")
    def _check_trusted_clients(self) -> Self:
        if self.trusted_clients and self.tls_client_ca is None:
            raise ValueError("--trusted-clients needs --tls-client-ca: without it no client proves its name")
        return self


class FrontConfig(ClientSideConfig):
    """Hold the calls of clients for the core of a scheduler elsewhere: texts, tokenizer, streams."""

    service: ClassVar[str] = "front"
    program: ClassVar[str] = "python -m scheduler_svc.processes.front_process"

    core: str = Field(
        pattern=ADDRESS_PATTERN,
        description="Address of the scheduler for fronts, host:port: its --core-listen.",
    )
    core_tls_ca: Path | None = Field(
        None,
        description="PEM file with the authorities that signed the certificate of --core. It turns on TLS to the "
        "scheduler, and is read at each connection.",
    )
    core_tls_cert: Path | None = Field(
        None,
        description="PEM file with the certificate that the front shows to --core. It is read at each connection.",
    )
    core_tls_key: Path | None = Field(
        None, description="PEM file with the private key of --core-tls-cert. It is read at each connection."
    )
    core_tls_server_name: str | None = Field(
        None, min_length=1, description="Name in the certificate of --core, if it differs from the one in --core."
    )
    front_id: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Name by which the scheduler knows this front. A front that restarts with the same name takes the "
        "place of the earlier one at once. By default host name and listen address; with port 0 a new name at each "
        "start.",
    )

    @property
    def is_started_by_scheduler(self) -> bool:
        """Whether it joins a core of this machine, and shares its ports with the other fronts of that scheduler."""
        return self.core.startswith("unix:")

    @model_validator(mode="after")
    def _check_core_tls(self) -> Self:
        if (self.core_tls_cert is None) != (self.core_tls_key is None):
            raise ValueError("--core-tls-cert and --core-tls-key go together: a certificate and its private key")
        if self.core_tls_ca is None and (self.core_tls_cert or self.core_tls_server_name):
            raise ValueError(
                "--core-tls-cert and --core-tls-server-name need --core-tls-ca: without it the front speaks plaintext "
                "with the scheduler"
            )
        return self
