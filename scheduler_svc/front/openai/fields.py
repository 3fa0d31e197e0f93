"""Every field that is carried, with its type; ranges are the native API's to check.

other_fields.py has the fields without effect and those that are refused; field_reader.py reads JSON. Any other field is
unknown. docs/reference/openai-fields.md is made from this and from the tables.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.text.json_text import shown_json


class FailFastList(FailFast):
    """Ends the check of a list at its first mistake: a million of them take seconds. In unions it must be hashable."""

    __hash__ = object.__hash__


Texts = Annotated[list[str], FailFastList()]
TokenIds = Annotated[list[int], FailFastList()]


class RequestFields(BaseModel):
    """Fields of any request. A field that is absent or null is unset."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    model: str | None = Field(None, description="Name of the served model; any other name returns 404.")


class Message(BaseModel):
    """One message of a conversation; `content` is a text, or a list of parts that are texts."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str = Field(
        description=(
            "Author of the message. `developer` becomes `system` if the chat template does not support it; other roles "
            "that the template does not support are rejected."
        )
    )
    content: str | list[Any] | None = Field(
        None, description="A string, or a list of parts of type text. Images, audio and files are rejected."
    )
    name: str | None = Field(
        None,
        description="Name of the author. Most chat templates omit it; then several names with one role are rejected.",
    )
    tool_call_id: str | None = Field(
        None, description="The call that a result belongs to. Results are put in the order of their calls."
    )
    tool_calls: list[Any] | None = Field(
        None, description="The assistant's tool calls. Rejected if the chat template does not support them."
    )
    reasoning_content: str | None = Field(
        None, description="The assistant's reasoning. Most chat templates omit that of earlier turns, or all of it."
    )
    reasoning: str | None = Field(None, description="Alias of `reasoning_content`, as in vLLM.")


Messages = Annotated[list[Message], FailFastList()]


class StreamOptions(BaseModel):
    """What a stream has beside its text."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class TemplateFields(BaseModel):
    """What a chat template gets beside the messages."""

    tools: list[Any] | None = Field(None, description="Functions that the model may call; passed to the chat template.")
    add_generation_prompt: bool | None = Field(
        None, description="Whether the prompt ends with the start of the assistant's turn. Default: true."
    )
    reasoning_effort: str | None = Field(
        None,
        description=(
            "How much to think: given to the chat template as `reasoning_effort`, `enable_thinking` and `thinking` "
            "(false: `none`). If it reads none of these, the field is named in the header `x-octavo-ignored-fields`."
        ),
    )
    verbosity: str | None = Field(None, description="Given to the chat template, or named in that header.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Extra variables for the chat template, such as `enable_thinking`."
    )


class DecodingFields(RequestFields):
    """What every API of OpenAI's has. What is unset gets the model's default, else the native API's."""

    temperature: float | None = Field(None, description="0: greedy decoding.")
    top_p: float | None = Field(
        None, description="Nucleus sampling: keep the most likely tokens whose probabilities add up to this."
    )
    frequency_penalty: float | None = Field(
        None, description=("Makes tokens less likely for each time they occur in the output.")
    )
    presence_penalty: float | None = Field(None, description="Makes tokens that are in the output less likely.")
    logit_bias: dict[str, float] | None = Field(
        None, description="Bias added to the logits of tokens, by token id; at most 300."
    )
    seed: int | None = Field(None, description="Equal seeds give equal outputs; negative values are allowed.")
    stop: str | Texts | None = Field(
        None, description=("Stop strings: the output ends before the first of these; at most 16.")
    )
    stream: bool | None = Field(None, description="Whether to stream the answer as server-sent events.")
    top_k: int | None = Field(None, description="Sample from this many of the most likely tokens; 0 or -1: all.")
    min_p: float | None = Field(None, description="Drop tokens less likely than this fraction of the most likely one.")
    typical_p: float | None = Field(None, description="Typical sampling, up to this probability.")
    repetition_penalty: float | None = Field(
        None, description=("Makes tokens that are in the prompt or the output less likely.")
    )
    no_repeat_ngram_size: int | None = Field(
        None, description="No run of so many tokens comes twice in prompt and output; at most 64."
    )
    min_tokens: int | None = Field(None, description="Minimum number of output tokens.")
    ignore_eos: bool | None = Field(None, description="Continue after end-of-sequence tokens.")
    stop_token_ids: TokenIds | None = Field(None, description="Stop tokens: the output ends at the first of these.")
    include_stop_str_in_output: bool | None = Field(None, description="Include the stop string in the text.")
    skip_special_tokens: bool | None = Field(None, description="Omit special tokens from the text. Default: true.")
    bad_words: Texts | None = Field(None, description="Strings that never appear in the output.")
    allowed_token_ids: TokenIds | None = Field(None, description="The only tokens that may be generated.")
    banned_token_ids: TokenIds | None = Field(None, description="Tokens that are never generated (specific to Octavo).")
    priority: int | None = Field(None, description="With --policy priority, smaller values are served first.")
    cache_salt: str | None = Field(None, description="Prompts share cached blocks only if their salts are equal.")
    speculate: bool | None = Field(
        None, description="False: one token a step, also where the server speculates (specific to Octavo)."
    )
    min_delta_interval_ms: int | None = Field(
        None, description="Minimum time between two events of a stream, in ms; range 0 to 10,000 (specific to Octavo)."
    )
    request_id: str | None = Field(
        None, description=("Part of the answer's `id`; it takes precedence over X-Request-Id.")
    )


class SamplingFields(DecodingFields):
    """What completions and chats have in common."""

    max_tokens: int | None = Field(
        None, description="Maximum number of tokens to generate. Default: 16 in completions, as many as fit in chats."
    )
    n: int | None = Field(None, description="Number of choices. At temperature 0 they are equal and computed once.")
    stream_options: StreamOptions | None = Field(
        None, description="`include_usage`, `continuous_usage_stats`; `include_obfuscation` must be false."
    )
    response_format: Any = Field(
        None,
        description=(
            "What the answer looks like: `text`, `json_object`, or `json_schema`. A schema holds with `strict` true; "
            "otherwise a chat asks for it in the last message of the user, and a completion is refused."
        ),
    )
    # vLLM's
    structured_outputs: Any = Field(
        None, description="One of `json`, `regex`, `choice`, `grammar` (Lark), `json_object`: the output follows it."
    )
    guided_json: Any = Field(None, description="Older name of `structured_outputs.json`.")
    guided_regex: Any = Field(None, description="Older name of `structured_outputs.regex`.")
    guided_choice: Any = Field(None, description="Older name of `structured_outputs.choice`.")
    guided_grammar: Any = Field(None, description="Older name of `structured_outputs.grammar`.")
    prompt_logprobs: int | None = Field(
        None, description=("Log-probabilities of the prompt tokens, with this many alternatives.")
    )
    return_token_ids: bool | None = Field(None, description="Whether to return the token ids of prompt and outputs.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Write tokens in `logprobs` as `token_id:ID` instead of their text."
    )
    use_beam_search: bool | None = Field(
        None, description="A beam search; its width is `beam_width`, else `best_of`, else `n`."
    )
    beam_width: int | None = Field(None, description="Width of the beam search (specific to Octavo).")
    length_penalty: float | None = Field(None, description="Beam search only: above 0 favours long outputs.")
    early_stopping: bool | Literal["never"] | None = Field(
        None, description="Beam search only: when the search stops, as in transformers (specific to Octavo)."
    )


class CompletionFields(SamplingFields):
    """Of /v1/completions."""

    prompt: Any = Field(None, description="A string, token ids, or a list of either: n choices for each.")
    best_of: int | None = Field(None, description="Number of outputs to generate; the n most likely are returned.")
    echo: bool | None = Field(
        None, description=("Start the text with the prompt; with max_tokens 0 return the prompt alone.")
    )
    logprobs: int | None = Field(None, description="Log-probabilities, with this many alternatives for each token.")
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds its special tokens to text prompts. Default: true."
    )


class ChatFields(SamplingFields, TemplateFields):
    """Of /v1/chat/completions."""

    messages: Messages = Field(description="The conversation: messages with roles, names, tool calls and tool results.")
    max_completion_tokens: int | None = Field(
        None, description=("Maximum number of tokens to generate. Default: as many as fit.")
    )
    logprobs: bool | None = Field(None, description="Whether to return log-probabilities.")
    top_logprobs: int | None = Field(None, description="Number of alternatives for each token, with `logprobs`.")
    include_reasoning: bool | None = Field(
        None, description="Whether the answer includes the model's reasoning (vLLM's field). Default: true."
    )
    tool_choice: Any = Field(
        None, description="auto, none (the model gets no tools), required, or the function that is called."
    )
    parallel_tool_calls: bool | None = Field(None, description="False: the answer has one call at most.")


class TokenizeFields(RequestFields, TemplateFields):
    """Of /tokenize."""

    prompt: str | None = Field(None, description="A text.")
    messages: Messages | None = Field(None, description="A conversation, instead of a string.")
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds its special tokens to the text. Default: true."
    )
    return_token_strs: bool | None = Field(None, description="Whether to return the tokens as strings too.")


class DetokenizeFields(RequestFields):
    """Of /detokenize."""

    tokens: TokenIds = Field(description="Token ids.")


class PoolingFields(RequestFields):
    """What /v1/embeddings, /v1/rerank and /v1/score have in common."""

    truncate_prompt_tokens: int | None = Field(
        None,
        description="Cut inputs that have more tokens; -1: more than the model takes. Default: they are rejected.",
    )
    priority: int | None = Field(None, description="With --policy priority, smaller values are served first.")
    request_id: str | None = Field(
        None, description="Part of the answer's `id`; it takes precedence over X-Request-Id."
    )


class EmbeddingFields(PoolingFields):
    """Of /v1/embeddings."""

    input: Any = Field(None, description="A string, token ids, or a list of either, of at most 2,048.")
    dimensions: int | None = Field(
        None, description="Length of the vectors; for models that were trained for it (Matryoshka)."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="`float`: numbers. `base64`: float32, little-endian. Default: float."
    )
    prompt_name: str | None = Field(
        None,
        description="Which prompt of the model, such as `query`, to put before texts. Default: the model's own.",
    )


class RerankFields(PoolingFields):
    """Of /v1/rerank."""

    query: str = Field(description="What the documents are to answer.")
    documents: list[Any] = Field(description="Strings, or objects with `text`; at most 2,048.")
    top_n: int | None = Field(None, description="How many results to return, best first. Default: all.")
    return_documents: bool | None = Field(None, description="Whether results have their document. Default: true.")


class ScoreFields(PoolingFields):
    """Of /v1/score."""

    text_1: str | Texts = Field(description="The first text of each pair: one for all, or a list.")
    text_2: str | Texts = Field(description="The second text of each pair, or a list of them; at most 2,048.")


class UnloadAdapterFields(RequestFields):
    """Of /v1/unload_lora_adapter."""

    lora_name: str = Field(description="Name of the adapter.")
    lora_int_id: int | None = Field(None, description="Ignored: adapters have names only.")


class LoadAdapterFields(RequestFields):
    """Of /v1/load_lora_adapter."""

    lora_name: str = Field(description="Name for requests, 1 to 256 characters.")
    lora_path: str = Field(
        description=(
            "A name of executors' --lora, or a path in a folder of their --lora-dir: relative to it, or absolute."
        )
    )
    load_inplace: bool | None = Field(
        None, description="Whether the name may stand for another adapter until now. Default: false."
    )


# SamplingParams of vLLM that say how it hands out what it makes.
_OF_VLLMS_OUTPUTS = ("detokenize", "output_kind", "skip_clone", "flat_logprobs")


class GenerateFields(CompletionFields):
    """Of /inference/v1/generate: those of a completion, with `token_ids` and `sampling_params` in vLLM's shape."""

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, sent: dict[str, Any]) -> dict[str, Any]:
        params = sent.get("sampling_params")
        if not isinstance(params, dict | None):
            raise InvalidFieldError("sampling_params", shown_json(params), "an object")
        inner = {name: value for name, value in params.items() if name not in _OF_VLLMS_OUTPUTS} if params else {}
        outer = {name: value for name, value in sent.items() if name not in ("sampling_params", "token_ids")}
        return {**inner, **outer, "prompt": sent.get("token_ids"), "return_token_ids": True}


class UpdateWeightsFields(RequestFields):
    """Of /update_weights, if the weights are in a folder."""

    weight_dir: str | None = Field(
        None, description="A folder in executors' --weights-dir, relative to it or absolute, with safetensors files."
    )
    update_info: dict[str, Any] | None = Field(None, description="May have weight_dir.")
    weight_version: str | None = Field(
        None,
        description="The SHA-256 digest that the weights must have, 64 hexadecimal digits. Other names are ignored.",
    )


class WeightTransferFields(RequestFields):
    """Of /init_weight_transfer_engine and /start_weight_update."""

    init_info: dict[str, Any] | None = Field(None, description="Empty, or backend disk or http.")
    is_checkpoint_format: bool | None = Field(
        None, description="True, or unset: tensors have the names of the checkpoint."
    )
