"""What a terminal shows after bytes that were written to it, as text: for pages of the documentation."""

import re

_PIECE = re.compile(r"\x1b\[\??(?P<number>\d*)[\d;]*(?P<command>[A-Za-z])|(?P<character>.)", re.DOTALL)


def terminal_text(written: bytes, num_columns: int) -> str:
    """Return the lines of the screen and of what scrolled off it, without colours and blanks at their ends.

    Knows what rich and our commands write: text, line ends, the cursor up and to the right, and lines that are erased.
    """
    lines: list[list[str]] = [[]]
    row = column = 0
    for piece in _PIECE.finditer(written.decode()):
        number, command, character = int(piece["number"] or 1), piece["command"], piece["character"]
        if command == "A":
            row = max(0, row - number)
        elif command == "C":
            column = min(num_columns - 1, column + number)
        elif command == "K":
            lines[row].clear()
        elif character == "\r":
            column = 0
        elif character == "\n" or (character and column == num_columns):
            row, column = row + 1, 0
        if row == len(lines):
            lines.append([])
        if character and character not in "\r\n":
            lines[row] += " " * (column + 1 - len(lines[row]))
            lines[row][column] = character
            column += 1
    return "\n".join("".join(line).rstrip() for line in lines).rstrip()
