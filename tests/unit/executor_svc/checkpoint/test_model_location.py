"""Whatever `--model` names, it is found or refused in one sentence that says what to do."""

from pathlib import Path

import huggingface_hub
import pytest

from executor_svc.checkpoint.model_location import find_model_path
from octavo_shared.errors import ModelLoadError

FORMAT = "config.json and model.safetensors (or shards with model.safetensors.index.json)"
OR = "a GGUF file, or a hub id"
SAVED = "(or shards with model.safetensors.index.json), as written by save_pretrained of transformers"


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A test that asks the hub says so; whatever else does fails."""
    monkeypatch.setattr(huggingface_hub, "HfApi", pytest.fail)
    monkeypatch.chdir(tmp_path)


def refused(model: str) -> str:
    with pytest.raises(ModelLoadError) as caught:
        find_model_path(model)
    return str(caught.value)


def write_files(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()


@pytest.mark.parametrize("weights", ["model.safetensors", "model.safetensors.index.json"])
def test_a_directory_with_a_configuration_and_weights_is_found(weights: str) -> None:
    write_files("tiny/config.json", f"tiny/{weights}")

    assert find_model_path("tiny") == Path("tiny")


def test_a_gguf_file_is_found() -> None:
    write_files("models/tiny.gguf")

    assert find_model_path("models/tiny.gguf") == Path("models/tiny.gguf")


# What is there, what is asked for, the sentence.
NO_MODEL: list[tuple[tuple[str, ...], str, str]] = [
    ((), "", "--model is empty; it takes a directory, a GGUF file or a hub id"),
    ((), "./tiny", "the model directory tiny does not exist"),
    ((), "/none/tiny", "the model directory /none/tiny does not exist"),
    ((), "a/b/c", "the model directory a/b/c does not exist"),
    ((), "tiny/", "the model directory tiny does not exist"),
    ((), "tiny.gguf", "the model file tiny.gguf does not exist"),
    ((), "~nobody-here/tiny", "the model directory ~nobody-here/tiny does not exist: unknown user"),
    (("README.md",), "./README.md", f"README.md is a file; --model takes a directory with {FORMAT}, {OR}"),
    (("README.md",), "README.md", f"README.md is a file; --model takes a directory with {FORMAT}, {OR}"),
    (
        ("tiny/config.json", "tiny/model.safetensors"),
        "tiny/model.safetensors",
        "tiny/model.safetensors is a file; set --model to its directory, tiny",
    ),
    (("tiny/a.txt",), "tiny", "the model directory tiny has no config.json"),
    (
        ("tiny/big/config.json", "tiny/README.md"),
        "tiny",
        "the model directory tiny has no config.json, but tiny/big has one: use that for --model",
    ),
    (
        tuple(f"tiny/{name}/config.json" for name in "abcd"),
        "tiny",
        "the model directory tiny has no config.json; tiny/a, tiny/b, tiny/c have one: use one of them for --model",
    ),
    (
        ("tiny/tiny-Q4.gguf",),
        "tiny",
        "the model directory tiny contains tiny-Q4.gguf and no config.json: give that file",
    ),
    (
        ("tiny/adapter_config.json",),
        "tiny",
        "the model directory tiny is an adapter (such as LoRA), not a model: merge it into its base model first",
    ),
    (
        ("models--big--tiny/snapshots/0/config.json", "models--big--tiny/blobs/1"),
        "models--big--tiny",
        "the model directory models--big--tiny is a Hugging Face cache directory: set --model to the hub id, big/tiny",
    ),
    (
        ("tiny/params.json", "tiny/consolidated.safetensors"),
        "tiny",
        "the model directory tiny has params.json, its publisher's own format: Octavo needs the Hugging Face format, "
        "with " + FORMAT,
    ),
    (
        ("tiny/config.json", "tiny/optimizer.bin", "tiny/pytorch_model.bin"),
        "tiny",
        "the model directory tiny has its weights as pytorch_model.bin, which Octavo does not read; it needs "
        f"model.safetensors {SAVED}",
    ),
    (
        ("tiny/config.json", "tiny/training_args.bin"),
        "tiny",
        "the model directory tiny has no weights: neither model.safetensors nor model.safetensors.index.json",
    ),
]


@pytest.mark.parametrize(("files", "model", "sentence"), NO_MODEL)
def test_what_is_no_model_is_refused_without_the_hub(files: tuple[str, ...], model: str, sentence: str) -> None:
    write_files(*files)

    assert refused(model) == sentence


@pytest.mark.parametrize("model", ["a b", "-a", "a--b", "a/b!"])
def test_what_cannot_be_a_hub_id_is_refused_without_the_hub(model: str) -> None:
    assert (
        refused(model) == f"{model} is neither a directory, nor a GGUF file, nor a hub id (NAME or ORGANISATION/NAME)"
    )


def test_an_empty_directory_is_refused() -> None:
    Path("tiny").mkdir()

    assert refused("tiny") == "the model directory tiny is empty"


def test_a_name_that_no_file_can_have_is_refused() -> None:
    assert refused("x" * 300).endswith(" cannot be read: File name too long")


def test_a_git_lfs_pointer_is_named() -> None:
    write_files("tiny/config.json", "tiny/model.safetensors")
    Path("tiny/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")

    assert refused("tiny") == ("tiny/model.safetensors is a Git LFS pointer, not the file: run git lfs pull there")
