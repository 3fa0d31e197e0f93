"""Faults in OpenAI's API: what is told of an answer, whom it is told, and what is refused."""

from tests.mutants.fault import Fault

PACKAGE = "scheduler_svc/front/openai"
ANSWERS = ("tests/contract/openai/test_answers.py",)
REFUSALS = ("tests/contract/openai/test_refusals.py",)
CONNECTIONS = ("tests/contract/openai/test_connections.py",)

TLS = ("tests/tls/test_openai.py",)
HOSTILE = ("tests/contract/openai/test_hostile_http.py",)
SLOW_READERS = (f"{CONNECTIONS[0]}::test_who_does_not_read_holds_up_nobody_and_little_is_kept_for_them",)

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
        "errors have the names of the native API",
        f"{PACKAGE}/errors.py",
        'name = native_field.removeprefix("sampling_params.")',
        "name = native_field",
        REFUSALS,
    ),
    Fault(
        "unknown fields are ignored in silence",
        f"{PACKAGE}/fields.py",
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
    Fault(
        "who waits for 100 Continue waits for ever",
        f"{PACKAGE}/body.py",
        "    if expected is None or",
        "    if True or expected is None or",
        HOSTILE,
    ),
    Fault(
        "a stream to HTTP/1.0 has no end",
        f"{PACKAGE}/sse.py",
        "if request.version < HttpVersion11:",
        "if False:",
        HOSTILE,
    ),
    Fault(
        "a request of HTTP/2.0 on a line is answered",
        f"{PACKAGE}/routes.py",
        "if request.version not in (HttpVersion10, HttpVersion11):",
        "if False:",
        HOSTILE,
    ),
    Fault(
        "a compressed body may be hidden behind another coding",
        f"{PACKAGE}/body.py",
        'request.headers.getall("Transfer-Encoding", ())',
        "()",
        HOSTILE,
    ),
    Fault(
        "an error repeats a long line",
        "scheduler_svc/http/connections.py",
        "if isinstance(error, LineTooLong):",
        "if False:",
        HOSTILE,
    ),
    Fault(
        "names of ignored fields break the header",
        f"{PACKAGE}/fields.py",
        '_NOT_IN_HEADERS.sub("?", name[:64])',
        "name[:64]",
        REFUSALS,
    ),
    Fault(
        "much is kept for who does not read",
        "scheduler_svc/http/connections.py",
        "            transport.set_write_buffer_limits(high=_UNSENT_BYTES)\n",
        "",
        SLOW_READERS,
    ),
    Fault(
        "a stream is written ahead of its reader",
        f"{PACKAGE}/sse.py",
        "        await self._writer.drain()\n",
        "",
        SLOW_READERS,
    ),
    Fault(
        "the kernel keeps much for who does not read",
        "scheduler_svc/http/connections.py",
        "connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)",
        "pass",
        SLOW_READERS,
    ),
    Fault(
        "who takes nothing is waited for",
        "scheduler_svc/http/connections.py",
        "connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(stall_s * 1000))",
        "pass",
        (f"{CONNECTIONS[0]}::test_who_takes_nothing_is_cut_off",),
    ),
    Fault(
        "the bytes of what is no request are kept",
        "scheduler_svc/http/connections.py",
        "            error.__traceback__ = None\n",
        "            pass\n",
        HOSTILE,
    ),
    Fault(
        "the body of a refused request is kept",
        f"{PACKAGE}/routes.py",
        "            refusal.__traceback__ = None\n",
        "",
        HOSTILE,
    ),
)
