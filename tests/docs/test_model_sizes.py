"""The sizes of docs/models.md are what an executor would take."""

import re

import torch

from executor_svc.cache.cache_engine import CacheShape
from executor_svc.models.quantized_linear import GROUP
from tests.docs.pages import REPOSITORY
from tests.support.each_row import each_row

_NUMBER = r"\s*([\d.]+)(?: B| GiB)? \|"
_ROW = re.compile(rf"^\| ([\w.-]+-[\d.]+[MB])(?: \(demo\))? \|{_NUMBER * 9}$", re.MULTILINE)
_NUM_TOKENS = 8192

ROWS = _ROW.findall((REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8"))


def test_all_rows_are_read() -> None:
    assert [name for name, *_ in ROWS][::8] == ["SmolLM2-135M", "Llama-3.1-70B"]


@each_row(*ROWS)
def test_sizes_are_those_that_the_formulas_give(row: tuple[str, ...]) -> None:
    billions, layers, kv_heads, head_size, *shown = row[1:]
    num_parameters = float(billions) * 1e9
    bytes_a_weight = (4, 2, 1 + 2 / GROUP)  # a scale of float16 for each group
    sizes = [num_parameters * size for size in bytes_a_weight]
    for dtype in (torch.float32, torch.bfloat16):
        shape = CacheShape(int(layers), 16, int(kv_heads), int(head_size), dtype)
        sizes.append(shape.bytes_per_block * (_NUM_TOKENS // 16))
    decimals = [len(text.partition(".")[2]) for text in shown]
    expected = [f"{size / 2**30:.{places}f}" for size, places in zip(sizes, decimals, strict=True)]
    assert list(shown) == expected
