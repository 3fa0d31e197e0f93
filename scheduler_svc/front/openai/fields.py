"""Every field that is carried, with its type; ranges are the native API's to check.

other_fields.py has those without effect and those that are refused, and field_reader.py makes fields of JSON. All else
is unknown. docs/reference/openai-fields.md is made from this and from the tables.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field


class _FailFast(FailFast):
    """Ends the check of a list at its first mistake: a million of them take seconds. In unions it must be hashable."""

    __hash__ = object.__hash__


Texts = Annotated[list[str], _FailFast()]
TokenIds = Annotated[list[int], _FailFast()]


class RequestFields(BaseModel):
    """Fields of any request. A field that is absent or null is unset."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    model: str | None = Field(None, description="The name of the served model; another one is 404.")


class Message(BaseModel):
    """One message of a conversation; `content` is a text, or a list of parts that are texts."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str = Field(
        description="Of whom it is. `developer` is `system` if the chat template does not know it; another role that "
        "it does not know or leaves out is refused."
    )
    content: str | list[Any] | None = Field(
        None, description="A text, or a list of parts of type text. Images, audio and files are refused."
    )
    name: str | None = Field(
        None,
        description="Of the speaker. Most chat templates leave it out; then several names of one role are refused.",
    )
    tool_call_id: str | None = Field(
        None, description="The call that a result belongs to. Results come into the prompt in the order of their calls."
    )
    tool_calls: list[Any] | None = Field(
        None, description="Calls of the assistant. Refused if the chat template leaves them out."
    )
    reasoning_content: str | None = Field(
        None, description="What the assistant thought. Most chat templates leave out that of earlier turns, or all."
    )
    reasoning: str | None = Field(None, description="Another name of `reasoning_content`, as in vLLM.")


Messages = Annotated[list[Message], _FailFast()]


class StreamOptions(BaseModel):
    """What a stream has beside its text."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class TemplateFields(BaseModel):
    """What a chat template gets beside the messages."""

    tools: list[Any] | None = Field(None, description="Functions that the model may call; the chat template gets them.")
    add_generation_prompt: bool | None = Field(
        None, description="Whether the prompt ends with the beginning of the assistant's turn. Default: true."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables of the chat template, such as `enable_thinking`."
    )


class SamplingFields(RequestFields):
    """What completions and chats have in common. What is unset gets the model's default, else the native API's."""

    temperature: float | None = Field(None, description="0: always the likeliest token.")
    top_p: float | None = Field(None, description="Keep the likeliest tokens whose probabilities add up to this.")
    frequency_penalty: float | None = Field(None, description="Makes tokens less likely each time they come.")
    presence_penalty: float | None = Field(None, description="Makes tokens that are in the output less likely.")
    logit_bias: dict[str, float] | None = Field(
        None, description="Added to the logits of tokens, by token id; at most 300."
    )
    max_tokens: int | None = Field(
        None, description="Most tokens to make. Default: 16 in completions, as many as fit in chats."
    )
    n: int | None = Field(None, description="Number of choices. At temperature 0 they are equal, and computed once.")
    seed: int | None = Field(None, description="Equal seeds give equal outputs; a negative one is as good as any.")
    stop: str | Texts | None = Field(None, description="The output ends before the first of these; at most 16.")
    stream: bool | None = Field(None, description="Whether the answer comes in pieces, as server-sent events.")
    stream_options: StreamOptions | None = Field(
        None, description="`include_usage`, `continuous_usage_stats`; `include_obfuscation` must be false."
    )
    # vLLM's
    top_k: int | None = Field(None, description="Keep so many of the likeliest tokens; 0 or -1: all.")
    min_p: float | None = Field(None, description="Drop tokens less likely than this share of the likeliest one.")
    typical_p: float | None = Field(None, description="Keep the tokens of typical information up to this probability.")
    repetition_penalty: float | None = Field(None, description="Makes tokens of prompt and output less likely.")
    min_tokens: int | None = Field(None, description="Fewest tokens of an output.")
    ignore_eos: bool | None = Field(None, description="Go on after end-of-sequence tokens.")
    stop_token_ids: TokenIds | None = Field(None, description="The output ends at the first of these tokens.")
    include_stop_str_in_output: bool | None = Field(None, description="Leave the stop string in the text.")
    skip_special_tokens: bool | None = Field(None, description="Keep special tokens out of the text. Default: true.")
    bad_words: Texts | None = Field(None, description="Strings that the output never holds.")
    allowed_token_ids: TokenIds | None = Field(None, description="The only tokens that may come.")
    banned_token_ids: TokenIds | None = Field(None, description="Tokens that never come (Octavo's own).")
    priority: int | None = Field(None, description="Smaller is served first, with --policy priority.")
    cache_salt: str | None = Field(None, description="Prompts share cached blocks only with equal salts.")
    min_delta_interval_ms: int | None = Field(
        None, description="Least time between two events of a stream, in ms; range 0 to 10,000 (Octavo's own)."
    )
    request_id: str | None = Field(None, description="Part of the answer's `id`; it wins over X-Request-Id.")
    prompt_logprobs: int | None = Field(None, description="Log-probabilities of the prompt, with so many alternatives.")
    return_token_ids: bool | None = Field(None, description="Token ids of prompt and outputs beside their texts.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Tokens in `logprobs` are called `token_id:ID`, and not by their text."
    )
    use_beam_search: bool | None = Field(
        None, description="A beam search; its width is `beam_width`, else `best_of`, else `n`."
    )
    beam_width: int | None = Field(None, description="Width of the beam search (Octavo's own).")
    length_penalty: float | None = Field(None, description="Beams only: above 0 favours long ones.")
    early_stopping: bool | Literal["never"] | None = Field(
        None, description="Beams only: when the search ends, as in transformers (Octavo's own)."
    )


class CompletionFields(SamplingFields):
    """Of /v1/completions."""

    prompt: Any = Field(
        None, description="A text, token ids, or a list of either: a choice for each, and for each of n."
    )
    best_of: int | None = Field(None, description="Outputs to make; the n likeliest are returned.")
    echo: bool | None = Field(None, description="Begin the text with the prompt; with max_tokens 0 nothing follows.")
    logprobs: int | None = Field(None, description="Log-probabilities, with so many alternatives for each token.")
    add_special_tokens: bool | None = Field(
        None, description="Whether text prompts get the special tokens that the tokenizer adds. Default: true."
    )


class ChatFields(SamplingFields, TemplateFields):
    """Of /v1/chat/completions."""

    messages: Messages = Field(description="The conversation: texts, with roles, names, calls and results of tools.")
    max_completion_tokens: int | None = Field(None, description="Most tokens to make. Default: as many as fit.")
    logprobs: bool | None = Field(None, description="Whether to return log-probabilities.")
    top_logprobs: int | None = Field(None, description="Alternatives for each token, with `logprobs`.")
    include_reasoning: bool | None = Field(
        None, description="Whether the answer has what the model thinks (vLLM's). Default: true."
    )
    tool_choice: Any = Field(None, description="auto or none; none: the model gets no tools. Nothing can force a call.")
    parallel_tool_calls: bool | None = Field(None, description="Must be true: a model may call several tools at once.")


class TokenizeFields(RequestFields, TemplateFields):
    """Of /tokenize."""

    prompt: str | None = Field(None, description="A text.")
    messages: Messages | None = Field(None, description="A conversation, instead of a text.")
    add_special_tokens: bool | None = Field(
        None, description="Whether a text gets the special tokens that the tokenizer adds. Default: true."
    )
    return_token_strs: bool | None = Field(None, description="Tokens as the vocabulary writes them, too.")


class DetokenizeFields(RequestFields):
    """Of /detokenize."""

    tokens: TokenIds = Field(description="Token ids.")
