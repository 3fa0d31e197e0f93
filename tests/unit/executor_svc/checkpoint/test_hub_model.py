"""A model comes from a hub on loopback with the files that an executor reads, or is refused in one sentence."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from executor_svc.checkpoint.model_location import find_model_path
from octavo_shared.errors import ModelLoadError
from tests.support.each_row import each_row
from tests.support.hub import Hub, Repo, running_hub, use_hub

TINY = Repo(
    {
        "config.json": b"{}",
        "generation_config.json": b'{"a": 1}',
        "hf_quant_config.json": b'{"quantization": {}}',
        "tokenizer.json": b'{"b": 1}',
        "model.safetensors": b"weights",
        "pytorch_model.bin": b"the same",
        "consolidated.safetensors": b"the same again",
        "original/config.json": b"not ours",
        "README.md": b"read me",
    },
    revisions=("main", "v1"),
)
INDEX = b'{"weight_map": {"a": "x-1-of-2.safetensors", "b": "x-2-of-2.safetensors"}}'
SHARDS = {"x-1-of-2.safetensors": b"1", "x-2-of-2.safetensors": b"2", "y-3-of-3.safetensors": b"of another model"}
SHARDED = Repo({"config.json": b"{}", "model.safetensors.index.json": INDEX, **SHARDS})


GGUFS = Repo(
    {
        "README.md": b"read me",
        "mmproj-Q4_0.gguf": b"a part for pictures",
        "tiny-it-abliterated.q4_0.gguf": b"a variant",
        "tiny-it.Q4_0.gguf": b"in four bits",
        "big/tiny-Q8_0-00001-of-00002.gguf": b"one",
        "big/tiny-Q8_0-00002-of-00002.gguf": b"two",
        "tiny.gguf": b"without a name",
    }
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    repos = {
        "tiny": TINY,
        "sharded": SHARDED,
        "short": Repo({"config.json": b"{}", "model.safetensors.index.json": INDEX, "x-1-of-2.safetensors": b"1"}),
        "old": Repo({"config.json": b"{}", "pytorch_model.bin": b"weights"}),
        "gguf": GGUFS,
        "usual": Repo({"m-Q8_0.gguf": b"large", "m-Q4_K_M.gguf": b"usual"}),
        "single": Repo({"README.md": b"", "m-Q5_0.gguf": b"single"}),
        "both": replace(TINY, files={**TINY.files, "m-Q4_K_M.gguf": b"usual"}),
        "empty": Repo({}),
        "gated": replace(TINY, gated=True),
        "private": replace(TINY, token="secret"),
    }
    with running_hub(**repos) as hub:
        use_hub(hub, tmp_path / "hub", monkeypatch)
        monkeypatch.chdir(tmp_path)
        yield hub


def refused(model: str) -> str:
    with pytest.raises(ModelLoadError) as caught:
        find_model_path(model)
    return str(caught.value)


def test_only_what_an_executor_reads_is_downloaded(hub: Hub) -> None:
    found = {path.name: path.read_bytes() for path in find_model_path("org/tiny").rglob("*")}

    names = "config.json", "generation_config.json", "hf_quant_config.json", "tokenizer.json", "model.safetensors"
    assert found == {name: TINY.files[name] for name in names}
    assert sorted(path.name for path in find_model_path("org/both").iterdir()) == sorted(names)


def test_of_shards_those_that_the_index_names_are_downloaded(hub: Hub) -> None:
    names = sorted(os.listdir(find_model_path("org/sharded")))

    assert names == ["config.json", "model.safetensors.index.json", "x-1-of-2.safetensors", "x-2-of-2.safetensors"]


@each_row(
    ("org/gguf:Q4_0", ["tiny-it.Q4_0.gguf"]),
    ("org/gguf@main:q4_0", ["tiny-it.Q4_0.gguf"]),
    ("org/gguf:Q8_0", ["tiny-Q8_0-00001-of-00002.gguf", "tiny-Q8_0-00002-of-00002.gguf"]),
    ("org/gguf/tiny.gguf", ["tiny.gguf"]),
    ("org/usual", ["m-Q4_K_M.gguf"]),
    ("org/single@main", ["m-Q5_0.gguf"]),
    ("org/both:Q4_K_M", ["m-Q4_K_M.gguf"]),
    ("org/gguf/big/tiny-Q8_0-00001-of-00002.gguf", [f"tiny-Q8_0-0000{n}-of-00002.gguf" for n in (1, 2)]),
)
def test_of_gguf_files_the_one_that_is_named_is_downloaded(
    model: str, names: list[str], *, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(tmp_path / "hub", ignore_errors=True)

    path = find_model_path(model)

    assert path.name == names[0]
    assert sorted(each.name for each in path.parent.iterdir() if each.is_file()) == names
    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
        assert find_model_path(model) == path


def test_a_revision_is_named_behind_an_at_sign(hub: Hub) -> None:
    directory = find_model_path(f"org/tiny@{TINY.commit}")

    assert find_model_path("org/tiny@v1") == directory == find_model_path("org/tiny")


def test_a_private_model_is_found_with_its_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")

    assert find_model_path("org/private").name == TINY.commit


def test_what_is_complete_in_the_cache_needs_no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, sharded = find_model_path("org/tiny"), find_model_path("org/sharded")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")

    assert find_model_path("org/tiny") == tiny
    assert find_model_path("org/sharded") == sharded


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_what_is_not_complete_in_the_cache_needs_the_hub(name: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    (find_model_path("org/tiny") / name).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    assert refused("org/tiny").startswith("there is no directory org/tiny, and HF_HUB_OFFLINE is set, and no complete")


# What is asked for, the sentence.
REFUSED = [
    ("a b", "a b is neither a directory, nor a GGUF file, nor a hub id (NAME or ORGANISATION/NAME)"),
    (
        "org/none",
        "there is no directory org/none, and the hub has no model org/none; a private model needs HF_TOKEN",
    ),
    (
        "org/private",
        "there is no directory org/private, and the hub has no model org/private; a private model needs HF_TOKEN",
    ),
    ("org/tiny@v2", "there is no directory org/tiny@v2, and the hub model org/tiny has no revision v2"),
    ("org/gated", "org/gated is gated: accept its terms at {hub}/org/gated, and set HF_TOKEN"),
    (
        "org/old",
        "the hub model org/old has its weights as pytorch_model.bin, which Octavo does not read; it needs "
        "model.safetensors (or shards with model.safetensors.index.json), as written by save_pretrained of "
        "transformers",
    ),
    (
        "org/gguf",
        "the hub model org/gguf has GGUF files only; use one of org/gguf/tiny.gguf, org/gguf:Q4_0, org/gguf:Q8_0 for "
        "--model",
    ),
    (
        "org/gguf:Q5_0",
        "the hub model org/gguf has no complete GGUF file in Q5_0; it has org/gguf/tiny.gguf, org/gguf:Q4_0, "
        "org/gguf:Q8_0",
    ),
    ("org/tiny:Q4_0", "the hub model org/tiny has no complete GGUF file in Q4_0"),
    (
        "org/gguf/other.gguf",
        "the hub model org/gguf has no complete file other.gguf; it has org/gguf/tiny.gguf, org/gguf:Q4_0, "
        "org/gguf:Q8_0",
    ),
    (
        "org/none/x.gguf",
        "there is no file org/none/x.gguf, and the hub has no model org/none; a private model needs HF_TOKEN",
    ),
    ("org/empty", "the hub model org/empty is empty"),
    ("org/short", "the hub model org/short has no x-2-of-2.safetensors, which its model.safetensors.index.json lists"),
]


@each_row(*REFUSED)
def test_what_the_hub_does_not_have_for_us_is_refused(model: str, sentence: str, *, hub: Hub) -> None:
    assert refused(model) == sentence.format(hub=hub.url)


def test_nothing_of_what_is_no_model_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    refused("org/old")

    assert not (tmp_path / "hub").exists()


def test_without_a_network_it_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")

    assert refused("org/tiny") == (
        "there is no directory org/tiny, and the hub cannot be reached (ConnectError: [Errno 111] Connection "
        f"refused), and no complete org/tiny is in {tmp_path / 'hub'}; check the network, or use a model that is on "
        "this machine"
    )


def test_a_cache_that_cannot_be_written_is_named(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("a file, where the cache should be")

    assert refused("org/tiny").startswith("org/tiny cannot be written to ")


def test_without_the_hubs_library_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    assert refused("org/tiny") == (
        "org/tiny must be downloaded from the hub, which requires huggingface_hub: pip install '.[executor]' in a clone"
    )
