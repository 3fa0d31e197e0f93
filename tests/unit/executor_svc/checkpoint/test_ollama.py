"""A name of a model of Ollama leads to its GGUF file, or to a sentence that says what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from executor_svc.checkpoint.model_location import find_model_path
from executor_svc.checkpoint.ollama import ollama_folder, ollama_models
from octavo_shared.errors import ModelLoadError
from tests.support.each_row import each_row
from tests.support.gguf_files import pull_into_ollama

LIBRARY = "registry.ollama.ai/library"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    return tmp_path


@each_row(
    ("ollama:tiny", f"{LIBRARY}/tiny/latest"),
    ("ollama:tiny:1.5b-q8_0", f"{LIBRARY}/tiny/1.5b-q8_0"),
    ("ollama:someone/tiny", "registry.ollama.ai/someone/tiny/latest"),
    ("ollama:hf.co/someone/tiny:Q4_K_M", "hf.co/someone/tiny/Q4_K_M"),
)
def test_a_name_leads_to_its_file(name: str, place: str, *, folder: Path) -> None:
    blob = pull_into_ollama(folder, place, f"GGUF of {place}".encode())

    assert find_model_path(name) == blob
    assert name in {each.removesuffix(":latest") for each in ollama_models()}
    assert find_model_path(str(blob)) == blob


def manifest(change: Callable[[list[dict[str, str]]], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        path = folder / "manifests" / LIBRARY / "tiny" / "latest"
        value = json.loads(path.read_text(encoding="utf-8"))
        change(value["layers"])
        path.write_text(json.dumps(value), encoding="utf-8")

    return spoil


def unlink(folder: Path) -> None:
    for path in (folder / "blobs").iterdir():
        path.unlink()


def cut(folder: Path) -> None:
    (folder / "manifests" / LIBRARY / "tiny" / "latest").write_text("{", encoding="utf-8")


@each_row(
    (
        "ollama:",
        lambda _: None,
        "ollama: is no name of a model of Ollama; such a name is ollama:NAME, ollama:NAME:TAG or ollama:OWNER/NAME",
    ),
    ("ollama:../../tiny", lambda _: None, "ollama:../../tiny is no name of a model of Ollama; "),
    ("ollama:a/b/c/d", lambda _: None, "ollama:a/b/c/d is no name of a model of Ollama; "),
    ("ollama:tiny:2b", lambda _: None, "there is no ollama:tiny:2b in FOLDER; there are: ollama:tiny:latest"),
    ("ollama:tiny", unlink, "ollama:tiny is not complete: FOLDER/blobs/sha256-"),
    ("ollama:tiny", cut, "/tiny/latest is not valid JSON"),
    ("ollama:tiny", manifest(lambda layers: layers.clear()), "has 0 files of weights, not one; run ollama pull tiny"),
    ("ollama:tiny", manifest(lambda layers: layers.append(layers[1])), "has 2 files of weights, not one; run "),
    (
        "ollama:tiny",
        manifest(lambda layers: layers[1].update(digest="sha256:../x")),
        " of ollama:tiny names no valid SHA-256; run ollama pull tiny",
    ),
    (
        "ollama:tiny",
        manifest(lambda layers: layers[2].update(mediaType="application/vnd.ollama.image.adapter")),
        "ollama:tiny has an adapter (such as LoRA), which Octavo does not read",
    ),
)
def test_what_cannot_be_found_is_one_sentence(
    name: str, spoil: Callable[[Path], object], sentence: str, *, folder: Path
) -> None:
    pull_into_ollama(folder, f"{LIBRARY}/tiny/latest", b"GGUF")
    spoil(folder)

    with pytest.raises(ModelLoadError) as caught:
        find_model_path(name)

    assert sentence in str(caught.value).replace(str(folder), "FOLDER")


def test_without_a_folder_it_says_where_one_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if ollama_folder() is None:  # but for a machine where its service is installed
        with pytest.raises(ModelLoadError, match="Ollama has no folder of models here; set OLLAMA_MODELS to it"):
            find_model_path("ollama:tiny")
    monkeypatch.setenv("OLLAMA_MODELS", "/nowhere")
    with pytest.raises(ModelLoadError, match="here; OLLAMA_MODELS is /nowhere, which has none"):
        find_model_path("ollama:tiny")
    monkeypatch.delenv("OLLAMA_MODELS")

    blob = pull_into_ollama(tmp_path / ".ollama" / "models", f"{LIBRARY}/tiny/latest", b"GGUF")
    assert find_model_path("ollama:tiny") == blob
