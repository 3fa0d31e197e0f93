"""Faults in the numerics id, the digest of the weights, and in what the scheduler does with both."""

from tests.mutants.fault import Fault

KINDS = ("tests/unit/scheduler_svc/core/dispatch/test_kinds.py",)
SPANS = ("tests/unit/scheduler_svc/request/test_provenance.py",)
ID = "tests/numerics/test_numerics_id.py"
TOLD = "tests/contract/test_numerics.py"
CODE = ("tests/unit/executor_svc/native/test_compiled_code.py",)
DIGEST = ("tests/unit/executor_svc/checkpoint/test_weights_digest.py",)

FAULTS = (
    Fault(
        "a moved group goes where least is to do, whatever its kind",
        "scheduler_svc/core/dispatch/placement.py",
        "if preferred := self.preferred(turn):",
        "if preferred := list[Ranked]():",
        KINDS,
    ),
    Fault(
        "a moved group waits for no budget of its kind",
        "scheduler_svc/core/dispatch/placement.py",
        "capacity.with_budget().obstacle(",
        "capacity.obstacle(",
        KINDS,
    ),
    Fault(
        "a core takes over a group that another kind made",
        "scheduler_svc/core/dispatch/placement.py",
        "if self._is_of_another_kind(assignment.group, capacity.core):",
        "if False:",
        KINDS,
    ),
    Fault(
        "an executor that brought nothing made a span",
        "scheduler_svc/request/provenance.py",
        "if span.begin != progress]",
        "]",
        SPANS,
    ),
    Fault(
        "a sink is told where a span begins and not how far the group has come",
        "scheduler_svc/engine/live_request.py",
        "self.sink.begin_span(provenance.latest)",
        "self.sink.begin_span(provenance.spans[-1])",
        SPANS,
    ),
    Fault(
        "a request that requires one kind goes on at another one",
        "scheduler_svc/core/step/admission.py",
        "if not group.requires_same_numerics:",
        "if True:",
        (f"{TOLD}::test_a_continuation_goes_on_at_the_kind_that_it_names_or_nowhere",),
    ),
    Fault(
        "an answer goes on with other weights",
        "scheduler_svc/front/api/generation.py",
        "if begun_with and weights and begun_with != weights:",
        "if False:",
        (f"{TOLD}::test_a_continuation_goes_on_at_the_kind_that_it_names_or_nowhere",),
    ),
    Fault(
        "a delta names each span again",
        "scheduler_svc/front/response.py",
        "for span in self._provenance.of_output(index, output.num_taken_tokens) if span[0] >= told]",
        "for span in self._provenance.of_output(index, output.num_taken_tokens)]",
        (f"{TOLD}::test_a_request_that_goes_on_at_another_kind_says_where",),
    ),
    Fault(
        "a continuation does not say who made the last of the answer",
        "octavo/streamed_answer.py",
        'numerics_id=latest.numerics_id if latest else "",',
        'numerics_id="",',
        ("tests/unit/octavo/test_resumption.py",),
    ),
    Fault(
        "executors that promise nothing are reproducible",
        "scheduler_svc/request/served_model.py",
        "if not (info.numerics_id and info.is_invariant)",
        "if not info.numerics_id",
        (f"{TOLD}::test_an_executor_that_is_not_invariant_is_not_reproducible",),
    ),
    Fault(
        "a request that goes on at another kind is told nothing",
        "scheduler_svc/front/api/generation_messages.py",
        "continued_on_other_numerics=response.was_continued_on_other_numerics,",
        "continued_on_other_numerics=False,",
        (f"{TOLD}::test_a_request_that_is_not_asked_says_only_that_it_was_continued",),
    ),
    Fault(
        "constants of the C library are no part of the numerics id",
        "executor_svc/native/compiled_code.py",
        '_PARTS = (".text", ".rodata", ".data")',
        '_PARTS = (".text",)',
        CODE,
    ),
    Fault(
        "the name of the compiler is a part of the numerics id",
        "executor_svc/native/compiled_code.py",
        "    hasher = hashlib.sha256()\n",
        "    hasher = hashlib.sha256(content)\n",
        CODE,
    ),
    Fault(
        "the number of ranks is no part of the numerics id",
        "executor_svc/numerics/identity.py",
        '"ranks": str(num_ranks), ',
        "",
        (f"{ID}::test_number_formats_and_ranks_are_kinds",),
    ),
    Fault(
        "torch is a part of the numerics id where it computes nothing",
        "executor_svc/numerics/identity.py",
        '!= {"C"}',
        "is not None",
        (f"{ID}::test_what_torch_is_counts_only_where_it_computes",),
    ),
    Fault(
        "an executor starts as invariant that is not",
        "executor_svc/models/selection.py",
        'if config.numerics == "invariant" and chosen.why_not_invariant is not None:',
        "if False:",
        (f"{ID}::test_settings_that_are_not_invariant_are_refused_if_it_is_wanted",),
    ),
    Fault(
        "the last piece of a tensor is no part of the digest of the weights",
        "executor_svc/checkpoint/weights_digest.py",
        "for begin in range(self.begin, self.end, PIECE_BYTES))",
        "for begin in range(self.begin, self.end - PIECE_BYTES + 1, PIECE_BYTES))",
        DIGEST,
    ),
    Fault(
        "names of tensors are no part of the digest of the weights",
        "executor_svc/checkpoint/weights_digest.py",
        "            _add(hasher, description)\n",
        "",
        DIGEST,
    ),
)
