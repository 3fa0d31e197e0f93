import re
from pathlib import Path

import pytest

from octavo.bench.config import BenchError, DatasetName
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
    (b'{"prompt": "a", "json_schema": "{}"}', '"json_schema" is no object'),
    (b"\xff", "it is not UTF-8 text"),
)
def test_what_is_no_dataset_is_refused_with_the_line(content: bytes, what: str, *, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(BenchError) as refused:
        load_dataset(path)
    assert what in str(refused.value)


# Of what stands below the instruction of each prompt: how many words, and how many lines.
SIZES = {
    DatasetName.CHAT: (range(1), range(1)),
    DatasetName.CODE: (range(50, 1000), range(40, 121)),
    DatasetName.COPY: (range(150, 401), range(1, 41)),
    DatasetName.SCHEMA: (range(25, 101), range(1, 3)),
}


@each_row(*DatasetName)
def test_the_prompts_of_a_name_are_what_it_says(name: DatasetName) -> None:
    entries = load_dataset(name.path)
    assert 16 <= len(entries) <= 24
    assert len({entry.prompt for entry in entries}) == len(entries)
    for entry in entries:
        instruction, _, text = entry.prompt.partition("\n\n")
        assert len(text.split()) in SIZES[name][0], entry
        assert len(text.splitlines()) in SIZES[name][1], entry
        assert 3 <= len(instruction.split()) <= 40, entry
        # A token has three characters or more in such texts, so all fits a model of 2,048 tokens.
        assert entry.max_tokens is not None
        assert len(entry.prompt) / 3 + entry.max_tokens < 2048, entry
        if name is DatasetName.CODE:  # what has to be changed is there, and the whole file fits the answer
            assert any(quoted in text for quoted in re.findall("`(.+?)`", instruction)), entry
            assert entry.max_tokens > len(text) / 5, entry
        assert (entry.json_schema is not None) == (name is DatasetName.SCHEMA)
        if entry.json_schema is not None:
            fields = list(entry.json_schema["properties"])
            assert 5 <= len(fields) <= 12, entry
            assert f"as JSON with {', '.join(fields)}." in instruction
