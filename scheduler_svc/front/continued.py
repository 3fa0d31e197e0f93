"""What a client has of an interrupted answer, as the front needs it to continue: texts, and how much was delivered."""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.front.text.output_text import OutputText, TextOptions
from scheduler_svc.front.text.tokenizer import Tokenizer
from scheduler_svc.request.outputs import Alternatives, FinishReason


@dataclass(frozen=True, slots=True)
class ContinuedText:
    """One output of the answer.

    Attributes:
        token_ids: Its tokens.
        logprobs: Log-probability of each; empty unless asked for.
        alternatives: The likeliest tokens in the place of each.
        decoder: Makes the text of what follows.
        num_characters: How much of it the client has.
        finish_reason: Why it had ended; None: it goes on.
        stop_string: The stop string that ended it; None: none did.
    """

    token_ids: list[int]
    logprobs: list[float]
    alternatives: Alternatives
    decoder: OutputText
    text: str
    num_characters: int
    finish_reason: FinishReason | None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class ContinuedAnswer:
    """The whole answer.

    Attributes:
        outputs: One for each output that is sampled; empty for a ranked answer, which begins anew.
        num_ranked: How many outputs of a ranked answer the client has, the best ones.
        prompt_logprobs: The prompt's log-probabilities that the client has.
        prompt_alternatives: The likeliest tokens in the place of each.
    """

    outputs: Sequence[ContinuedText]
    num_ranked: int
    prompt_logprobs: list[float]
    prompt_alternatives: Alternatives


def decode_again(
    token_ids: Sequence[int], tokenizer: Tokenizer, options: TextOptions
) -> tuple[OutputText, str, str | None, int]:
    """Make the text of tokens as it was made the first time, token by token.

    Returns: the decoder of further tokens, the text, the stop string that ended it if one did, and how many tokens
    were read until then.
    """
    decoder = OutputText(tokenizer, options)
    pieces: list[str] = []
    for num_read, token_id in enumerate(token_ids, 1):
        piece, stop_string = decoder.push(token_id)
        pieces.append(piece)
        if stop_string is not None:
            return decoder, "".join(pieces), stop_string, num_read
    return decoder, "".join(pieces), None, len(token_ids)
