"""How large a terminal has to be for `octavo top`."""

MIN_COLUMNS = 80
MIN_LINES = 20


def size_trouble(num_columns: int, num_lines: int) -> str | None:
    """Return one sentence for a terminal that is too small; None: it is large enough."""
    if num_columns >= MIN_COLUMNS and num_lines >= MIN_LINES:
        return None
    return (
        f"octavo top needs a terminal of {MIN_COLUMNS} columns and {MIN_LINES} lines; this one has {num_columns} and "
        f'{num_lines}: make it larger, or print a picture with "octavo top --once"'
    )
