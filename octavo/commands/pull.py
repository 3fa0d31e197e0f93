"""`octavo pull`: bring a model to this machine before it is served."""

import click
from rich.filesize import decimal

from octavo.models.names import is_demo_model, with_bars
from octavo.models.progress import ModelPrepareError
from octavo.models.store import find_model, prepare_model


@click.command()
@click.argument("model")
def pull(model: str) -> None:
    """Download MODEL and print where it lies.

    MODEL is the demo model smollm2, or the id of a model at the Hugging Face hub, such as Qwen/Qwen3-0.6B or
    Qwen/Qwen3-0.6B@REVISION. It goes into the Hugging Face cache, without the files that Octavo does not read. Run it
    again after an interruption: it goes on where it stopped.
    """
    # Only here: it takes a moment, and `octavo pull --help` needs nothing of it.
    from octavo.models.hub_transfer import pull_hub_model
    from octavo_shared.errors import ModelLoadError

    try:
        if is_demo_model(model):
            path = find_model(model) or with_bars(lambda report: prepare_model(model, progress=report))
        else:
            path = with_bars(lambda report: pull_hub_model(model, report), in_bytes=True)
    except (ModelPrepareError, ModelLoadError) as error:
        raise click.ClickException(str(error)) from error
    size = decimal(sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path])))
    click.echo(f"{model}: {size} in {path}")
    click.echo(f"next: octavo up --model {model}")
