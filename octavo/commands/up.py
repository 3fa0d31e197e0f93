"""`octavo up`: a scheduler and executors on this machine, until Ctrl-C or SIGTERM."""

import asyncio
import contextlib
import json
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console

from octavo.admin_client import AdminClient
from octavo.client import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS, Client
from octavo.commands.agents import agent_commands
from octavo.commands.options import check_listen, check_listen_or_off
from octavo.commands.service_options import ServiceCommand, service_options
from octavo.errors import OctavoError
from octavo.local.options import LocalOptions
from octavo.local.services import LocalServices
from octavo.local.taken_ports import check_ports, is_octavos_openai_port, is_taken
from octavo.values.address import exposure_warning

if TYPE_CHECKING:  # needs the packages of the services
    from scheduler_svc.config.scheduler_config import SchedulerConfig

DEFAULT_PAGE_ADDRESS = "127.0.0.1:50055"
DEFAULT_OPENAI_ADDRESS = "127.0.0.1:8080"

# A question and an answer of a few sentences.
_SHORT_TOKENS = 256

# For asking the scheduler whether requests still run.
_LOOK_TIMEOUT_S = 1.0


@click.command(cls=ServiceCommand)
@click.argument("model_argument", metavar="[MODEL]", required=False)
@click.option(
    "--listen",
    default=DEFAULT_ADDRESS,
    show_default=True,
    callback=check_listen,
    metavar="HOST:PORT",
    help="Listen address for clients. Port 0 picks a free port.",
)
@click.option(
    "--admin-listen",
    callback=check_listen,
    metavar="HOST:PORT",
    help="Listen address for operators (octavo top). Port 0 picks a free port.  "
    f"[default: {DEFAULT_ADMIN_ADDRESS}; a free port if --listen has port 0]",
)
@click.option(
    "--page-listen",
    callback=check_listen_or_off,
    metavar="HOST:PORT|off",
    help="Listen address of the live page, for browsers. Port 0 picks a free port; off: it is not served.  [default: "
    f"{DEFAULT_PAGE_ADDRESS}; a free port if --listen or --admin-listen has port 0]",
)
@click.option(
    "--executors",
    "num_executors",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    metavar="NUMBER",
    help=(
        "Number of executors. Each loads the weights and has its own KV cache, so two use twice the memory. On a CPU "
        "they share the cores; with --device cuda each uses its own GPU."
    ),
)
@click.option(
    "--openai-listen",
    callback=check_listen_or_off,
    metavar="HOST:PORT|off",
    help=f"Listen address of the OpenAI-compatible API. Port 0 picks a free port; off disables it.  [default: "
    f"{DEFAULT_OPENAI_ADDRESS}, or off if that port is in use; a free port if --listen has port 0]",
)
@service_options
def up(
    model: str,
    model_argument: str | None,
    listen: str,
    admin_listen: str | None,
    page_listen: str | None,
    num_executors: int,
    openai_listen: str | None,
    verbose: bool,
    options: dict[str, Any],
) -> None:
    """Start a scheduler and executors on this machine, until Ctrl-C. A process that dies is started again.

    MODEL is the same as --model.
    """
    if model_argument is not None:
        context = click.get_current_context()
        if context.get_parameter_source("model") is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"the model is given twice: {model_argument} and --model {model}", context)
        model = model_argument
    if admin_listen is None:
        admin_listen = "127.0.0.1:0" if listen.endswith(":0") else DEFAULT_ADMIN_ADDRESS
    listens = {"listen": listen, "admin_listen": admin_listen}
    if page_listen is None and "page_listen" not in options["scheduler"]:
        page_listen = "127.0.0.1:0" if ":0" in (listen[-2:], admin_listen[-2:]) else DEFAULT_PAGE_ADDRESS
    if page_listen is not None:
        listens["page_listen"] = page_listen
    lacks_openai = False
    if openai_listen is None and "openai_listen" not in options["scheduler"]:
        openai_listen = "127.0.0.1:0" if listen.endswith(":0") else DEFAULT_OPENAI_ADDRESS
        if lacks_openai := is_taken(openai_listen):
            openai_listen = None
    if openai_listen is not None:
        listens["openai_listen"] = openai_listen
    options["scheduler"] = {**listens, **options["scheduler"]}
    local = LocalOptions(model, num_executors=num_executors, **options)
    if local.num_shared_cores is not None and local.num_shared_cores < num_executors:
        click.echo(
            f"octavo: {num_executors} executors share this machine's {local.num_shared_cores} cores: each extra one "
            "costs memory and start-up time and adds no speed",
            err=True,
        )
    config = local.scheduler.config
    http_listens = {"--page-listen": config.page_listen, "--openai-listen": config.openai_listen}
    asyncio.run(check_ports(config.listen, config.admin_listen, http_listens))
    if lacks_openai:
        _say_that_openai_is_not_served()
    if config.tls_cert is None:
        _warn_if_exposed({"--listen": config.listen, "--admin-listen": config.admin_listen, **http_listens})
    if needs := local.prepare_model():
        click.echo(f"{model}: {needs}", err=True)
    asyncio.run(_run_until_stopped(config.served_model_name or model, local, is_verbose=verbose))


def _say_that_openai_is_not_served() -> None:
    """Say on stderr that another program has the default address of OpenAI's API."""
    who = "another octavo" if is_octavos_openai_port(DEFAULT_OPENAI_ADDRESS) else "another program"
    click.echo(
        f"octavo: {DEFAULT_OPENAI_ADDRESS} is in use by {who}, so the OpenAI-compatible API is disabled; to use "
        "another port: --openai-listen 127.0.0.1:8081",
        err=True,
    )


def _warn_if_exposed(ports: Mapping[str, str | None]) -> None:
    """Say on stderr what other machines can reach; the services say it in their logs only."""
    for flag, address in ports.items():
        if address is not None and (warning := exposure_warning("scheduler", flag, address)):
            click.echo(warning, err=True)


async def _run_until_stopped(model: str, options: LocalOptions, *, is_verbose: bool) -> None:
    console = Console(stderr=True)
    stop_wanted = _catch_stop_signals()
    with console.status("starting") as status:
        services = LocalServices.from_options(
            options, on_status=status.update, on_restart=_say, on_notice=_say, is_verbose=is_verbose
        )
        start = asyncio.create_task(services.start())
        stop = asyncio.create_task(stop_wanted.wait())
        await asyncio.wait([start, stop], return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            start.cancel()
            await asyncio.wait([start])
            return
        stop.cancel()
        start.result()
    try:
        several = f" with {options.num_executors} executors" if options.num_executors > 1 else ""
        click.echo(f"serving {model} on {services.address}{several}; press Ctrl-C to stop")
        if services.kernels:
            click.echo(f"kernels: {services.kernels}")
        config = options.scheduler.config
        scheme = "http" if config.tls_cert is None else "https"
        admin_flags = _address_flag(services.admin_address, DEFAULT_ADMIN_ADDRESS) + _access_flags(config)
        page = f"{scheme}://{services.page_address} (live page), " if services.page_address is not None else ""
        click.echo(f"operators: {page}octavo top{admin_flags}")
        flags = _address_flag(services.address, DEFAULT_ADDRESS) + _access_flags(config)
        is_short = not _access_flags(config) and await warn_if_short(services.address)
        if options.lacks_tokenizer:
            click.echo("this model has no tokenizer.json: it accepts prompts as token ids (octavo.Client) but no text")
        elif not is_short:
            click.echo(f'try: octavo generate "Why is the sky blue?"{flags}')
        if services.openai_address is not None:
            url = f"{scheme}://{services.openai_address}"
            has_page = config.chat_page == "on" and not options.lacks_tokenizer
            if _access_flags(config) or options.lacks_tokenizer:
                if has_page:
                    click.echo(f"chat page: {url}/")
                click.echo(f"OpenAI API: {url}/v1")
            else:
                await say_how_to_use_http(services.address, url, has_page=has_page)
        await services.run_beside(_wait_for(stop_wanted))
        await say_how_it_stops(services.admin_address, is_open=not _access_flags(config))
    finally:
        await services.stop()


def _say(sentence: str) -> None:
    click.echo(f"octavo: {sentence}", err=True)


def _address_flag(address: str, default: str) -> str:
    """Return what a command needs to find an address; nothing, if it is where the command looks anyway."""
    return "" if address == default else f" --address {address}"


def _access_flags(config: "SchedulerConfig") -> str:
    """Return what a command needs beside the address, for a scheduler that speaks TLS or asks for tokens."""
    return (" --tls-ca FILE" if config.tls_cert else "") + (" --token-file FILE" if config.tokens_file else "")


async def warn_if_short(scheduler: str, short_tokens: int = _SHORT_TOKENS) -> bool:
    """Say on stderr that hardly anything can be asked: fewer than so many tokens fit. Return whether that is so."""
    async with Client(scheduler) as client:
        num_tokens = (await client.get_model()).max_model_len
    if num_tokens < short_tokens:
        click.echo(
            f"octavo: only {num_tokens} tokens fit, prompt and answer together; for more, raise --kv-cache-gib or "
            "--max-model-len, or set --kv-cache-dtype int8",
            err=True,
        )
    return num_tokens < short_tokens


async def say_how_it_stops(admin_address: str, *, is_open: bool) -> None:
    """Say on stderr that the services stop, and what they wait for.

    Args:
        admin_address: Of the scheduler.
        is_open: Whether it answers in plaintext and without a token.
    """
    num_live = None
    with contextlib.suppress(OctavoError, TimeoutError):
        if is_open:
            async with asyncio.timeout(_LOOK_TIMEOUT_S), AdminClient(admin_address) as admin:
                num_live = len(await admin.list_requests(1))
    waits = "" if num_live == 0 else " once running streams finish (at most 20 s); press Ctrl-C again to stop now"
    click.echo(f"stopping{waits}", err=True)


async def say_how_to_use_http(scheduler: str, url: str, *, has_page: bool = False) -> None:
    """Say on stdout where OpenAI's API is, a command to try, and of a model that chats the page and agents."""
    async with Client(scheduler) as client:
        model = await client.get_model()
    model_id = model.model_id
    if not model.has_chat_template:
        body = {"model": model_id, "prompt": "Once upon a time", "max_tokens": 64, "temperature": 0}
        does = "reads a text, and writes another" if model.max_encoder_tokens else "continues texts, and does not chat"
        click.echo(f"this model has no chat template: it {does}")
        click.echo(f"OpenAI API of {model_id}: {url}/v1")
        click.echo(f"try: curl {url}/v1/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'")
        return
    if has_page:
        click.echo(f"chat page: {url}/")
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    body = {"model": model_id, "messages": messages, "max_tokens": 64, "temperature": 0}  # a small model rambles else
    click.echo(f"OpenAI API of {model_id}: {url}/v1")
    click.echo(f"try: curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'")
    for command in agent_commands(model_id, model.max_model_len, url):
        click.echo(command)


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()


def _catch_stop_signals() -> asyncio.Event:
    """Return an event that the first SIGINT or SIGTERM sets; the second has its usual effect."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        event.set()
        for signal_number in signals:
            loop.remove_signal_handler(signal_number)

    for signal_number in signals:
        loop.add_signal_handler(signal_number, on_signal)
    return event
