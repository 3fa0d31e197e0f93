from pathlib import Path

import pytest

from octavo.bench.config import BenchError
from octavo.bench.plan import DatasetEntry, load_dataset
from tests.support.each_row import each_row


def test_lines_are_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Größe?", "max_tokens": 5, "source": "x"}\n\n{"prompt": "b"}\n', "utf-8")
    assert load_dataset(path) == [DatasetEntry("Größe?", 5), DatasetEntry("b", None)]


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}'.encode())
    assert load_dataset(path) == [DatasetEntry("a\u2028b\x85c", None), DatasetEntry("d", None)]


@each_row(
    (b"", "has no prompt"),
    (b'{"prompt": "a"}\nno json\n', "line 2 is not JSON"),
    (b'["a"]', 'line 1: no object with a text as "prompt"'),
    (b'{"prompt": ""}', "line 1: no object"),
    (b'{"prompt": [1, 2]}', "line 1: no object"),
    (b'{"prompt": "a", "max_tokens": 0}', '"max_tokens" is 0; it must be a whole number'),
    (b'{"prompt": "a", "max_tokens": true}', '"max_tokens" is True'),
    (b"\xff", "it is not UTF-8 text"),
)
def test_what_is_no_dataset_is_refused_with_the_line(content: bytes, what: str, *, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(BenchError) as refused:
        load_dataset(path)
    assert what in str(refused.value)
