"""How numbers of things are said in sentences for people."""


def counted(number: int, noun: str) -> str:
    """Return "1 block", "2 blocks": the noun's plural takes an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration_text(milliseconds: int) -> str:
    """Return a span of time, such as "0.042 s", "12.3 s" or "3 min 5 s"."""
    seconds = milliseconds / 1000
    if seconds < 1:
        return f"{seconds:.3f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{milliseconds // 60_000:,} min {milliseconds // 1000 % 60} s"
