"""Faults in the scheduler's core: blocks, prefix cache, preemption, swapping, beams, stopping."""

from tests.mutants.fault import Fault

CORE = "scheduler_svc/core"
UNIT = "tests/unit/scheduler_svc/core"

FAULTS = (
    # Blocks and copy-on-write
    Fault(
        "a freed block keeps its reference",
        f"{CORE}/block_allocator.py",
        "        counts = self.ref_counts[index] - 1\n",
        "        counts = self.ref_counts[index]\n",
        (f"{UNIT}/test_block_allocator.py",),
    ),
    Fault(
        "a registered block goes to the plain free list",
        f"{CORE}/block_allocator.py",
        "            unused = unused[~is_registered]\n",
        "            self._push(unused[is_registered])\n            unused = unused[~is_registered]\n",
        (f"{UNIT}/test_block_allocator.py",),
    ),
    Fault(
        "the head of a cached prefix is evicted before its tail",
        f"{CORE}/block_allocator.py",
        "        unused = index = block_ids.astype(np.intp)[::-1]\n",
        "        unused = index = block_ids.astype(np.intp)\n",
        (f"{UNIT}/test_scheduler_prefix_cache.py::test_the_tail_of_a_prefix_is_evicted_first",),
    ),
    Fault(
        "a cached block that is found again may still be evicted",
        f"{CORE}/block_allocator.py",
        "            self._cached_blocks.remove(index[counts == 0])\n",
        "            pass\n",
        (f"{UNIT}/test_block_allocator.py",),
    ),
    Fault(
        "the last of several sharers copies the block as well",
        f"{CORE}/growth.py",
        "        if allocator.ref_counts[shared] == 1:\n            return\n",
        "",
        (f"{UNIT}/test_scheduler_groups.py::test_of_n_sharers_all_but_one_get_a_copy_at_their_next_append",),
    ),
    Fault(
        "a fork writes into the block that it shares",
        f"{CORE}/growth.py",
        "            self._copy_if_shared(plan, slot, slot)\n",
        "",
        (f"{UNIT}/test_scheduler_groups.py::test_the_copies_replace_the_last_block_in_the_tables_of_their_writers",),
    ),
    Fault(
        "a copy goes out under the index of the next block",
        f"{CORE}/growth.py",
        "        plan.replaced_blocks.append((slot, index, own))\n",
        "        plan.replaced_blocks.append((slot, index - 1, own))\n",
        (f"{UNIT}/test_scheduler_groups.py",),
    ),
    Fault(
        "places for drafted tokens are not reserved",
        f"{CORE}/growth.py",
        "        lookahead = self._limits.num_lookahead_tokens\n",
        "        lookahead = 0\n",
        (f"{UNIT}/test_scheduler_sliding_window.py::test_a_decode_has_places_for_drafted_tokens_behind_its_next_one",),
    ),
    Fault(
        "the watermark is not kept back from admissions",
        f"{CORE}/block_manager.py",
        "            num_free -= self.num_watermark_blocks\n",
        "            pass\n",
        (f"{UNIT}/test_scheduler_order.py::test_admissions_leave_the_watermark_free",),
    ),
    Fault(
        "new blocks are taken before the cached ones of the same admission",
        f"{CORE}/block_manager.py",
        "            if len(blocks.found):\n                self.allocator.acquire(blocks.found)\n",
        "            pass\n",
        (
            f"{UNIT}/test_scheduler_prefix_cache.py"
            "::test_found_blocks_are_not_evicted_for_the_new_ones_of_the_same_admission",
        ),
    ),
    Fault(
        "a block stays when it falls out of the sliding window",
        f"{CORE}/batch.py",
        "            self.blocks.allocator.free(self.table.block_tables[slot, former:first])\n",
        "            pass\n",
        (f"{UNIT}/test_scheduler_sliding_window.py::test_blocks_that_fell_out_of_the_window_are_freed",),
    ),
    Fault(
        "a window slides one token too early",
        f"{CORE}/batch.py",
        "max(0, position - self._window + 1) // self.blocks.block_size)",
        "max(0, position - self._window + 2) // self.blocks.block_size)",
        (f"{UNIT}/test_scheduler_sliding_window.py::test_a_prompt_frees_its_blocks_while_it_is_computed",),
    ),
    # The prefix cache
    Fault(
        "the hash of a block does not depend on the block before it",
        f"{CORE}/prefix_cache.py",
        "blake2b(parent + block).digest()",
        "blake2b(block).digest()",
        (f"{UNIT}/test_prefix_cache.py",),
    ),
    Fault(
        "tenants find each other's prefixes",
        f"{CORE}/prefix_cache.py",
        'blake2b(cache_salt.to_bytes(8, "little"), key=self._key)',
        'blake2b(b"", key=self._key)',
        (f"{UNIT}/test_scheduler_prefix_cache.py::test_salts_do_not_share",),
    ),
    Fault(
        "an evicted block is still found",
        f"{CORE}/prefix_cache.py",
        "            del block_of_hash[hash_of_block[block_id]]\n",
        "            pass\n",
        (f"{UNIT}/test_prefix_cache.py",),
    ),
    Fault(
        "a request does not wait for a prefix that a step in flight computes",
        f"{CORE}/prefix_cache.py",
        "        self._being_written.update(hashes)\n",
        "",
        (f"{UNIT}/test_scheduler_prefix_cache.py::test_a_request_waits_for_a_prefix_that_a_step_in_flight_computes",),
    ),
    Fault(
        "a prefix hit leaves no token to compute",
        f"{CORE}/block_manager.py",
        "        return (len(sequence.token_ids) - 1) // self.block_size\n",
        "        return len(sequence.token_ids) // self.block_size\n",
        (f"{UNIT}/test_scheduler_prefix_cache.py",),
    ),
    # Preemption and the host pool
    Fault(
        "the first group is preempted instead of the last",
        f"{CORE}/decoding.py",
        "        victim = self._batch.running[-1]\n",
        "        victim = self._batch.running[0]\n",
        (f"{UNIT}/test_scheduler_recompute.py::test_last_arrival_is_preempted_first",),
    ),
    Fault(
        "a group that has the pool for itself fails while a step in flight may end a sequence",
        f"{CORE}/decoding.py",
        "        elif self._in_flight:\n            return False  # what comes in may end a sequence\n",
        "",
        (
            f"{UNIT}/test_scheduler_recompute.py"
            "::test_a_lone_group_does_not_fail_while_a_step_in_flight_may_end_a_sequence",
        ),
    ),
    Fault(
        "a preempted group forgets the tokens that are on their way",
        f"{CORE}/preemption.py",
        "        if num_late_tokens:\n            sequence.num_late_tokens",
        "        if False:\n            sequence.num_late_tokens",
        (f"{UNIT}/test_scheduler_late_tokens.py::test_late_token_of_a_preempted_sequence_is_delivered_once",),
    ),
    Fault(
        "a preempted group is queued again before its late tokens are there",
        f"{CORE}/preemption.py",
        "        complete = [group for group in self.late_groups if not group.has_late_tokens]\n"
        "        self.late_groups = [group for group in self.late_groups if group.has_late_tokens]\n",
        "        complete, self.late_groups = self.late_groups, []\n",
        (f"{UNIT}/test_scheduler_late_tokens.py",),
    ),
    Fault(
        "the output of a group that leaves is not found again",
        f"{CORE}/preemption.py",
        "                self._batch.register_blocks(slot)\n",
        "                pass\n",
        (f"{UNIT}/test_scheduler_prefix_cache.py::test_generated_tokens_are_found_too",),
    ),
    Fault(
        "a swap moves blocks that other groups name too",
        f"{CORE}/swapping.py",
        "        is_ours = device.ref_counts[distinct] == num_references\n",
        "        is_ours = device.ref_counts[distinct] >= num_references\n",
        (f"{UNIT}/test_scheduler_swap_shared.py::test_blocks_that_others_use_too_stay_on_the_device",),
    ),
    Fault(
        "outputs that come back from the host pool share the block that they write into",
        f"{CORE}/swapping.py",
        "is_shared=index < num_whole)",
        "is_shared=True)",
        (f"{UNIT}/test_scheduler_swap.py::test_a_shared_partial_block_is_copied_on_the_way_back",),
    ),
    Fault(
        "the host blocks of a group that came back stay taken",
        f"{CORE}/swapping.py",
        "            self.host.free(table.host_blocks[table.host_blocks != NO_BLOCK])\n"
        "        self.groups.remove(group)\n"
        "        return pairs, sequences\n",
        "        self.groups.remove(group)\n        return pairs, sequences\n",
        (f"{UNIT}/test_scheduler_swap.py",),
    ),
    # Forks, chunks, beams
    Fault(
        "a fork does not count its references on the shared blocks",
        f"{CORE}/prefills.py",
        "        batch.blocks.allocator.acquire(prefill.block_ids[first_block:], len(prefill.unborn))\n",
        "",
        (f"{UNIT}/test_scheduler_groups.py::test_forks_share_all_blocks_of_the_prompt",),
    ),
    Fault(
        "a sibling starts before the blocks that it shares are sent",
        f"{CORE}/prefills.py",
        "        if prefill.waits_for_lead:\n            return\n",
        "",
        (f"{UNIT}/test_scheduler_recompute.py::test_a_sibling_starts_when_the_blocks_that_it_shares_are_sent",),
    ),
    Fault(
        "prefill chunks ignore the token budget",
        f"{CORE}/prefills.py",
        "        num_tokens = min(prefill.num_left, plan.token_budget)\n",
        "        num_tokens = prefill.num_left\n",
        (f"{UNIT}/test_scheduler.py::test_prompt_longer_than_the_budget_is_chunked",),
    ),
    Fault(
        "computed tokens are not charged to their tenant",
        f"{CORE}/prefills.py",
        "        self._charge(prefill.sequence.group, num_tokens)\n",
        "",
        (f"{UNIT}/test_scheduler_order.py::test_tokens_of_prompts_and_of_outputs_count_alike",),
    ),
    Fault(
        "a beam that dies keeps its blocks",
        f"{CORE}/searches.py",
        "                batch.blocks.allocator.free(batch.held_blocks(beam.slot))\n",
        "",
        (f"{UNIT}/test_scheduler_beams.py::test_a_beam_that_dies_leaves_its_slot_and_its_own_blocks",),
    ),
    Fault(
        "the score of a hypothesis counts one token less",
        f"{CORE}/beam_search.py",
        "        score = self._score(beam.score, self._num_output_tokens)\n",
        "        score = self._score(beam.score, max(1, self._num_output_tokens - 1))\n",
        (f"{UNIT}/test_beam_search.py",),
    ),
    Fault(
        "a beam that ends below the first ranks becomes a hypothesis",
        f"{CORE}/beam_search.py",
        "np.flatnonzero(is_end[:width])",
        "np.flatnonzero(is_end)",
        (f"{UNIT}/test_beam_search.py::test_an_end_token_below_the_first_width_is_dropped",),
    ),
    Fault(
        "a search that should stop early goes on",
        f"{CORE}/beam_search.py",
        "        if early_stopping is EarlyStopping.TRUE:\n            return False\n",
        "",
        (f"{UNIT}/test_beam_search.py::test_early_stopping_true_stops_at_width_hypotheses",),
    ),
    Fault(
        "a step has too few candidates for a beam with end tokens",
        f"{CORE}/beam_search.py",
        "max(2, 1 + len(stop_token_ids)) * params.beam_width",
        "params.beam_width",
        (f"{UNIT}/test_beam_search.py",),
    ),
    # Ends and results
    Fault(
        "ignore_eos is ignored",
        f"{CORE}/stopping.py",
        "            stopped &= ~self._ignores_eos[slots]\n",
        "            pass\n",
        (f"{UNIT}/test_stopping.py",),
    ),
    Fault(
        "a slot keeps the stop tokens of its last user",
        f"{CORE}/stopping.py",
        "        self._stop_token_ids[slot] = conditions.stop_token_ids\n",
        "        self._stop_token_ids[slot] |= conditions.stop_token_ids\n",
        (f"{UNIT}/test_stopping.py",),
    ),
    Fault(
        "an output is one token too long",
        f"{CORE}/stopping.py",
        "(positions + 1 >= self._max_num_tokens[slots])",
        "(positions >= self._max_num_tokens[slots])",
        (f"{UNIT}/test_stopping.py",),
    ),
    Fault(
        "a late token cannot end its sequence",
        f"{CORE}/results.py",
        "            reason = self._batch.stop_checker.finished_late(sequence)\n",
        "            reason = None\n",
        (f"{UNIT}/test_scheduler_late_tokens.py::test_late_token_that_stops_its_sequence_ends_it",),
    ),
    Fault(
        "a token outside the vocabulary is taken",
        f"{CORE}/result_check.py",
        '    if not _are_token_ids(token_ids, vocab_size):\n        raise ExecutorFaultError(f"step {result',
        '    if False:\n        raise ExecutorFaultError(f"step {result',
        (f"{UNIT}/test_scheduler_faults.py",),
    ),
    Fault(
        "an answer may bring what nobody asked for",
        f"{CORE}/result_check.py",
        "        if asked is None and found is not None:\n",
        "        if False:\n",
        (f"{UNIT}/test_scheduler_faults.py",),
    ),
    Fault(
        "an evacuated sequence keeps its slot's number",
        f"{CORE}/endings.py",
        "                sequence.slot, sequence.generation = -1, 0",
        "                pass",
        (f"{UNIT}/test_scheduler_late_tokens.py::test_finishing_a_moved_sequence_loses_no_late_token_of_another",),
    ),
    Fault(
        "the output that ended keeps its blocks while its siblings run",
        f"{CORE}/endings.py",
        "            self._batch.blocks.allocator.free(self._batch.held_blocks(sequence.slot))\n",
        "",
        (f"{UNIT}/test_scheduler_ends.py::test_one_output_of_a_group_ends_and_the_others_go_on",),
    ),
    # Order
    Fault(
        "groups are admitted in a step that preempts",
        f"{CORE}/scheduler.py",
        "            if not (plan.preempted or plan.has_held_back):\n",
        "            if True:\n",
        (
            f"{UNIT}/test_scheduler_recompute.py::test_nothing_is_admitted_in_a_step_that_preempts",
            f"{UNIT}/test_scheduler_swap.py::test_nothing_comes_back_in_a_step_that_preempts",
        ),
    ),
    Fault(
        "a tenant's weight does not count",
        f"{CORE}/policy.py",
        "            charged.served += num_tokens / charged.weight\n",
        "            charged.served += num_tokens\n",
        (f"{UNIT}/test_policy.py::test_a_counter_is_tokens_per_weight",),
    ),
)
