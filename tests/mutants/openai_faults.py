"""Faults in OpenAI's API: what is told of an answer, whom it is told, and what is refused."""

from tests.mutants.fault import Fault

PACKAGE = "scheduler_svc/front/openai"
ANSWERS = ("tests/contract/openai/test_answers.py",)
REFUSALS = ("tests/contract/openai/test_refusals.py",)
CONNECTIONS = ("tests/contract/openai/test_connections.py",)

TLS = ("tests/tls/test_openai.py",)

FAULTS = (
    Fault(
        "a choice of a greedy request is told once",
        f"{PACKAGE}/streaming.py",
        "for copy in range(self.num_copies)])",
        "for copy in range(1)])",
        ANSWERS,
    ),
    Fault(
        "tokens of outputs that are told several times count once",
        f"{PACKAGE}/answering.py",
        "num_outputs = sum(one.num_output_tokens for one in ended) * num_copies",
        "num_outputs = sum(one.num_output_tokens for one in ended)",
        ANSWERS,
    ),
    Fault(
        "an echo has no log-probabilities",
        f"{PACKAGE}/requests.py",
        "            params.prompt_logprobs = fields.logprobs\n",
        "            params.prompt_logprobs = 0\n",
        ANSWERS,
    ),
    Fault(
        "tokens of a character have offsets of their own",
        f"{PACKAGE}/logprobs.py",
        "self._offset += len(self._decoder.decode(bytes(self._tokens.texts.content(token_id))))",
        "self._offset += 1",
        ANSWERS,
    ),
    Fault(
        "a completion has no limit by default",
        f"{PACKAGE}/requests.py",
        "DEFAULT_COMPLETION_TOKENS = 16",
        "DEFAULT_COMPLETION_TOKENS = 17",
        ANSWERS,
    ),
    Fault(
        "a message lacks what OpenAI promises",
        f"{PACKAGE}/chat_outputs.py",
        'return {"role": "assistant", "content": output.text, "refusal": None}, finish_reason(output)',
        'return {"role": "assistant", "content": output.text}, finish_reason(output)',
        ANSWERS,
    ),
    Fault(
        "pieces lack the usage that is not known yet",
        f"{PACKAGE}/streaming.py",
        "b',\"usage\":null' if self._tells_usage",
        "b'' if self._tells_usage",
        ANSWERS,
    ),
    Fault(
        "a carried field goes nowhere",
        f"{PACKAGE}/requests.py",
        '"presence_penalty", "min_p", "typical_p"',
        '"presence_penalty", "typical_p"',
        ANSWERS,
    ),
    Fault(
        "a field that asks for nothing is refused",
        f"{PACKAGE}/field_reader.py",
        "if value is None or any(",
        "if value is None or all(",
        ANSWERS,
    ),
    Fault(
        "messages that a client sends back are refused",
        f"{PACKAGE}/messages.py",
        "if not _is_empty(value):",
        "if value not in _EMPTY:",
        ("tests/contract/openai/test_clients.py",),
    ),
    Fault(
        "a client that tokenizes does not hear the end-of-sequence token",
        f"{PACKAGE}/service_routes.py",
        "{**names, **model.tokenizer.special_tokens, ",
        "{**names, ",
        ANSWERS,
    ),
    Fault(
        "of two tokens with one text the last is told",
        f"{PACKAGE}/logprobs.py",
        "top.setdefault(name(other), max(value, _LEAST))",
        "top[name(other)] = max(value, _LEAST)",
        ("tests/unit/scheduler_svc/front/openai/test_logprobs.py",),
    ),
    Fault(
        "a stream tells the prompt's tokens in every piece",
        f"{PACKAGE}/completions.py",
        "            self._without_prompt.discard(index)\n",
        "",
        ANSWERS,
    ),
    Fault(
        "errors have the names of the native API",
        f"{PACKAGE}/errors.py",
        'name = native_field.removeprefix("sampling_params.")',
        "name = native_field",
        REFUSALS,
    ),
    Fault(
        "unknown fields are ignored in silence",
        f"{PACKAGE}/field_reader.py",
        "if ignored and self._unknown is UnknownFields.REFUSE:",
        "if False:",
        REFUSALS,
    ),
    Fault(
        "a foreign name of this machine is answered",
        f"{PACKAGE}/routes.py",
        "if self._settings.is_local and self._access is None and not is_local_host(hosts):",
        "if False:",
        REFUSALS,
    ),
    Fault(
        "a stream that failed ends as if it were complete",
        f"{PACKAGE}/sse.py",
        'await self._response.write(b"data: " + error.body + b"\\n\\n")',
        "await self._response.write(_DONE)",
        CONNECTIONS,
    ),
    Fault(
        "a request goes on without its client",
        "scheduler_svc/http/connections.py",
        "handler_cancellation=True,",
        "handler_cancellation=False,",
        CONNECTIONS,
    ),
    Fault(
        "elements of a body are not counted",
        "scheduler_svc/front/text/json_text.py",
        "MAX_ELEMENTS = 2**18",
        "MAX_ELEMENTS = 2**30",
        ("tests/contract/openai/test_refusals.py::test_what_is_no_json_is_refused",),
    ),
    Fault(
        "bodies together may take all memory",
        f"{PACKAGE}/body.py",
        "if self._num_bytes_left < 0:",
        "if False:",
        ("tests/contract/openai/test_hostile_bodies.py::test_bodies_that_are_on_their_way_are_bounded_together",),
    ),
    Fault(
        "everybody with a token sees the metrics",
        f"{PACKAGE}/routes.py",
        "if route.access is Access.OPERATORS and not identity.is_operator:",
        "if False:",
        TLS,
    ),
    Fault(
        "requests over HTTP belong to nobody",
        f"{PACKAGE}/routes.py",
        "            raise\n        set_identity(identity)\n",
        "            raise\n",
        TLS,
    ),
)
