"""Each test has a cache of converted tokenizers of its own, and the user's stays as it is."""

from pathlib import Path

import pytest

from executor_svc.checkpoint.gguf import tokenizer_cache


@pytest.fixture(autouse=True)
def _own_tokenizer_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_cache, "user_cache_directory", lambda: tmp_path / "cache")
