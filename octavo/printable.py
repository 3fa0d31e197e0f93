"""Text of others, such as ids and messages of a server, as a terminal may show it."""


def printable(text: str) -> str:
    """Return text on one line that cannot steer a terminal: what is not printable becomes "�"."""
    return "".join(character if character.isprintable() else "�" for character in text)
