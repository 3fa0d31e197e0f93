"""An executor for tests: the mirror table, a cache of histories, and a next token that is a pure function.

The cache holds, for each place in each block, the hash of the whole history up to there. A step that
would attend to a wrong, foreign or unwritten place fails the test.
"""

import bisect
import hashlib
import itertools
import zlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from functools import cache

import numpy as np
import numpy.typing as npt

from octavo.execution.v1 import step_pb2
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.batch_table import BatchTable, StepLayout
from octavo_shared.step_wire.step import (
    UNKNOWN_TOKEN,
    Adapter,
    AdapterLoaded,
    Float32Array,
    Fork,
    GrammarLoaded,
    Int32Array,
    PoolingOutput,
    PoolingTask,
    Step,
    StepResult,
    TokenCounts,
)
from octavo_shared.step_wire.table_columns import NO_ADAPTER, NO_GRAMMAR, BlockTables
from octavo_shared.step_wire.wire import decode_result, decode_step, encode_result, encode_step
from scheduler_svc.core.beam_search import BeamSearch, Candidates
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.request.outputs import FinishReason, Hypothesis
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions

# Why a grammar cannot be followed whose body begins with "broken".
BROKEN = "it is broken"

NextToken = Callable[[list[int], int], int]
"""The next token of a history, for an output index."""


def over_the_wire(step: Step) -> Step:
    """Return the step as the other side of the wire reads it."""
    return decode_step(step_pb2.ExecuteModelRequest.FromString(encode_step(step).SerializeToString()))


def result_over_the_wire(result: StepResult) -> StepResult:
    """Return the result as the other side of the wire reads it."""
    return decode_result(step_pb2.ExecuteModelResponse.FromString(encode_result(result).SerializeToString()))


def history_hashes(token_ids: list[int], beginning: int = 0) -> list[int]:
    """Return, for each position, the hash of the history up to and with it; `beginning`: of an adapter."""
    hashes = itertools.accumulate(
        token_ids, lambda h, token: zlib.crc32(token.to_bytes(4, "little"), h), initial=beginning
    )
    return list(hashes)[1:]


def hashed_next_token(vocab_size: int) -> NextToken:
    """Return a next token that depends on every token before it."""
    return lambda token_ids, output_index: (history_hashes(token_ids)[-1] + output_index * 7919) % vocab_size


def count_up(token_ids: list[int], output_index: int) -> int:
    """Continue by counting, for traces that people read: the next token is the last one plus 1.

    Output i counts in steps of i + 1, so that the outputs of a group differ.
    """
    return token_ids[-1] + 1 + output_index


def followed(token_id: int, grammar: Grammar | None, vocab_size: int) -> int:
    """Return what a grammar makes of a token: each one makes something else of it."""
    return token_id if grammar is None else (token_id + 1 + zlib.crc32(grammar.body)) % vocab_size


def content_of(adapter: Adapter) -> bytes:
    """Return the digest of what an executor finds at the source of an adapter."""
    return hashlib.sha256(adapter.source.encode()).digest()


def adapted(token_id: int, adapter: Adapter | None, vocab_size: int) -> int:
    """Return what an adapter makes of a token: each content makes something else of it."""
    return token_id if adapter is None else (token_id + 1 + zlib.crc32(content_of(adapter))) % vocab_size


def content_of_input(token_ids: Int32Array, salt: int) -> int:
    """Return what stands for the input of an encoder."""
    return zlib.crc32(token_ids.tobytes(), salt & 0xFFFFFFFF) % 97


def candidates_of(token_ids: list[int], num_candidates: int, vocab_size: int) -> Candidates:
    """Return the likeliest next tokens of a history; their log-probabilities depend on every token of it."""
    # Behind another history each hash differs by the same bits from what it is behind none.
    history, no_token = history_hashes(token_ids)[-1], bytes(4)
    hashes = _token_hashes(vocab_size) ^ np.uint32(zlib.crc32(no_token, history) ^ zlib.crc32(no_token))
    ranks = (hashes % 997).astype(np.uint16)
    likeliest = np.argsort(ranks, kind="stable")[:num_candidates].astype(np.int32)
    return Candidates(likeliest, (-0.01 - ranks[likeliest] / 200).astype(np.float32))


@cache
def _token_hashes(vocab_size: int) -> npt.NDArray[np.uint32]:
    return np.array([zlib.crc32(token.to_bytes(4, "little")) for token in range(vocab_size)], np.uint32)


def values_of(token_ids: list[int], token_type_ids: bytes, task: PoolingTask) -> Float32Array:
    """Return the vector, of 3 numbers, or the score of a text; it depends on every token and its type."""
    history = zlib.crc32(bytes([task]) + token_type_ids, history_hashes(token_ids)[-1])
    numbers = [history % 97 / 97, history % 89 / 89, history % 83 / 83]
    return np.array(numbers if task is PoolingTask.EMBED else numbers[:1], np.float32)


class ToyNetwork:
    """What toy executors send each other; `fails` says which transfers do, by the numbers that the fleet gave them."""

    def __init__(self, fails: Callable[[int], bool] = lambda number: False) -> None:
        self.contents: dict[int, list[dict[int, int]]] = {}
        self.taken: set[int] = set()
        self.cancelled: set[int] = set()
        self._fails = fails

    def is_cancelled(self, number: int) -> bool:
        """Return whether a transfer will never arrive."""
        return number not in self.taken and (number in self.cancelled or self._fails(number))


class ToyExecutor:
    """Runs steps in order, as an executor does, and checks every read of its cache.

    The loads of grammars and adapters take `num_load_steps` steps beside their own, if it tells their ends.
    """

    def __init__(
        self, limits: CoreLimits, next_token: NextToken, num_load_steps: int = 0, network: ToyNetwork | None = None
    ) -> None:
        self._network = network or ToyNetwork()
        self._sending: dict[int, list[int]] = {}
        self._receiving: dict[int, list[int]] = {}
        self._num_load_steps = num_load_steps
        self._loading: dict[int, int] = {}  # by grammar slot: steps until it is told
        self._loading_adapters: dict[int, int] = {}  # the same of adapters
        self._adapters: dict[int, bytes] = {}  # by adapter slot: the content that was told
        sizes = limits.max_num_seqs, limits.max_model_len, limits.block_size, limits.num_blocks
        more_pools = [(limits.block_size, pool.num_blocks) for pool in limits.more_groups]
        of_encoder = limits.block_size, limits.num_encoder_blocks, limits.max_encoder_tokens
        encoder_pool = of_encoder if limits.max_encoder_tokens else None
        self.table = BatchTable(*sizes, limits.num_grammar_slots, more_pools, limits.num_adapter_slots, encoder_pool)
        # By block as on the wire: what stands for the input there, and the number of the block.
        self._encoded: dict[int, tuple[int, int]] = {}
        self._inputs: dict[int, int] = {}  # by slot
        self.layout: StepLayout | None = None
        self._limits = limits
        self._next_token = next_token
        self._cache: dict[int, dict[int, int]] = {}
        self._host: dict[int, dict[int, int]] = {}
        self._states: dict[
            int, dict[int, int]
        ] = {}  # by slot: the hash of the tokens that it has taken, by their number

    def execute(self, step: Step) -> StepResult:
        """Run a step that came over the wire; the answer goes back over it."""
        received = over_the_wire(step)
        layout = self.layout = self.table.apply(received.delta)
        loaded = self._loaded(received) if self._limits.tells_loads else ()
        adapters_loaded = self._load_adapters(received)
        assert layout.num_tokens <= self._limits.max_num_batched_tokens, "the step is larger than its budget"
        self._begin_transfers(received)
        self._save_states(received)
        self._move_blocks(received)
        self._begin_states(received)
        self._encode(received, layout)
        spans = self._draft(layout)
        rows = list(zip(layout.slots.tolist(), layout.starts.tolist(), layout.lengths.tolist(), strict=True))
        for slot, start, length in rows:
            self._write(slot, start, start + length)
        for slot, start, length in rows:
            self._attend(slot, start, start + length)
            self._take_into_state(slot, start, start + len(spans.get(slot) or [0] * length))
        self._fork_states(received.delta.forks)
        self._fork_inputs(received.delta.forks)
        sampled_token_ids, counts, candidates = self._sample(layout, spans)
        self.table.resolve(layout, sampled_token_ids, counts)
        arrived, sent, cancelled = self._end_transfers()
        result = StepResult(
            received.epoch,
            received.step_id,
            sampled_token_ids,
            token_counts=counts,
            pooling_outputs=self._pool(received),
            grammars_loaded=loaded,
            adapters_loaded=adapters_loaded,
            arrived_transfers=arrived,
            sent_transfers=sent,
            cancelled_transfers=cancelled,
            candidate_token_ids=np.concatenate([c.token_ids for c in candidates]) if candidates else None,
            candidate_logprobs=np.concatenate([c.logprobs for c in candidates]) if candidates else None,
        )
        return result_over_the_wire(result)

    def _loaded(self, step: Step) -> tuple[GrammarLoaded, ...]:
        """Tell which loads end; nobody may follow a grammar, or drop it, before it was told."""
        delta = step.delta
        used = [*delta.grammar_drops, *(entry.resources.grammar_slot for entry in delta.admissions)]
        assert not self._loading.keys() & used, "a step uses a grammar that is not loaded yet"
        assert not {load.slot for load in delta.grammar_loads} & {*used[len(delta.grammar_drops) :]}
        self._loading.update({load.slot: self._num_load_steps for load in delta.grammar_loads})
        ended = [slot for slot, num_left in self._loading.items() if not num_left]
        self._loading = {slot: num_left - 1 for slot, num_left in self._loading.items() if num_left}
        bodies = [grammar.body for slot in ended if (grammar := self.table.grammars[slot])]
        broken = [body.startswith(b"broken") for body in bodies]
        return tuple(GrammarLoaded(slot, BROKEN * is_broken) for slot, is_broken in zip(ended, broken, strict=True))

    def _load_adapters(self, step: Step) -> tuple[AdapterLoaded, ...]:
        """Tell which loads end; a load in a slot that nobody was told of may be given up, and never be used."""
        for slot in step.delta.adapter_drops:
            self._loading_adapters.pop(slot, None)
            self._adapters.pop(slot, None)
        used = {entry.resources.adapter_slot for entry in step.delta.admissions} - {None}
        assert used <= self._adapters.keys(), "a step uses an adapter that was not loaded"
        self._loading_adapters.update({load.slot: self._num_load_steps for load in step.delta.adapter_loads})
        told: list[AdapterLoaded] = []
        for slot, num_left in list(self._loading_adapters.items()):
            self._loading_adapters[slot] = num_left - 1
            if num_left:
                continue
            del self._loading_adapters[slot]
            adapter = self.table.adapters[slot]
            assert adapter is not None
            content = content_of(adapter)
            if adapter.source.startswith("broken") or adapter.digest not in (b"", content):
                told.append(AdapterLoaded(slot, error=BROKEN))
            else:
                self._adapters[slot] = content
                told.append(AdapterLoaded(slot, content))
        return tuple(told)

    def _begin_transfers(self, step: Step) -> None:
        network = self._network
        for send in step.blocks_to_send:
            assert send.transfer_id not in network.contents, "a number is used twice"
            network.contents[send.transfer_id] = [dict(self._cache[block]) for block in send.block_ids.tolist()]
            self._sending[send.transfer_id] = send.block_ids.tolist()
        for receive in step.blocks_to_receive:
            self._receiving[receive.transfer_id] = receive.block_ids.tolist()
            for block in receive.block_ids.tolist():
                self._cache[block] = {}
        network.cancelled.update(step.transfers_to_cancel)
        coming = {block for blocks in self._receiving.values() for block in blocks}
        leaving = {block for blocks in self._sending.values() for block in blocks}
        assert sum(map(len, self._receiving.values())) == len(coming), "a block has two transfers"
        live = self.table.live.nonzero()[0].tolist()
        first_ids = [(group, group.first_id) for group in self.table.groups]
        held = {first + block for group, first in first_ids for slot in live for block in self._held(group, slot)}
        assert not coming & held, "a block that is received is in a block table"
        moved = (step.blocks_to_swap_in, step.blocks_to_copy)
        written = {block for pairs in moved for block in pairs[:, 1].tolist()} | set(step.states_to_save[:, 2].tolist())
        assert not written & (coming | leaving), "a block of a transfer is written"
        assert not {*step.registered_blocks.tolist()} & coming, "a block has a name before its content has come"
        self._leaving = leaving

    def _held(self, group: BlockTables, slot: int) -> list[int]:
        window = next(
            pool.sliding_window
            for other, pool in zip(self.table.groups, self._limits.groups, strict=True)
            if other is group
        )
        start = int(self.table.num_scheduled_tokens[slot])
        first = max(0, start - window) // group.block_size if window else 0
        held: list[int] = group.of_slot(slot).tolist()[first:]
        return held

    def _end_transfers(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Take what has come, and tell what has ended."""
        network, arrived, sent, cancelled = self._network, list[int](), list[int](), list[int]()
        for number, blocks in self._receiving.items():
            if network.is_cancelled(number):
                cancelled.append(number)
            elif number in network.contents:
                self._cache.update(zip(blocks, network.contents[number], strict=True))
                network.taken.add(number)
                arrived.append(number)
        for number in self._sending:
            if number in network.taken:
                sent.append(number)
            elif network.is_cancelled(number):
                cancelled.append(number)
        for number in (*arrived, *sent, *cancelled):
            self._receiving.pop(number, None)
            self._sending.pop(number, None)
        return tuple(arrived), tuple(sent), tuple(cancelled)

    def _pool(self, step: Step) -> tuple[PoolingOutput, ...]:
        """Answer the texts, which share the budget of the step with its rows."""
        assert self.layout is not None
        num_tokens = self.layout.num_tokens + sum(len(text.token_ids) for text in step.pooling_inputs)
        assert num_tokens <= self._limits.max_num_batched_tokens, "texts are beyond the budget of the step"
        return tuple(
            PoolingOutput(text.number, values_of(text.token_ids.tolist(), text.token_type_ids, text.task))
            for text in step.pooling_inputs
        )

    def _encode(self, step: Step, layout: StepLayout) -> None:
        """Run the encoder; then every row reads the whole input that it began with."""
        num_tokens = layout.num_tokens + sum(given.num_tokens for given in step.encoder_inputs)
        assert num_tokens <= self._limits.max_num_batched_tokens, "inputs are beyond the budget of the step"
        for admission in step.delta.admissions if self.table.encoder else ():
            given = admission.encoder_input
            assert given is not None, "a sequence has no input"
            if given.token_ids is not None:
                content = content_of_input(given.token_ids, admission.cache_salt)
                self._encoded.update({block: (content, i) for i, block in enumerate(given.block_ids.tolist())})
            self._inputs[admission.slot] = self._encoded[int(given.block_ids[0])][0]
        self._fork_inputs(step.delta.beam_forks)
        for slot in layout.slots.tolist() if self.table.encoder else ():
            found = [self._encoded[block] for block in self._encoder_blocks(slot)]
            wanted = [(self._inputs[slot], index) for index in range(len(found))]
            assert found == wanted, f"slot {slot} attends to another input"

    def _encoder_blocks(self, slot: int) -> list[int]:
        tables = self.table.encoder
        assert tables is not None
        return [tables.first_id + int(block) for block in tables.of_slot(slot)]

    def _fork_inputs(self, forks: Iterable[Fork]) -> None:
        for fork in forks if self.table.encoder else ():
            self._inputs[fork.slot] = self._inputs[fork.parent_slot]

    def _move_blocks(self, step: Step) -> None:
        """Swap out, swap in, copy."""
        for device, host in step.blocks_to_swap_out.tolist():
            assert host >= 0, "the host pool has no such block"
            assert self._group_of(host, on_host=True) == self._group_of(device), "a wrong host pool"
            self._host[host] = dict(self._cache.get(device, {}))
        for host, device in step.blocks_to_swap_in.tolist():
            assert self._group_of(host, on_host=True) == self._group_of(device), "a wrong host pool"
            self._cache[device] = dict(self._host[host])
        copied = {target: dict(self._cache[source]) for source, target in step.blocks_to_copy.tolist()}
        self._cache.update(copied)

    def _save_states(self, step: Step) -> None:
        for slot, num_tokens, block in step.states_to_save.tolist():
            assert self._group_of(block) == len(self._limits.groups), "a block that holds no states"
            assert list(self._states[slot]) == [num_tokens], "a state of another position is saved"
            self._cache[block] = dict(self._states[slot])

    def _begin_states(self, step: Step) -> None:
        """Load the saved states of admissions; whatever another slot holds is read by no row that begins anew."""
        for admission in step.delta.admissions if self._limits.has_states else ():
            has_tokens = admission.num_computed_tokens > 0
            assert has_tokens is (admission.state_block is not None), "a sequence begins with a wrong state"
            if admission.state_block is not None:
                self._states[admission.slot] = dict(self._cache[admission.state_block])
        self._fork_states(step.delta.beam_forks)

    def _fork_states(self, forks: Iterable[Fork]) -> None:
        for fork in forks if self._limits.has_states else ():
            self._states[fork.slot] = self._states[fork.parent_slot]

    def _take_into_state(self, slot: int, start: int, end: int) -> None:
        if not self._limits.has_states:
            return
        hashes = self._hashes(slot, end)
        expected = {start: hashes[start - 1]}
        assert not start or self._states[slot] == expected, f"slot {slot} goes on from a state of other tokens"
        self._states[slot] = {end: hashes[-1]}

    def _group_of(self, block: int, *, on_host: bool = False) -> int:
        """Return of which cache group a block is, as on the wire."""
        sizes = [pool.num_host_blocks if on_host else pool.num_blocks for pool in self._limits.groups]
        return bisect.bisect(list(itertools.accumulate(sizes)), block)

    def _draft(self, layout: StepLayout) -> dict[int, list[int]]:
        """Feed drafts to the rows that may have several tokens; return what each of those rows proves, by slot.

        Drafts are right up to a number that depends on the history; those behind it are wrong.
        """
        spans: dict[int, list[int]] = {}
        rows = zip(layout.slots.tolist(), layout.starts.tolist(), layout.lengths.tolist(), strict=True)
        for slot, start, length in rows:
            if len(spans) == layout.num_decodes or layout.allowances is None:
                break
            history = self.table.token_ids[slot, : start + 1].tolist()
            span = spans[slot] = []
            for _ in range(1 + history_hashes(history)[-1] % length):
                span.append(self._next(slot, history + span))
            drafts = [*span[:-1], *((token_id + 1) % self._limits.vocab_size for token_id in [span[-1]] * length)]
            self.table.token_ids[slot, start + 1 : start + length] = drafts[: length - 1]
        return spans

    def _next(self, slot: int, history: list[int]) -> int:
        token_id = self._next_token(history, int(self.table.sampling["output_index"][slot]))
        adapter_slot, vocab_size = int(self.table.adapter_slot[slot]), self._limits.vocab_size
        if self.table.encoder:
            token_id = (token_id + self._inputs[slot]) % vocab_size
        adapter = None if adapter_slot == NO_ADAPTER else self.table.adapters[adapter_slot]
        return followed(adapted(token_id, adapter, vocab_size), self._grammar_of(slot), vocab_size)

    def _sample(
        self, layout: StepLayout, spans: dict[int, list[int]]
    ) -> tuple[Int32Array, TokenCounts | None, list[Candidates]]:
        """Return the tokens; with counts, if some row has several, and then none for beams."""
        has_counts = any(len(span) > 1 for span in spans.values())
        counts: list[int] = []
        token_ids: list[int] = []
        candidates: list[Candidates] = []
        rows = zip(layout.sample_slots.tolist(), layout.sample_positions.tolist(), strict=True)
        for row, (slot, position) in enumerate(rows):
            history = self.table.token_ids[slot, :position].tolist()
            if layout.num_candidates is not None and layout.num_candidates[row]:
                token_ids += [] if has_counts else [UNKNOWN_TOKEN]
                counts.append(0)
                count = int(layout.num_candidates[row])
                candidates.append(candidates_of([*self._beginning(slot), *history], count, self._limits.vocab_size))
            else:
                span = spans.get(slot) or [self._next(slot, history)]
                token_ids += span
                counts.append(len(span))
        return np.array(token_ids, np.int32), np.array(counts, np.uint8) if has_counts else None, candidates

    def _beginning(self, slot: int) -> list[int]:
        return [self._inputs[slot]] if self.table.encoder else []

    def _grammar_of(self, slot: int) -> Grammar | None:
        grammar_slot = int(self.table.grammar_slot[slot])
        return None if grammar_slot == NO_GRAMMAR else self.table.grammars[grammar_slot]

    def _places(self, group: BlockTables, slot: int, end: int) -> list[tuple[int, int]]:
        """Return the (block as on the wire, offset) of positions 0 to `end` - 1 in a cache group."""
        blocks, size = group.of_slot(slot).tolist(), group.block_size
        return [(group.first_id + blocks[position // size], position % size) for position in range(end)]

    def _hashes(self, slot: int, end: int) -> list[int]:
        token_ids = self.table.token_ids[slot, :end].tolist()
        assert min(token_ids) >= 0, f"slot {slot} would feed a token that is not known"
        content = self._adapters.get(int(self.table.adapter_slot[slot]), b"")
        return history_hashes(token_ids, zlib.crc32(content) + self._inputs.get(slot, 0))

    def _write(self, slot: int, start: int, end: int) -> None:
        for group in self.table.groups:
            written = list(zip(self._places(group, slot, end), self._hashes(slot, end), strict=True))[start:]
            assert not {block for (block, _), _ in written} & self._leaving, "a row writes a block that is sent"
            for (block, offset), history in written:
                self._cache.setdefault(block, {})[offset] = history

    def _attend(self, slot: int, start: int, end: int) -> None:
        expected = self._hashes(slot, end)
        for group, pool in zip(self.table.groups, self._limits.groups, strict=True):
            window = pool.sliding_window
            first = max(0, start - window + 1) if window else 0  # what the first token of the chunk sees
            found = [self._cache.get(block, {}).get(offset) for block, offset in self._places(group, slot, end)]
            assert found[first:] == expected[first:], f"slot {slot} attends to a wrong place in the cache"


def generate_alone(
    prompt: list[int],
    conditions: StopConditions,
    limits: CoreLimits,
    next_token: NextToken,
    output_index: int = 0,
    grammar: Grammar | None = None,
    adapter: Adapter | None = None,
    attended: int = 0,
) -> tuple[list[int], FinishReason]:
    """Return an output of a prompt by the plainest loop there is: no batch, no blocks, no scheduler.

    `attended` stands for the input of the encoder.
    """
    token_ids = list(prompt)
    while True:
        token_id = adapted(
            (next_token(token_ids, output_index) + attended) % limits.vocab_size, adapter, limits.vocab_size
        )
        token_ids.append(followed(token_id, grammar, limits.vocab_size))
        output = token_ids[len(prompt) :]
        is_eos = output[-1] in limits.eos_token_ids and not conditions.ignore_eos
        if is_eos or output[-1] in conditions.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) == conditions.max_tokens or len(token_ids) == limits.max_model_len:
            return output, FinishReason.LENGTH


def search_alone(
    prompt: list[int],
    params: BeamSearchParams,
    conditions: StopConditions,
    limits: CoreLimits,
    attended: Seq[int] = (),
) -> list[Hypothesis]:
    """Return the hypotheses of a beam search by the plainest loop there is."""
    stop_token_ids = conditions.stop_token_ids | (frozenset() if conditions.ignore_eos else set(limits.eos_token_ids))
    longest = conditions.length_limit(len(prompt), limits.max_model_len)
    search = BeamSearch(params, len(prompt), longest, frozenset(stop_token_ids), vocab_size=limits.vocab_size)
    while search.live:
        histories = [[*attended, *prompt, *beam.token_ids.tolist()] for beam in search.live]
        search.advance([candidates_of(tokens, search.num_candidates, limits.vocab_size) for tokens in histories])
    return search.finished_hypotheses()
