"""What counts as another kind of kernels in Triton."""

from importlib.metadata import version

from executor_svc.numerics.identity import sources_digest, triton_parts
from tests.support.each_row import each_row

KERNEL = '"""A module."""\n\n\ndef add(x, y):\n    """Add."""\n    return x + y  # always\n'


@each_row(
    (KERNEL.replace("A module.", "Another text."), True),
    (KERNEL.replace("Add.", "Sum up.").replace("# always", "# mostly"), True),
    (KERNEL.replace("x + y", "y + x"), False),
    (KERNEL.replace("    return", "    x = 2 * x\n    return"), False),
)
def test_comments_are_no_kind_and_code_is(other: str, is_equal: bool) -> None:
    assert (sources_digest(other) == sources_digest(KERNEL)) == is_equal


def test_sources_are_told_apart_by_where_they_end() -> None:
    assert sources_digest("x = 1\n", "y = 2\n") != sources_digest("x = 1\ny = 2\n")


def test_the_parts_name_triton_and_all_kernels() -> None:
    parts = triton_parts()
    assert parts["triton"] == version("triton")
    assert len(parts["kernels"]) == 64
