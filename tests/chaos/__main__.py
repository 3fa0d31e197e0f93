"""`make chaos`: real processes are killed, stopped and cut off, and every answer is compared. It prints a table.

Exit status: 0, every target was reached; 1, one was not; 2, the arguments make no sense.
"""

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.result import Result, added_up
from tests.chaos.rows import ROWS, Row
from tests.chaos.scale import SHORT, Scale
from tests.chaos.table import in_words, machine, table_of
from tests.support.run_file import OtherCodeError, RunFile

FOLDER = "tests/chaos"


def main(words: Sequence[str] | None = None) -> int:
    """Do what the arguments say; return the exit status."""
    parser = _parser()
    arguments = parser.parse_args(words)
    try:
        file = RunFile(arguments.resume, Result, FOLDER)
    except (OtherCodeError, OSError) as error:
        parser.error(str(error))
    scale = SHORT if arguments.short else Scale(minutes=arguments.minutes)
    chosen = [row for row in ROWS if not arguments.only or row.name in arguments.only]
    rows = [row for row in chosen if pieces_of(row, scale, arguments.piece)]
    begin_s = time.monotonic()
    try:
        asyncio.run(play(rows, scale, file, arguments.piece))
    except KeyboardInterrupt:
        print(
            "stopped" + (f"; the same command goes on with what {arguments.resume} lacks" if arguments.resume else "")
        )
    finally:
        file.close()
    totals = [(row, *total_of(row, scale, file.finished, arguments.piece)) for row in rows]
    print(table_of(totals))
    print(f"\n{machine()}; {(time.monotonic() - begin_s) / 60:.1f} minutes")
    for row, result, _ in totals:
        for text in result.wrong + result.missed:
            print(f"{row.name}: {text}")
        for text, count in result.refusals.items():
            print(f"{row.name}: refused {count} times: {text}")
    return int(not all(result.is_kept and is_complete for _, result, is_complete in totals))


def pieces_of(row: Row, scale: Scale, text: str = "") -> list[str]:
    """Return the pieces of a row that have a text in their names."""
    return [piece for piece in row.pieces(scale) if text in piece]


async def play(rows: Sequence[Row], scale: Scale, file: RunFile[Result], text: str) -> None:
    """Run the pieces of rows that a file lacks, and keep them there."""
    for row in rows:
        known = {each.piece for each in file.finished if each.row == row.name}
        todo = [piece for piece in pieces_of(row, scale, text) if piece not in known]
        if todo:
            async for result in row.play(todo, scale):
                file.add(result)
                print(f"{row.name}, {result.piece}: {in_words(result)}; {result.seconds:.0f} s", flush=True)


def total_of(row: Row, scale: Scale, finished: Sequence[Result], text: str = "") -> tuple[Result, bool]:
    """Return the results of a row, added up, and whether all its pieces are there that have a text in their names."""
    pieces = pieces_of(row, scale, text)
    results = [each for each in finished if each.row == row.name and each.piece in pieces]
    return added_up(row.name, results), len(results) == len(pieces)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").split("\n")[0])
    names = [row.name for row in ROWS]
    parser.add_argument("--only", choices=names, nargs="+", metavar="ROW", help=f"some rows: {', '.join(names)}")
    parser.add_argument(
        "--minutes", type=float, default=15.0, metavar="M", help="of each row of streams (default: %(default)g)"
    )
    parser.add_argument("--piece", default="", metavar="TEXT", help="only pieces whose names have this text")
    parser.add_argument("--short", action="store_true", help="a part of each row, a minute in all")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep finished pieces there, and leave them out")
    return parser


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # of the scheduler in this process: faults are what this is about
    sys.exit(main())
