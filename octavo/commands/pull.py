"""`octavo pull`: bring a model to this machine before it is served."""

import click
from rich.filesize import decimal

from octavo.models.names import is_demo_model, near_name, with_bars
from octavo.models.progress import ModelPrepareError
from octavo.models.store import find_model, prepare_model


@click.command()
@click.argument("model")
def pull(model: str) -> None:
    """Download MODEL, print where it is, and what memory it needs.

    MODEL is the demo model smollm2, or the id of a model at the Hugging Face hub, such as Qwen/Qwen3-0.6B or
    Qwen/Qwen3-0.6B@REVISION. Of a repository of GGUF files, HUB_ID:Q4_K_M and HUB_ID/FILE.gguf download that file
    alone; HUB_ID means the one in Q4_K_M, or the only one. It goes into the Hugging Face cache, without the files that
    Octavo does not read. Run it again after an interruption: it goes on where it stopped.
    """
    # Only here: it takes a moment, and `octavo pull --help` needs nothing of it.
    from executor_svc.checkpoint.ollama import PREFIX
    from executor_svc.models.memory_needs import say_needs, summarize_model
    from octavo.models.hub_transfer import pull_hub_model
    from octavo_shared.errors import ModelLoadError

    if model.startswith(PREFIX):
        name = model.removeprefix(PREFIX)
        raise click.ClickException(f"{model} is a model of Ollama: ollama pull {name} gets it, octavo up serves it")
    if not model:
        raise click.ClickException("'' is no name at the hub; such a name is Qwen/Qwen3-0.6B")
    if not is_demo_model(model):
        _refuse_path(model)
    try:
        if is_demo_model(model):
            path = find_model(model) or with_bars(lambda report: prepare_model(model, progress=report))
        else:
            path = with_bars(lambda report: pull_hub_model(model, report), in_bytes=True)
    except ModelPrepareError as error:
        raise click.ClickException(str(error)) from error
    except ModelLoadError as error:
        raise click.ClickException(f"{error}{near_name(model)}") from error
    try:
        summary = summarize_model(path)
    except ModelLoadError as error:
        raise click.ClickException(f"{model} is in {path}, but cannot be served: {error}") from error
    is_file = path.is_file()
    size = summary.file_bytes if is_file else sum(file.stat().st_size for file in path.iterdir())
    click.echo(f"{model}: {decimal(size)} in {path}")
    kind = f"{' and '.join(summary.formats[:2])}, {summary.architecture or 'no architecture'}"
    click.echo(f"{kind}: {say_needs(summary.needed_bytes())}")
    click.echo(f"next: octavo up --model {model}")


def _refuse_path(model: str) -> None:
    """Raise ClickException if `octavo up` takes a name for a directory or a file; says whether it can serve that."""
    from executor_svc.checkpoint.model_location import check_model_name
    from executor_svc.models.memory_needs import summarize_model
    from octavo_shared.errors import ModelLoadError

    try:
        path = check_model_name(model)
        if path is not None:
            summarize_model(path)
    except ModelLoadError as error:
        raise click.ClickException(f"there is nothing to download: {error}") from error
    if path is not None:
        raise click.ClickException(f"{model} is on this machine already; octavo up {model} serves it")
