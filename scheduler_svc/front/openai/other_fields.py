"""The fields that are known and not carried: without effect, or refused.

A field without effect asks for nothing that could change an answer; one that is refused may be there with a value that
asks for nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldRule:
    """A field that is not carried.

    Attributes:
        neutral: Values that ask for nothing, beside null.
        why: Of a refused one: what is the case, and what serves instead. Of one without effect: why not.
    """

    neutral: tuple[object, ...]
    why: str


_LABEL = "a label for whoever runs the server; nothing here reads it"
_NO_GRAMMARS = "this release does not constrain what the model writes"
_TEXT_ONLY = "the model reads and writes text"
_ONE_MODEL = "nothing here chooses among services"

NO_EFFECT: Mapping[str, FieldRule] = {
    "user": FieldRule((), _LABEL),
    "safety_identifier": FieldRule((), _LABEL),
    "metadata": FieldRule((), _LABEL),
    "prompt_cache_key": FieldRule((), "prefixes are found by their content; `cache_salt` keeps them apart"),
    "prompt_cache_retention": FieldRule((), "prefixes stay cached until their blocks are needed"),
    "prompt_cache_options": FieldRule((), "prefixes stay cached until their blocks are needed"),
}

REFUSED: Mapping[str, FieldRule] = {
    "suffix": FieldRule(("",), "text is not filled in between two others"),
    "audio": FieldRule((), _TEXT_ONLY),
    "modalities": FieldRule((["text"],), _TEXT_ONLY),
    "function_call": FieldRule(("none",), "use `tools`"),
    "functions": FieldRule(([],), "use `tools`"),
    "moderation": FieldRule((), "nothing here judges texts"),
    "prediction": FieldRule((), "drafts of a text are not used"),
    "reasoning_effort": FieldRule((), "set what the chat template knows with `chat_template_kwargs`"),
    "verbosity": FieldRule((), "ask for it in the prompt"),
    "response_format": FieldRule(({"type": "text"},), _NO_GRAMMARS),
    "service_tier": FieldRule(("auto", "default"), _ONE_MODEL),
    "store": FieldRule((False,), "nothing is stored"),
    "web_search_options": FieldRule((), "nothing here searches the web"),
    # vLLM's
    "continue_final_message": FieldRule((False,), "send the rendered text to /v1/completions"),
    "chat_template": FieldRule((), "programs of callers are never run"),
    "documents": FieldRule(([],), "send them with `chat_template_kwargs`"),
    "truncate_prompt_tokens": FieldRule((), "a prompt that is too long is refused, never cut"),
    "spaces_between_special_tokens": FieldRule((True,), "tokens become text as the tokenizer says"),
    "logits_processors": FieldRule(([],), "programs of callers are never run"),
    "prompt_embeds": FieldRule((), "a prompt is tokens"),
    "mm_processor_kwargs": FieldRule(({},), _TEXT_ONLY),
    "structured_outputs": FieldRule(({},), _NO_GRAMMARS),
    "guided_json": FieldRule((), _NO_GRAMMARS),
    "guided_regex": FieldRule((), _NO_GRAMMARS),
    "guided_choice": FieldRule((), _NO_GRAMMARS),
    "guided_grammar": FieldRule((), _NO_GRAMMARS),
    "guided_decoding_backend": FieldRule((), _NO_GRAMMARS),
    "guided_whitespace_pattern": FieldRule((), _NO_GRAMMARS),
    "kv_transfer_params": FieldRule(({},), "blocks do not move between executors"),
    "vllm_xargs": FieldRule(({},), "there are no plug-ins"),
    "lora_path": FieldRule((), "adapters are not supported; merge them into the model"),
}
