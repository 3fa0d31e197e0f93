"""Checks JSON text while it arrives, one character at a time. Strict: accepts what `JSON.parse` accepts anywhere."""

import json
import re
from enum import Enum

# Where the scanner is in the grammar.
VALUE = "a value"
FIRST_ITEM = "a value or ]"
KEY = "a key"
FIRST_KEY = "a key or }"
COLON = ":"
NEXT = ", or the end"  # of the object or list around it
STRING = "in a string"
ESCAPE = "behind a backslash"
LITERAL = "in a literal"
NUMBER = "in a number"
END = "nothing"

_WHITESPACE = " \t\n\r"
_DIGITS = "0123456789"
_HEX_DIGITS = "0123456789abcdefABCDEF"
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_PLAIN_RUN = re.compile(r'[^"\\\x00-\x1f]*')


def _to(state: str, characters: str) -> dict[str, str]:
    return dict.fromkeys(characters, state)


_EXPONENT = _to("e", "eE")
_NUMBER = {
    "-": _to("0", "0") | _to("1", "123456789"),
    "0": _to(".", ".") | _EXPONENT,
    "1": _to("1", _DIGITS) | _to(".", ".") | _EXPONENT,
    ".": _to("fraction", _DIGITS),
    "fraction": _to("fraction", _DIGITS) | _EXPONENT,
    "e": _to("sign", "+-") | _to("exponent", _DIGITS),
    "sign": _to("exponent", _DIGITS),
    "exponent": _to("exponent", _DIGITS),
}
_WHOLE_NUMBERS = ("0", "1", "fraction", "exponent")

# Deeper than any arguments, and shallow enough for every parser that reads them later.
MAX_DEPTH = 200


class JsonScanner:
    """Checks one object or list.

    Attributes:
        state: What comes next, one of the constants above; END: the value is complete.
    """

    __slots__ = ("_is_key", "_number", "_open", "_rest", "state")

    def __init__(self) -> None:
        self.state = VALUE
        self._open: list[str] = []
        self._is_key = False
        self._rest = ""  # of a literal; of the four digits of \u
        self._number = ""

    @property
    def depth(self) -> int:
        """The number of open objects and lists."""
        return len(self._open)

    def expects_another_key(self, depth: int) -> bool:
        """Return whether the next key belongs to an object that has other keys already, inside `depth` - 1 others."""
        return self.state is KEY and len(self._open) == depth

    @property
    def unreadable_end(self) -> str:
        """What makes the JSON invalid whatever follows: a bracket that does not fit, behind an open string."""
        quote = '"' if self.state in (STRING, ESCAPE) else ""
        if self.state is ESCAPE and not self._rest:
            quote = '""'
        return quote + ("]" if self._open[-1] == "{" else "}")

    def plain_run(self, text: str, position: int) -> int:
        """Return the end of the characters from `position` on that change nothing, as they are inside a string."""
        if self.state is not STRING:
            return position
        match = _PLAIN_RUN.match(text, position)
        return position if match is None else match.end()

    def take(self, character: str) -> bool:
        """Read a character; return whether it fits. If not, the text is not JSON, and the scanner is unusable."""
        state = self.state
        if state is STRING:
            return self._take_in_string(character)
        if state is ESCAPE:
            return self._take_escape(character)
        if state is LITERAL:
            return self._take_literal(character)
        if state is NUMBER:
            following = _NUMBER[self._number].get(character)
            if following is not None:
                self._number = following
                return True
            if self._number not in _WHOLE_NUMBERS:
                return False
            state = self.state = NEXT
        if character in _WHITESPACE:
            return bool(self._open)
        if state is NEXT:
            return self._take_next(character)
        if state is COLON:
            self.state = VALUE
            return character == ":"
        if (state is FIRST_KEY and character == "}") or (state is FIRST_ITEM and character == "]"):
            return self._close()
        if state is KEY or state is FIRST_KEY:
            self._is_key, self.state = True, STRING
            return character == '"'
        return state is not END and self._begin_value(character)

    def _begin_value(self, character: str) -> bool:
        if character in "{[":
            self._open.append(character)
            self.state = FIRST_KEY if character == "{" else FIRST_ITEM
            return len(self._open) <= MAX_DEPTH
        if not self._open:
            return False  # only objects and lists are checked here
        if character == '"':
            self._is_key, self.state = False, STRING
        elif character in _LITERALS:
            self._rest, self.state = _LITERALS[character], LITERAL
        elif character == "-" or character in _DIGITS:
            self._number, self.state = ("1" if character in "123456789" else character), NUMBER
        else:
            return False
        return True

    def _take_in_string(self, character: str) -> bool:
        if character == '"':
            self.state = COLON if self._is_key else NEXT
        elif character == "\\":
            self._rest, self.state = "", ESCAPE
        return character >= " "

    def _take_escape(self, character: str) -> bool:
        if not self._rest:
            if character == "u":
                self._rest = "0000"
                return True
            self.state = STRING
            return character in '"\\/bfnrt'
        self._rest = self._rest[1:]
        if not self._rest:
            self.state = STRING
        return character in _HEX_DIGITS

    def _take_literal(self, character: str) -> bool:
        fits = character == self._rest[0]
        self._rest = self._rest[1:]
        if not self._rest:
            self.state = NEXT
        return fits

    def _take_next(self, character: str) -> bool:
        innermost = self._open[-1]
        if character == ",":
            self.state = KEY if innermost == "{" else VALUE
            return True
        return character == ("}" if innermost == "{" else "]") and self._close()

    def _close(self) -> bool:
        self._open.pop()
        self.state = NEXT if self._open else END
        return True


class Part(Enum):
    """What a piece of an object's text is."""

    KEY_END = "a key is complete"
    VALUE = "of a value"
    VALUE_END = "the end of a value"
    END = "the end of the object"
    OTHER = "anything else"
    INVALID = "no JSON"


class JsonObjectScanner:
    """Checks one object, and finds its own keys and values.

    Attributes:
        key: The last complete key.
    """

    def __init__(self) -> None:
        self.key = ""
        self._scanner = JsonScanner()
        self._key_text: list[str] = []
        self._is_in_value = False

    def expects_another_key(self, depth: int) -> bool:
        """See `JsonScanner.expects_another_key`."""
        return self._scanner.expects_another_key(depth)

    def plain_run(self, text: str, position: int) -> int:
        """See `JsonScanner.plain_run`."""
        return self._scanner.plain_run(text, position)

    def take(self, piece: str) -> Part:
        """Read one character, or a plain run. A number ends with the character behind it."""
        scanner = self._scanner
        depth, state = scanner.depth, scanner.state
        if not scanner.take(piece[0]):  # in a plain run all characters are alike
            return Part.INVALID
        if scanner.state is END:
            return Part.END
        if self._key_text:
            return self._take_in_key(piece)
        if self._is_in_value or (depth == 1 and state is VALUE and scanner.state is not VALUE):
            self._is_in_value = scanner.depth > 1 or scanner.state in (STRING, ESCAPE, LITERAL, NUMBER)
            return Part.VALUE if self._is_in_value else Part.VALUE_END
        if state in (KEY, FIRST_KEY) and scanner.state is STRING:
            self._key_text.append(piece)
        return Part.OTHER

    def _take_in_key(self, piece: str) -> Part:
        self._key_text.append(piece)
        if self._scanner.state is not COLON:
            return Part.OTHER
        self.key = json.loads("".join(self._key_text))
        self._key_text.clear()
        return Part.KEY_END


def is_json_object(text: str) -> bool:
    """Return whether the text is one JSON object and nothing else."""
    scanner = JsonScanner()
    return text.startswith("{") and all(map(scanner.take, text)) and scanner.state is END


def unreadable_end(beginning: str) -> str:
    """Return what makes the beginning of an object's text unreadable, also for clients that complete such beginnings.

    Some clients do so with all arguments of a stream, and run the tool with them (LangChain's `parse_partial_json`).
    """
    scanner, position = JsonScanner(), 0
    while position < len(beginning):
        scanner.take(beginning[position])
        position = max(scanner.plain_run(beginning, position + 1), position + 1)
    return scanner.unreadable_end
