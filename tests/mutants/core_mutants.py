"""Mutants of the core, the wire, recovery and the link. A number is that of an invariant in ARCHITECTURE.md.

What the simulation sees has a row in `tests/simulation/planted_bugs.py` instead.
"""

from tests.mutants.mutant import Mutant

UNIT = "tests/unit/scheduler_svc/core"
EXECUTOR = "tests/unit/executor_svc"
LINK = "tests/contract/test_link.py"

CORE_MUTANTS = (
    Mutant(
        "1: a cached block that is found again may still be evicted",
        "scheduler_svc.core.blocks.block_allocator:BlockAllocator.acquire",
        "self._cached_blocks.remove(index[counts == 0])",
        "None",
        f"{UNIT}/blocks/test_block_allocator.py",
    ),
    Mutant(
        "1: a swapped group that goes keeps its blocks of the host pool",
        "scheduler_svc.core.blocks.swapping:SwappedGroups._forget",
        "self.host.free(host_blocks[host_blocks != NO_BLOCK])",
        "None",
        f"{UNIT}/test_core_swap.py",
    ),
    Mutant(
        "1: a swap moves blocks that other groups name too",
        "scheduler_svc.core.blocks.swapping:SwappedGroups.try_swap_out",
        "device.ref_counts[distinct] == num_references",
        "device.ref_counts[distinct] >= num_references",
        f"{UNIT}/test_core_swap_shared.py",
    ),
    Mutant(
        "1: a window slides one token too early",
        "scheduler_svc.core.step.batch:Batch.slide_window",
        "position - self._window + 1",
        "position - self._window + 2",
        f"{UNIT}/test_core_sliding_window.py",
    ),
    Mutant(
        "2: a token of the slot's last user reaches the next one",
        "shared.table_columns:TableColumns.is_current",
        "self.live[index] & (self.generation[index] == generations)",
        "self.live[index]",
        "tests/unit/shared/test_batch_table.py",
    ),
    Mutant(
        "3: a group comes back from the host pool without room for its next token",
        "scheduler_svc.core.blocks.swapping:SwappedGroups._num_blocks_needed",
        "len(sequence.token_ids)",
        "len(sequence.token_ids) - 1",
        f"{UNIT}/test_core_swap.py",
    ),
    Mutant(
        "3: places for drafted tokens are not reserved",
        "scheduler_svc.core.blocks.block_appender:BlockAppender._short_slots",
        "self._limits.num_lookahead_tokens",
        "0",
        f"{UNIT}/test_core_sliding_window.py::test_a_decode_has_places_for_drafted_tokens_behind_its_next_one",
    ),
    Mutant(
        "4: prefill chunks ignore the token budget",
        "scheduler_svc.core.step.prefills:Prefills._send_chunk",
        "min(prefill.num_remaining_tokens, plan.token_budget)",
        "prefill.num_remaining_tokens",
        f"{UNIT}/test_executor_core.py::test_prompt_longer_than_the_budget_is_chunked",
    ),
    Mutant(
        "5: an output is one token too long",
        "scheduler_svc.core.stopping:StopChecker.finished",
        "positions + 1 >= self._max_num_tokens[slots]",
        "positions >= self._max_num_tokens[slots]",
        f"{UNIT}/test_stopping.py",
    ),
    Mutant(
        "6: a token that was in flight cannot end its sequence",
        "scheduler_svc.core.step.results:Results._take_inflight_tokens",
        "reason is not None",
        "False",
        f"{UNIT}/test_core_inflight_tokens.py",
    ),
    Mutant(
        "6: a stop string is told to the core that made the token, though the group has gone to another one",
        "scheduler_svc.core.dispatch.fleet:Fleet.finish",
        "holder or core",
        "core",
        f"{UNIT}/dispatch/test_fleet.py",
    ),
    Mutant(
        "7: a fork writes into the block that it shares",
        "scheduler_svc.core.blocks.block_appender:BlockAppender.append_blocks",
        "self._copy_if_shared(plan, slot, slot)",
        "None",
        f"{UNIT}/test_core_groups.py",
    ),
    Mutant(
        "7: a sibling starts before the blocks that it shares are sent",
        "scheduler_svc.core.step.prefills:Prefills._send_chunk",
        "prefill.waits_for_lead",
        "False",
        f"{UNIT}/test_core_recompute.py",
    ),
    Mutant(
        "8: the hash of a block does not depend on the block before it",
        "scheduler_svc.core.blocks.prefix_cache:BlockHasher.extend",
        "parent + block",
        "block",
        f"{UNIT}/blocks/test_prefix_cache.py",
    ),
    Mutant(
        "8: a prefix hit leaves no token to compute",
        "scheduler_svc.core.blocks.block_manager:BlockManager._max_hit",
        "len(sequence.token_ids) - 1",
        "len(sequence.token_ids)",
        f"{UNIT}/test_core_prefix_cache.py",
    ),
    Mutant(
        "8: new blocks are taken before the cached ones of the same admission",
        "scheduler_svc.core.blocks.block_manager:BlockManager.allocate",
        "self.allocator.acquire(blocks.found)",
        "None",
        f"{UNIT}/test_core_prefix_cache.py",
    ),
    # The wire
    Mutant(
        "a fork loses its token rules",
        "shared.batch_table:BatchTable._fork",
        "(*counters, self.cache_salt, self.token_rules)",
        "(*counters, self.cache_salt)",
        "tests/unit/shared/test_batch_table.py",
    ),
    Mutant(
        "the digest of the table leaves out token rules",
        "shared.table_digest:digest_of",
        "hasher.update(table.token_rules[slot].content())",
        "None",
        "tests/unit/shared/test_batch_table.py::test_digest_covers_each_part_of_an_admission",
    ),
    Mutant(
        "a slot may decode that has no block for its next token",
        "shared.delta_check:_Projection._check_decodes",
        "np.minimum(self.num_blocks * self.table.block_size, self.table.max_model_len - 1)",
        "np.full_like(self.num_blocks, self.table.max_model_len - 1)",
        "tests/unit/shared/test_delta_check.py",
    ),
    Mutant(
        "an allow-list without any token is no allow-list",
        "shared.wire_rules:decode_rules",
        'message.HasField("allowed_mask")',
        "message.allowed_mask",
        "tests/unit/shared/test_wire.py",
    ),
    Mutant(
        "a field of a capability that was not agreed on is passed over",
        "shared.wire_agreement:WireAgreement.check_step",
        "capability not in self.capabilities",
        "False",
        "tests/unit/shared/test_wire_agreement.py",
    ),
    Mutant(
        "the highest wire version is taken whatever the other side speaks",
        "executor_svc.service.servicer:_negotiate",
        "min(request.max_wire_version, wire.MAX_WIRE_VERSION)",
        "wire.MAX_WIRE_VERSION",
        "tests/skew/test_wire_range.py",
    ),
    Mutant(
        "a name that is not sent yet outlives the eviction of its block",
        "scheduler_svc.core.blocks.prefix_cache:PrefixCache.forget",
        "self._unsent.pop(block_id, None)",
        "None",
        f"{UNIT}/blocks/test_named_blocks.py",
    ),
    Mutant(
        "names outlive a step that failed half way",
        "executor_svc.service.step_runner:StepRunner.reset.begin_epoch",
        "self._failure is not None",
        "False",
        "tests/contract/test_warm_restart.py",
    ),
    # Recovery
    Mutant(
        "a later scheduler takes an executor from a holder that has its stream",
        "executor_svc.service.attachment:Attachment.acquire",
        "self.grace_s(scheduler_id, incarnation, now)",
        "False",
        f"{EXECUTOR}/service/test_attachment.py",
    ),
    Mutant(
        "a heartbeat does not prolong the lease",
        "executor_svc.service.attachment:Attachment.renew",
        "now + self._lease_s",
        "self._expires_s",
        f"{EXECUTOR}/service/test_attachment.py",
    ),
    Mutant(
        "a new attachment keeps the unfinished steps of the last one",
        "executor_svc.worker.torch_worker:TorchWorker.reset",
        "self._unrecorded.clear()",
        "None",
        "tests/numerics/test_launch_ahead.py",
    ),
    Mutant(
        "a group goes back to the core that it was lost on",
        "scheduler_svc.core.dispatch.placement:Placement._obstacle",
        "group.lost_on",
        "False",
        f"{UNIT}/dispatch/test_placement.py",
    ),
    Mutant(
        "a rank that is silent is never given up",
        "executor_svc.parallel.connection:Connection._wait_for_frame",
        "not self._was_frozen()",
        "False",
        f"{EXECUTOR}/parallel/test_step_channel.py"
        "::test_a_peer_that_says_nothing_is_lost_and_one_that_only_waits_is_not",
    ),
    # The link between fronts and core
    Mutant(
        "any certificate of the authority is that of a front",
        "scheduler_svc.link.core_port:FrontAccess.wrap.guarded",
        "self._trusted_fronts.isdisjoint(names)",
        "not names",
        "tests/tls/test_own_fronts.py::test_who_is_no_front_does_not_join_and_reads_why",
    ),
    Mutant(
        "an older session of a front replaces a newer one",
        "scheduler_svc.link.core_servicer:CoreServicer._end_older",
        "hello.session <= number",
        "False",
        f"{LINK}::test_a_newer_session_of_a_front_ends_the_older_one_and_its_requests_first",
    ),
    Mutant(
        "an Abort that comes before its request is forgotten",
        "scheduler_svc.link.front_session:FrontSession.take",
        "self._early_aborts.add(call.request_id, tenant)",
        "None",
        f"{LINK}::test_an_abort_that_comes_before_its_request_ends_it_and_no_later_one_of_the_same_id",
    ),
    Mutant(
        "any attempt takes a request over",
        "scheduler_svc.engine.engine:Engine._supersede",
        "request.continuation.attempt > live.attempt",
        "request.continuation.attempt",
        "tests/contract/test_continuation.py::test_the_call_that_still_has_the_request_is_told",
    ),
)
