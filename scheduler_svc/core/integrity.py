"""The invariants of `executor_planner.py` as assertions, for tests and debugging."""

import operator
from collections import Counter

from octavo_shared.step_wire.table_columns import NO_GRAMMAR as NO_SLOT
from scheduler_svc.core.sequence import SequenceStatus
from scheduler_svc.core.step.batch import running_sequences
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.slot_pool import SlotState
from scheduler_svc.core.step.swapping import NO_BLOCK


def check_integrity(planner: ExecutorPlanner, *, has_key: bool = True) -> None:
    """Assert every invariant that can be seen between two calls.

    Without the key of the hashes, `has_key` False, the hashes that a sequence carries are not computed again.
    """
    _check_slots(planner)  # first: the other checks go from slot to slot
    _check_slotted_things(planner)
    _check_blocks(planner)
    _check_host_blocks(planner)
    _check_lengths(planner)
    _check_written_blocks(planner)
    _check_registered_blocks(planner, has_key=has_key)
    _check_order(planner)
    _check_pooled(planner)


def _check_blocks(planner: ExecutorPlanner) -> None:
    """1: every block is free, cached, or named as often as its reference count says."""
    batch, slots = planner.batch, []
    for group in batch.running:
        slots += [slot for _, slot in planner.beam_batch.source_slots(group)]
    for index, of in enumerate(planner.blocks.groups):
        of.allocator.check_integrity()
        named: Counter[int] = Counter()
        for slot in slots:
            named.update(of.held(slot).tolist())
        for table in planner.swapped.pools[index].tables.values():
            named.update(block for block in table.device_blocks.tolist() if block != NO_BLOCK)
        named.update(planner.transfers.held(index))
        counted = {block: int(count) for block, count in enumerate(of.allocator.ref_counts.tolist()) if count}
        assert dict(named) == counted, f"block tables name {dict(named)}, reference counts are {counted}"
    if (encoder := planner.blocks.encoder) is not None:
        encoder.check_integrity(slots, (encoding for sent in planner.in_flight for encoding in sent.encodings))
    if planner.blocks.states is not None:
        held = planner.transfers.held(len(planner.blocks.wanted))
        planner.blocks.states.check_integrity((save for sent in planner.in_flight for save in sent.saves), held)


def _check_host_blocks(planner: ExecutorPlanner) -> None:
    """1, for the host pools; and every cache group has the same sequences there."""
    copies = [copy for sent in planner.in_flight for copy in sent.copies]
    for of, pool in zip(planner.blocks.groups, planner.swapped.pools, strict=True):
        named = Counter(copy.host_block for copy in copies if copy.host is of.host)
        of.host.check_integrity()
        for table in pool.tables.values():
            named.update(block for block in table.host_blocks.tolist() if block != NO_BLOCK)
        counted = {block: int(count) for block, count in enumerate(pool.host.ref_counts.tolist()) if count}
        assert dict(named) == counted, f"swapped groups name {dict(named)}, reference counts are {counted}"
        assert pool.tables.keys() == planner.swapped.tables.keys(), "a sequence is swapped out of some groups only"
    if (states := planner.swapped.states) is not None:
        assert planner.blocks.states is not None
        planner.blocks.states.host.check_integrity()
        assert states.blocks.keys() == planner.swapped.tables.keys(), "a sequence is swapped without its state"
        named = Counter({copy.host_block for copy in copies if copy.host is planner.blocks.states.host})
        named += Counter(states.blocks.values())
        counted = {block: int(count) for block, count in enumerate(states.host.ref_counts.tolist()) if count}
        assert dict(named) == counted, f"swapped sequences name states {dict(named)}, reference counts are {counted}"


def _check_slots(planner: ExecutorPlanner) -> None:
    """2: a running sequence has a live slot of its own, and every other slot is free."""
    batch, table = planner.batch, planner.table
    slots = [sequence.slot for sequence in running_sequences(batch.running)]
    assert len(set(slots)) == len(slots), "two running sequences share a slot"
    assert sorted([*slots, *batch.free_slots]) == list(range(planner.limits.max_num_seqs)), "a slot got lost"
    assert all(table.live[slot] for slot in slots), "a running sequence has no live slot"
    is_vacated = batch.is_vacated.nonzero()[0].tolist()
    assert sorted(batch.vacated_slots) == is_vacated, "the list of vacated slots and its column differ"
    for sequence in running_sequences(batch.running):
        assert batch.sequence_in_slot[sequence.slot] is sequence, "a slot belongs to another sequence"
        assert table.generation[sequence.slot] == sequence.generation, "a slot has another generation"
    num_claimed = sum(group.num_slots for group in batch.running) - len(slots)
    assert batch.num_claimed_slots == num_claimed, "the slots that running groups have a claim to are miscounted"
    assert batch.num_free_slots >= 0, "more slots are promised than there are"


def _check_slotted_things(planner: ExecutorPlanner) -> None:
    """9: a live slot names READY things only; a thing has as many followers as running sequences use it."""
    table, things = planner.table, planner.batch.things
    for pool in things.pools:
        (column, loaded), followers = pool.in_table(table), Counter[int]()
        for sequence in running_sequences(planner.batch.running):
            [wanted] = [pool.slot_of(key) for place, key in things.used_by(sequence.group) if place is pool] or [
                NO_SLOT
            ]
            named = int(column[sequence.slot])
            assert named == wanted, "a sequence uses a thing that its group did not ask for"
            if named != NO_SLOT:
                assert pool.states[named] is SlotState.READY, "a sequence uses a thing that is not loaded yet"
                followers[named] += 1
        assert loaded == pool.keys, "the things of the table are not those of the slots"
        assert pool.num_followers == [followers[slot] for slot in range(pool.num_slots)], "followers are miscounted"
        assert pool.num_loading == pool.states.count(SlotState.LOADING), "loads are miscounted"
        num_in_use = len(followers) + pool.num_loading
        assert pool.num_in_use == num_in_use, "slots in use are miscounted"
        present = [key for key in pool.keys if key is not None]
        assert pool.num_loaded == len(set(present)) == len(present), "a thing is loaded twice"
        are_empty = [state is SlotState.EMPTY for state in pool.states]
        assert are_empty == [key is None for key in pool.keys], "a slot is EMPTY and holds a thing, or the reverse"


def _check_lengths(planner: ExecutorPlanner) -> None:
    """3, 4 and 5: blocks cover what is computed; steps and sequences are within their limits."""
    batch, table, limits = planner.batch, planner.table, planner.limits
    for sequence in running_sequences(batch.running):
        slot, conditions = sequence.slot, sequence.group.stop_conditions
        for tables in table.groups:
            room = tables.counts[slot] * limits.block_size
            assert table.num_scheduled_tokens[slot] <= room, "tokens have no block"
        longest = conditions.length_limit(sequence.group.num_prompt_tokens, limits.max_model_len)
        assert table.num_tokens[slot] <= longest, "a sequence is too long"
        num_rows = batch.num_inflight_rows(sequence)
        num_open = table.num_tokens[slot] - table.num_known_tokens[slot] - num_rows
        is_counted = sequence.group.beams is not None or table.num_open_tokens[slot] == num_open
        assert is_counted, "a sequence has other open tokens than its rows in flight"
        knows_all = batch.table.num_known_tokens[slot] == table.num_tokens[slot]
        assert knows_all or sequence.group.beams is None, "a beam waits for a token that no row samples"
    for step in planner.in_flight:
        num_pooled_tokens = sum(len(text.token_ids) for text in step.step.pooling_inputs)
        num_encoded_tokens = sum(encoding.num_tokens for encoding in step.encodings)
        num_tokens = int(step.layout.lengths.sum()) + num_pooled_tokens + num_encoded_tokens
        assert num_tokens <= limits.max_num_batched_tokens, "a step is over its budget"


def _check_written_blocks(planner: ExecutorPlanner) -> None:
    """7: no sequence writes into a block that other sequences name, unless it computes the block for them."""
    batch, table, size = planner.batch, planner.table, planner.limits.block_size
    computed_for_others = {p.lead.sequence: p.num_shared_tokens for p in planner.prefills.running if p.lead}
    for sequence in running_sequences(batch.running):
        slot = sequence.slot
        position = int(table.num_scheduled_tokens[slot] - table.num_open_tokens[slot])
        may_share = slot in batch.shares_last_block or sequence.group in planner.beam_batch.ready
        may_share |= position < computed_for_others.get(sequence, 0)
        if not may_share and sequence.group.beams is None:
            for group in planner.blocks.groups:
                written = group.tables.block_ids[slot, position // size : group.tables.counts[slot]]
                assert (group.allocator.ref_counts[written] == 1).all(), "a shared block would be written"


def _check_registered_blocks(planner: ExecutorPlanner, *, has_key: bool) -> None:
    """8: a registered block in a block table has the hash of the tokens of that table."""
    cache, batch = planner.blocks.prefix_cache, planner.batch
    if cache is None:
        return
    for group in planner.blocks.groups:
        assert group.prefix_cache is not None
        group.prefix_cache.check_integrity()
    running = {sequence.slot for sequence in running_sequences(batch.running)}
    assert cache.writers <= running, "a slot that was vacated is waited for"
    for sequence in running_sequences(batch.running):
        slot = sequence.slot
        num_tokens = min(int(batch.table.num_known_tokens[slot]), int(batch.num_computed_tokens[slot]))
        if has_key:
            hashes: list[bytes] = []
            planner.blocks.extend_names(hashes, batch.table.token_ids[slot, :num_tokens], sequence.group)
        else:
            hashes = sequence.block_hashes[: num_tokens // planner.blocks.block_size]
        for group in planner.blocks.groups:
            assert group.prefix_cache is not None
            for index, block in enumerate(group.held(slot).tolist(), int(group.first_blocks[slot])):
                registered = group.prefix_cache.hash_of(block)
                is_named = hashes[index : index + 1] == [registered]
                assert registered is None or is_named, "a registered block is not full, or holds something else"
        assert all(map(operator.eq, sequence.block_hashes, hashes)), "a sequence carries hashes of other tokens"


def _check_order(planner: ExecutorPlanner) -> None:
    """Groups are in order, and their sequences have the status of the group."""
    for groups in (planner.batch.running, planner.swapped.groups, planner.preempted.groups):
        orders = [planner.batch.order_of(group) for group in groups]
        assert orders == sorted(orders), "groups are out of order"
        assert orders == [group.order for group in groups], "the order of a group has changed"
    assert all(prefill.num_remaining_tokens for prefill in planner.prefills.running), "a prefill that is over goes on"
    for sequence in (sequence for group in planner.swapped for sequence in group.live_sequences):
        assert sequence.status is SequenceStatus.SWAPPED, "a sequence of a swapped group is somewhere else"
        assert sequence in planner.swapped.tables, "a swapped sequence has no table"
    assert all(group in planner.batch for group in planner.beam_batch.ready), "a search is ready that does not run"


def _check_pooled(planner: ExecutorPlanner) -> None:
    """Every text that runs is whole in one step in flight, and has neither a slot nor blocks."""
    in_flight = [group for sent in planner.in_flight for group in sent.pooling_groups]
    assert len(set(in_flight)) == len(in_flight), "two steps compute one text"
    for group in set(planner.batch.running).difference(planner.batch.with_slots):
        assert group in in_flight, "no step computes a text that was admitted"
        assert group.sequences[0].status is SequenceStatus.RUNNING, "a text that is computed is somewhere else"
        assert not group.sequences[0].has_slot, "a text has a slot"
    for sent in planner.in_flight:
        texts = [text.token_ids.tolist() for text in sent.step.pooling_inputs]
        wanted = [group.prompt_token_ids.tolist() for group in sent.pooling_groups]
        assert texts == wanted, "a step computes other texts than those of its groups"
