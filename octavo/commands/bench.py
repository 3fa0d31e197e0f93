"""`octavo bench`: load on a server, and what it did to the answers. Read next: octavo/bench/__init__.py."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.bench.config import MAX_NUM_REQUESTS, BenchConfig, DatasetName, Outputs
from octavo.bench.options import (
    CONTENT_OPTIONS,
    DEFAULT_CONCURRENCY,
    LOAD_OPTIONS,
    OUTPUT_OPTIONS,
    TARGET_OPTIONS,
)
from octavo.client import Client
from octavo.commands.connection import connection_options
from octavo.commands.extras import check_packages
from octavo.commands.flag_names import in_flags
from octavo.commands.options import account_options, is_on_command_line, with_options

if TYPE_CHECKING:  # it needs the extra, and the help does not
    from octavo.bench.record import Target

_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# Flags that say something to one kind of server only.
_OCTAVO_ONLY = (
    *("address", "speaks_tls", "tls_ca", "tls_cert", "tls_key", "tls_server_name", "token", "token_file"),
    *("priority", "tenant", "cache_salt", "speculate", "one_stream", "compares_speculation"),
)
_OPENAI_ONLY = ("openai_api", "api_key")


@click.command()
@connection_options
@with_options(*TARGET_OPTIONS)
@with_options(*LOAD_OPTIONS)
@with_options(*CONTENT_OPTIONS)
@account_options
@with_options(*OUTPUT_OPTIONS)
def bench(
    client: Client,
    one_stream: bool,
    openai: str | None,
    openai_api: str | None,
    api_key: str | None,
    priority: int,
    tenant: str,
    cache_salt: str,
    speculate: bool,
    json_path: Path | None,
    with_samples: bool,
    plot_path: Path | None,
    dataset_name: str | None,
    **load: Any,
) -> None:
    """Send load to a server and report latencies and throughput."""
    context = click.get_current_context()
    _check_flags(context, is_openai=openai is not None, is_json=json_path is not None, load=load)
    check_packages("bench", "numpy", *(["aiohttp"] if openai else []), *(["matplotlib"] if plot_path else []))
    outputs = Outputs(json_path, with_samples, plot_path)
    outputs.check_writable()
    if load["rate"] is None and load["concurrency"] is None:
        load["concurrency"] = 1 if load["compares_speculation"] else DEFAULT_CONCURRENCY
    if dataset_name is not None:
        load["dataset"] = DatasetName(dataset_name)
    if load["ignore_eos"] is None:
        load["ignore_eos"] = dataset_name is None
    config = BenchConfig(**load)
    # What these import needs the extra.
    from octavo.bench.octavo_target import OctavoTarget, OneStreamTarget
    from octavo.bench.session import run_bench

    how: dict[str, Any] = {
        "temperature": config.temperature,
        "ignore_eos": config.ignore_eos,
        "timeout_s": config.timeout_s,
    }
    target: AbstractAsyncContextManager[Target]
    if openai is None:
        account = {"priority": priority, "tenant": tenant, "cache_salt": cache_salt, "speculate": speculate}
        kind = OneStreamTarget if one_stream else OctavoTarget
        target = kind(client, **how, account=account, in_words=lambda sentence: in_flags(sentence, context))
    else:
        from octavo.bench.openai_target import OpenAIApi, OpenAITarget, check_url

        try:
            check_url(openai, api_key, is_key_explicit=is_on_command_line(context, "api_key"))
        except ValueError as error:
            raise click.UsageError(f"--openai: {error}", context) from None
        api = OpenAIApi(openai_api or ("completions" if dataset_name is None else "chat"))
        target = OpenAITarget(openai, **how, api=api, api_key=api_key, model=client.model or None)
    if not run_bench(config, target, outputs):
        raise click.exceptions.Exit(_EXIT_INTERRUPTED)


def _check_flags(context: click.Context, *, is_openai: bool, is_json: bool, load: dict[str, Any]) -> None:
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    given = [name for name in flags if name and is_on_command_line(context, name)]

    def refuse(names: tuple[str, ...], why: str) -> None:
        for name in given:
            if name in names:
                raise click.UsageError(f"{flags[name]} {why}", context)

    if is_openai:
        refuse(_OCTAVO_ONLY, "works only with an Octavo scheduler, not with --openai")
    else:
        refuse(_OPENAI_ONLY, "needs --openai")
    if load["compares_speculation"]:
        refuse(("speculate",), "does not go with --compare-speculation, which sends both")
    if load["rate"] is not None:
        refuse(("compares_speculation",), "needs a closed loop, and --rate is an open loop")
        refuse(("concurrency",), "is a closed loop and --rate is an open loop: give only one of them")
    else:
        refuse(("burstiness",), "needs --rate")
    generates = ("input_len", "shared_prefix_len", "num_prefixes")
    if load["dataset"] is not None:
        refuse(generates, "generates prompts, and --dataset supplies them")
    if "dataset_name" in given:
        refuse(("dataset", *generates, "output_len"), "does not go with --dataset-name, which has prompts and lengths")
    if not load["shared_prefix_len"]:
        refuse(("num_prefixes",), "needs --shared-prefix-len")
    if not is_json:
        refuse(("with_samples",), "needs --json")
    if load["rate"] is not None and load["num_requests"] is None and load["duration_s"] is not None:
        num_requests = load["rate"] * load["duration_s"]
        if num_requests > MAX_NUM_REQUESTS / 2:
            raise click.UsageError(
                f"--rate and --duration make about {num_requests:.0f} requests; "
                f"give --num-requests, at most {MAX_NUM_REQUESTS}",
                context,
            )
