"""`octavo embed`: lines in, vectors out."""

import json
from pathlib import Path

import numpy as np
import pytest

from octavo.client import Client
from octavo.errors import InternalError
from tests.support.each_row import each_row
from tests.unit.octavo.stand_in import StandIn
from tests.unit.octavo.test_cli import run


async def test_each_line_becomes_a_vector(stand_in: StandIn, tmp_path: Path) -> None:
    file, array = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    file.write_bytes("one\r\nthree\nzw\u00f6lf".encode())
    to_stdout = await run("embed", str(file), "--address", stand_in.address)
    assert (to_stdout.status, to_stdout.stderr) == (0, "")
    assert [json.loads(line) for line in to_stdout.stdout.splitlines()] == [[3.0], [5.0], [5.0]]
    lines = tmp_path / "vectors.jsonl"
    for output in (array, lines):
        ended = await run("embed", "-", "--output", str(output), "--address", stand_in.address, stdin="one\nthree\n")
        assert (ended.status, ended.stdout, ended.stderr) == (0, "", "")
    assert lines.read_text() == "[3.0]\n[5.0]\n"
    loaded = np.load(array)
    assert (loaded.dtype, loaded.tolist()) == (np.float32, [[3.0], [5.0]])


@each_row(
    (b"one\n\ntwo", "line 2 of - is empty; every line must have a text"),
    (b"", "line 1 of - is empty; every line must have a text"),
    (b"\xff", "standard input is not UTF-8 text"),
    (b"refuse", "sampling_params.top_p is 2; it must be at most 1"),
    (b"full", "the waiting queue is full"),
)
async def test_a_file_that_cannot_be_embedded_is_one_sentence(content: bytes, words: str, *, stand_in: StandIn) -> None:
    ended = await run("embed", "-", "--address", stand_in.address, stdin=content)
    assert (ended.status, ended.stdout) == (1, "")
    assert words in ended.stderr
    assert ended.stderr.count("\n") == 1


async def test_an_answer_with_too_few_scores_is_an_error_of_ours(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        with pytest.raises(InternalError, match="0 bytes for 1 inputs of 1 numbers"):
            await client.score("q", "d")
