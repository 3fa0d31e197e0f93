"""The fields that are known and not carried: without effect, or refused.

A field without effect could not change an answer; a refused field may be sent with a value that asks for nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldRule:
    """A field that is not carried.

    Attributes:
        neutral: Values that ask for nothing, beside null.
        is_told: Whether an answer names a field without effect in the header of ignored fields, if it is not neutral.
        why: Why a field is refused, and what serves instead; or why it has no effect.
    """

    neutral: tuple[object, ...]
    why: str
    is_told: bool = False


_LABEL = "a label for the operator; Octavo ignores it"
_TEXT_ONLY = "the model handles text only"
_ONE_MODEL = "there are no service tiers"

NO_EFFECT: Mapping[str, FieldRule] = {
    "user": FieldRule((), _LABEL),
    "safety_identifier": FieldRule((), _LABEL),
    "metadata": FieldRule((), _LABEL),
    "store": FieldRule((False,), "nothing is stored; named in `x-octavo-ignored-fields` if it is true", is_told=True),
    "prompt_cache_key": FieldRule((), "the prefix cache goes by content; use `cache_salt` to isolate requests"),
    "prompt_cache_retention": FieldRule((), "cached prefixes are kept until their blocks are needed"),
    "prompt_cache_options": FieldRule((), "cached prefixes are kept until their blocks are needed"),
}

# For APIs without a chat template.
NO_EFFECT_IN_COMPLETIONS: Mapping[str, FieldRule] = {
    name: FieldRule((), "in chats the chat template gets it", is_told=True)
    for name in ("reasoning_effort", "verbosity")
}

REFUSED: Mapping[str, FieldRule] = {
    "suffix": FieldRule(("",), "fill-in-the-middle is not supported"),
    "audio": FieldRule((), _TEXT_ONLY),
    "modalities": FieldRule((["text"],), _TEXT_ONLY),
    "function_call": FieldRule(("none",), "use `tools`"),
    "functions": FieldRule(([],), "use `tools`"),
    "moderation": FieldRule((), "there is no moderation"),
    "prediction": FieldRule((), "predicted outputs are not supported"),
    "service_tier": FieldRule(("auto", "default"), _ONE_MODEL),
    "web_search_options": FieldRule((), "web search is not supported"),
    # vLLM's
    "continue_final_message": FieldRule((False,), "send the rendered text to /v1/completions"),
    "chat_template": FieldRule((), "templates from clients are never run"),
    "documents": FieldRule(([],), "send them with `chat_template_kwargs`"),
    "truncate_prompt_tokens": FieldRule((), "a prompt that is too long is rejected, never truncated"),
    "spaces_between_special_tokens": FieldRule((True,), "detokenization always follows the tokenizer"),
    "logits_processors": FieldRule(([],), "code from clients is never run"),
    "prompt_embeds": FieldRule((), "prompts are token ids"),
    "mm_processor_kwargs": FieldRule(({},), _TEXT_ONLY),
    "guided_decoding_backend": FieldRule(("auto", "guidance"), "grammars are held by llguidance"),
    "guided_whitespace_pattern": FieldRule((), "white space is bounded by the server"),
    "kv_transfer_params": FieldRule(({},), "the scheduler decides which blocks go where"),
    "vllm_xargs": FieldRule(({},), "plug-ins are not supported"),
    "lora_path": FieldRule((), "name an adapter that is loaded as `model`"),
    # Cohere's and Jina's
    "max_tokens_per_doc": FieldRule((), "use `truncate_prompt_tokens`, which counts the query too"),
    "max_chunks_per_doc": FieldRule((), "use `truncate_prompt_tokens`"),
    "rank_fields": FieldRule((["text"],), "documents are texts, or objects with `text`"),
}
