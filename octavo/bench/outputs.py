"""Where the report goes, and whether it can go there: known before the load runs."""

from dataclasses import dataclass
from pathlib import Path

from octavo.bench.errors import BenchError

STDOUT = Path("-")

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class Outputs:
    """What is written beside the table.

    Attributes:
        json: The file of the JSON report; "-": stdout, the table then goes to stderr. None: none.
        with_samples: Whether it has every request.
        plot: The picture's file; None: none.
    """

    json: Path | None
    with_samples: bool
    plot: Path | None

    def check_writable(self) -> None:
        """Refuse paths that cannot be written; what is there stays as it is.

        Raises:
            BenchError: with the path and the reason.
        """
        for path in (self.json, self.plot):
            if path is not None and path != STDOUT:
                _check_writable(path)


def _check_writable(path: Path) -> None:
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}") from error
    if is_new:
        path.unlink()
