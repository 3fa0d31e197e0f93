"""How numbers of things are said in sentences for people."""


def counted(number: int, noun: str) -> str:
    """Return "1 block", "2 blocks": the noun's plural takes an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
