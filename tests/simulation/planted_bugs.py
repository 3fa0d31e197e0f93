"""The bugs that the simulation must find: each a few lines of a file, as somebody might write them.

A row may name the mode in which its bug shows, and never a seed. `planted.py` plants them.
"""

from dataclasses import dataclass

from tests.mutants.fault import Change
from tests.simulation.plan import LIVENESS

CORE = "scheduler_svc/core"
ENGINE = "scheduler_svc/engine"
EXECUTORS = "scheduler_svc/executors"
FRONT = "scheduler_svc/front"
LINK = "scheduler_svc/link"
SERVICE = "executor_svc/service"


@dataclass(frozen=True, slots=True)
class Bug(Change):
    """One row; `mode` is that in which it shows, empty: in both."""

    mode: str = ""


BUGS = (
    # Blocks
    Bug(
        "the blocks of an output that ended are not freed",
        f"{CORE}/step/admitted_groups.py",
        "            self._batch.free_blocks(sequence.slot)\n",
        "",
    ),
    Bug(
        "a fork does not count its references on the shared blocks",
        f"{CORE}/step/prefills.py",
        "            group.allocator.acquire(table[group.first_blocks[parent_slot] :], len(prefill.pending_forks))\n",
        "            pass\n",
    ),
    Bug(
        "a beam that goes on as two holds its blocks once",
        f"{CORE}/step/beam_batch.py",
        "                batch.share_blocks(slot)\n",
        "",
    ),
    Bug(
        "the last but one that shares a block writes into it",
        f"{CORE}/step/block_appender.py",
        "        if self._batch.blocks.allocator.ref_counts[self._last_block(parent_slot)] == 1:\n",
        "        if self._batch.blocks.allocator.ref_counts[self._last_block(parent_slot)] <= 2:\n",
    ),
    Bug(
        "a block is registered before its step is acknowledged",
        f"{CORE}/step/prefills.py",
        "            cache.start_writing(slot, prefill.sequence.block_hashes[first:last])\n",
        "            cache.register(\n"
        "                prefill.sequence.block_hashes[first:last], prefill.tables[0][first:last].tolist()\n"
        "            )\n",
    ),
    Bug(
        "an evicted block stays in the prefix cache",
        f"{CORE}/blocks/block_allocator.py",
        "        self.prefix_cache.forget(evicted)\n",
        "        self.prefix_cache.is_registered[evicted] = False\n",
    ),
    Bug(
        "the names of blocks leave out tenant and salt",
        f"{CORE}/blocks/prefix_cache.py",
        'blake2b(cache_salt.to_bytes(8, "little"), key=self._key)',
        'blake2b(b"", key=self._key)',
    ),
    Bug(
        "a prefix is waited for whose writer was preempted",
        f"{CORE}/step/batch.py",
        "            cache.stop_writing(slot)\n",
        "            pass\n",
    ),
    Bug(
        "a swap-in brings the blocks in the wrong order",
        f"{CORE}/step/swapping.py",
        "zip(swap_in_plan.host_blocks[moved].tolist(), device_blocks[moved].tolist(), strict=True)",
        "zip(swap_in_plan.host_blocks[moved].tolist(), device_blocks[moved][::-1].tolist(), strict=True)",
    ),
    Bug(
        "a swap frees the blocks that stay on the device",
        f"{CORE}/step/swapping.py",
        "            device.free(all_held[~stays])\n",
        "            device.free(all_held)\n",
    ),
    Bug(
        "a block that a step writes keeps the name of what was in it",
        f"{SERVICE}/block_names.py",
        "                    self._names.pop(block_id, None)  # it may be there twice\n",
        "                    pass\n",
    ),
    Bug(
        "the names of kept blocks are taken in the wrong order",
        f"{CORE}/blocks/block_manager.py",
        '                group.allocator.adopt(group.prefix_cache.adopt(ids, b"".join(kept)))\n',
        '                group.allocator.adopt(group.prefix_cache.adopt(ids[::-1].copy(), b"".join(kept)))\n',
    ),
    # Cache groups
    Bug(
        "a prefix counts as found where the first cache group has it",
        f"{CORE}/blocks/prefixes.py",
        "[group.ends(names, with_host=with_host) for group in self._groups])",
        "[group.ends(names, with_host=with_host) for group in self._groups[:1]])",
    ),
    Bug(
        "the blocks that a chunk takes of a later cache group are sent without its offset",
        f"{CORE}/step/prefills.py",
        "((slot, group.first_id + block) for block in taken.tolist())",
        "((slot, block) for block in taken.tolist())",
    ),
    Bug(
        "names are told of a later cache group's blocks without its offset",
        f"{CORE}/blocks/block_manager.py",
        "(block_ids, more_ids + np.int32(group.first_id))",
        "(block_ids, more_ids)",
    ),
    # States
    Bug(
        "a prefix is found although there is no state behind it",
        f"{EXECUTORS}/serving_limits.py",
        "    return _with_states(limits, info.cache_groups[-1]) if info.has_states else limits\n",
        "    return replace(limits, max_allowance=1)\n",
    ),
    Bug(
        "a sequence shares the blocks that another one computes, and has no state behind them",
        f"{CORE}/blocks/block_manager.py",
        "        if self._has_states or len(sequences) == 1",
        "        if len(sequences) == 1",
    ),
    Bug(
        "a group is swapped, and its states are not",
        f"{CORE}/step/swapping.py",
        "        self.is_possible = has_room_for_states and all(",
        "        self.is_possible = all(",
    ),
    Bug(
        "the next owner of a slot goes on from the state of the former one",
        "executor_svc/fake/states.py",
        "        self._at_slots[slots[starts == 0]] = 0, 0\n",
        "",
    ),
    Bug(
        "a sequence that begins with a saved state goes on from that of the former owner of its slot",
        "executor_svc/fake/states.py",
        "            self._at_slots[slot] = self._device[admission.state_block - self.first_id]\n",
        "",
    ),
    Bug(
        "a state is swapped out before it is saved",
        "executor_svc/fake/worker.py",
        "            self._states.save(step.states_to_save)\n            self._states.move(moves.pop())\n",
        "            self._states.move(moves.pop())\n            self._states.save(step.states_to_save)\n",
    ),
    Bug(
        "a state is named before the answer to the step that saves it",
        f"{CORE}/blocks/saved_states.py",
        "        self.saves.setdefault(slot, []).append(save)\n",
        "        self.saves.setdefault(slot, []).append(save)\n"
        "        if name:\n"
        "            self.prefix_cache.register([name], [block])\n",
    ),
    Bug(
        "a saved state has the name of the block behind it",
        f"{CORE}/step/prefills.py",
        "            name = sequence.block_hashes[start // size - 1]\n",
        "            name = sequence.block_hashes[min(start // size, len(sequence.block_hashes) - 1)]\n",
    ),
    Bug(
        "a sequence begins with the saved state of other tokens, or of another salt",
        f"{CORE}/blocks/saved_states.py",
        "        return int(self.prefix_cache.blocks_of([name])[0])\n",
        "        return int(self.prefix_cache.is_registered.nonzero()[0][0])\n",
    ),
    Bug(
        "a block that a state is saved to keeps the name of the state before",
        f"{SERVICE}/block_names.py",
        ", step.blocks_to_copy[:, 1], step.states_to_save[:, 2]",
        ", step.blocks_to_copy[:, 1]",
    ),
    Bug(
        "names are kept of what a step that failed may have written",
        f"{SERVICE}/step_runner.py",
        "            if not (keeps_names and is_laid_out) or self._failure is not None:\n",
        "            if not (keeps_names and is_laid_out):\n",
    ),
    Bug(
        "a fork begins without the state of its parent",
        "executor_svc/fake/worker.py",
        "            self._states.fork(step.delta.forks)\n",
        "            pass\n",
    ),
    # Encoders
    Bug(
        "an output of several frees the encoder's output that its siblings attend to",
        f"{CORE}/step/prefills.py",
        "            batch.blocks.encoder.allocator.acquire(own, len(prefill.pending_forks))\n",
        "            pass\n",
    ),
    Bug(
        "a beam that ends frees the encoder's output that the beam beside it attends to",
        f"{CORE}/step/batch.py",
        "            self.blocks.encoder.share(slot, num_references)\n",
        "            pass\n",
    ),
    Bug(
        "the output of an encoder is found under another salt",
        f"{CORE}/blocks/encoder_blocks.py",
        "era, group.shared_salt)",
        "era, 0)",
    ),
    Bug(
        "a last block of an input that is partial is found by a longer input",
        f"{CORE}/blocks/prefix_cache.py",
        "        tokens[: len(token_ids)] = token_ids\n",
        "        num_full = len(token_ids) // self.block_size * self.block_size\n"
        "        tokens[:num_full] = token_ids[:num_full]\n",
    ),
    Bug(
        "the beginning of a longer input is found as if nothing followed it",
        f"{CORE}/blocks/prefix_cache.py",
        "        whole = self.name(None, cache_salt, tokens.tobytes())[-1]\n",
        "        return self.name(None, cache_salt, tokens.tobytes())\n"
        "        whole = self.name(None, cache_salt, tokens.tobytes())[-1]\n",
    ),
    Bug(
        "a sequence takes blocks of the encoder to grow",
        f"{CORE}/step/block_appender.py",
        "                    appended += [(slot, of.first_id + int(of.allocator.allocate(1)[0])) for of in groups]\n",
        "                    pools = self._batch.blocks.wanted[-1:] if len(groups) == 1 else groups\n"
        "                    appended += [(slot, of.first_id + int(of.allocator.allocate(1)[0])) for of in pools]\n",
    ),
    Bug(
        "a decode writes its key where the output of the encoder is",
        "executor_svc/fake/encoder.py",
        "        for slot in np.unique(slots).tolist():\n",
        "        last = slots[-1]\n"
        "        block, place = divmod(int(num_tokens[last]) - 1, self._block_size)\n"
        "        self._device[tables.of_slot(last)[block], place] += np.uint64(2)\n"
        "        for slot in np.unique(slots).tolist():\n",
    ),
    Bug(
        "a fork attends to what the former owner of its slot attended to",
        "executor_svc/fake/encoder.py",
        "            self.inputs[fork.slot] = self.inputs[fork.parent_slot]\n",
        "            pass\n",
    ),
    Bug(
        "a swapped group comes back to an input that is not there any more",
        f"{CORE}/step/admission.py",
        "                state_block=back.state_block,\n                encoder_input=encoder_input,\n",
        "                state_block=back.state_block,\n"
        "                encoder_input=encoder_input\n"
        "                and type(encoder_input)(encoder_input.num_tokens, encoder_input.block_ids),\n",
    ),
    Bug(
        "an input is believed to be where a step that failed was encoding another one",
        f"{SERVICE}/step_runner.py",
        "                self._names = BlockNames(int(firsts_of(worker.info.pools(agreed=uses_groups))[-1]))\n",
        "                former, firsts = self._names, firsts_of(worker.info.pools(agreed=uses_groups)).tolist()\n"
        "                self._names = BlockNames(firsts[-1])\n"
        "                if keeps_names and is_laid_out and worker.info.has_encoder:\n"
        "                    first = firsts[len(worker.info.groups(agreed=True))]\n"
        "                    for block, name in former._names.items():\n"
        "                        if block >= first:\n"
        "                            self._names._names[block], self._names._is_named[block] = name, True\n",
    ),
    Bug(
        "a block that an input is encoded to keeps the name of the input before",
        f"{SERVICE}/block_names.py",
        "    return *in_tables, *moved, *received, *encoded\n",
        "    return *in_tables, *moved, *received\n",
    ),
    # On the host, and between executors
    Bug(
        "names of host blocks outlive an attachment",
        f"{CORE}/fleet/fleet.py",
        "        self.planners.append(planner)\n",
        "        self.planners.append(planner)\n"
        "        hosts = self.__dict__.setdefault('hosts', {})\n"
        "        for former, pool in zip(hosts.get(name, ()), planner.blocks.pools):\n"
        "            if former.host.names is not None and pool.host.names is not None:\n"
        "                kept = former.host.names._block_of_hash\n"
        "                if all(block < pool.host.allocator.num_blocks for block in kept.values()):\n"
        "                    import numpy as np\n"
        "                    ids = np.array([*kept.values()], np.int32)\n"
        "                    pool.host.allocator.adopt(pool.host.names.adopt(ids, b''.join(kept)))\n"
        "        hosts[name] = planner.blocks.pools\n",
    ),
    Bug(
        "a copy takes the host block that a swap-in of the same step reads",
        f"{CORE}/step/executor_planner.py",
        "        if not (plan.blocks_to_swap_in or waits or self.is_draining):\n",
        "        if not (waits or self.is_draining):\n",
    ),
    Bug(
        "a block has its name before its content has arrived",
        f"{CORE}/step/block_transfers.py",
        "            if part.pool == 0:\n"
        "                self._of_first_pool.start_writing(_writer(number), part.names)\n",
        "            self._blocks.pools[part.pool].allocator.register(part.names, part.blocks.tolist())\n",
    ),
    Bug(
        "blocks that arrive have the names of their neighbours",
        f"{CORE}/step/block_transfers.py",
        "                allocator.register(part.names, part.blocks.tolist())\n",
        "                allocator.register(part.names, part.blocks[::-1].tolist())\n",
    ),
    Bug(
        "the group of a transfer that was cancelled waits for ever",
        f"{CORE}/fleet/transfers.py",
        "            self.of_group.pop(group, None)\n            group.pulls_nothing = True\n",
        "            group.pulls_nothing = True\n",
    ),
    # Weights
    Bug(
        "the names of blocks leave out the weights",
        f"{CORE}/blocks/block_naming.py",
        'f"{self.weights_digest} {self.num_resets}"',
        'f"{self.num_resets}"',
    ),
    Bug(
        "an executor that did not take new weights is used all the same",
        f"{ENGINE}/weights.py",
        '                    update.session.give_up(f"it did not take the new weights: {outcome}")\n',
        "                    staying.add(update.session)\n",
    ),
    Bug(
        "steps are sent for the weights of before an update",
        f"{EXECUTORS}/session.py",
        "        self._weights_version = self.info.weights_version\n",
        "",
    ),
    Bug(
        "blocks that several weights have written have names that others look for",
        f"{CORE}/sequence.py",
        '        self.block_salt = int.from_bytes(salt, "little")\n',
        "",
    ),
    Bug(
        "swapped groups come back with what older weights have computed",
        f"{CORE}/step/executor_planner.py",
        "        self._to_recompute.update(self.swapped.groups)\n",
        "",
    ),
    Bug(
        "names of before a sleep are told after it",
        f"{CORE}/blocks/block_manager.py",
        "                group.prefix_cache.drop_unsent_names()\n",
        "                pass\n",
    ),
    Bug(
        "a group that is computed again by new weights keeps the names of its blocks",
        f"{CORE}/sequence.py",
        "                sequence.block_hashes, sequence.hashed_by = [], (0, 0)\n",
        "                pass\n",
    ),
    Bug(
        "a beam that forks after an update names its blocks as before",
        f"{CORE}/step/batch.py",
        "                    sequence.block_hashes = []\n",
        "                    pass\n",
    ),
    # Grammars
    Bug(
        "a grammar that a sequence follows is dropped",
        f"{CORE}/step/slot_pool.py",
        "        self._unused.pop(slot, None)\n",
        "        pass\n",
    ),
    Bug(
        "an output forgets its grammar when it is admitted again",
        f"{CORE}/step/prefills.py",
        "        resources = self._batch.things.load(plan, group)\n",
        "        resources = self._batch.things.load(plan, group)\n"
        "        if len(token_ids) > group.num_prompt_tokens:\n"
        "            resources = type(resources)()\n",
    ),
    Bug(
        "a grammar slot is never free again",
        f"{CORE}/step/slot_pool.py",
        "        self.num_followers[slot] -= 1\n",
        "        pass\n",
        LIVENESS,
    ),
    # Adapters
    Bug(
        "the names of blocks do not say with which adapter they were computed",
        f"{CORE}/sequence.py",
        "self.cache_salt if self.adapter is None else salted(self.cache_salt, self.adapter.identity)\n",
        "self.cache_salt\n",
    ),
    Bug(
        "an adapter is used before its load has ended",
        f"{CORE}/step/slotted_things.py",
        "            if pool.waits_for(key):\n",
        "            if pool.waits_for(key) and pool.state_of(key) is SlotState.EMPTY:\n",
    ),
    Bug(
        "an answer goes on with what the name of its adapter stands for now",
        f"{ENGINE}/adapters.py",
        "return next((one for one in loaded if one is not None and one.digest == digest), former or adapter)\n",
        "return next((one for one in loaded if one is not None), former or adapter)\n",
    ),
    Bug(
        "an adapter that is loaded twice is found in its second slot, and those who use it are counted at the first",
        f"{CORE}/step/slotted_things.py",
        "            self._found.setdefault(digest, slot)\n",
        "            self._found[digest] = slot\n",
    ),
    Bug(
        "an executor loads whatever it finds, whichever content was asked for",
        "executor_svc/worker/adapter_loads.py",
        "        if adapter.digest and digest != adapter.digest:\n",
        "        if False:\n",
    ),
    # Texts
    Bug(
        "texts of a lost executor are forgotten with it",
        f"{CORE}/step/admitted_groups.py",
        "[*self._batch.running, *self.returning]",
        "[*self._batch.with_slots, *self.returning]",
    ),
    Bug(
        "a text is given the answer of its neighbour",
        f"{CORE}/step/results.py",
        "                pooled.append((group, output.values))\n",
        "                pooled.append((group, result.pooling_outputs[0].values))\n",
    ),
    Bug(
        "texts go beyond the token budget of a step",
        f"{CORE}/step/admission.py",
        "        plan.token_budget -= num_tokens\n",
        "",
    ),
    Bug(
        "a text whose client left is answered all the same",
        f"{CORE}/step/results.py",
        "            if group not in self._groups:\n                continue\n",
        "",
    ),
    # Tokens
    Bug(
        "a row that is not finite brings a token",
        f"{CORE}/step/results.py",
        "        is_flagged = None if flags is None else flags != 0\n",
        "        is_flagged = None\n",
    ),
    Bug(
        "a token that was in flight at a preemption is delivered and not kept",
        f"{CORE}/step/results.py",
        "        sequence.append_inflight_tokens(token_ids[:num_taken])\n",
        "        sequence.num_inflight_rows -= 1\n",
    ),
    Bug(
        "a group is computed again before its tokens in flight are there",
        f"{CORE}/step/preemption.py",
        "        complete = [group for group in self.groups if not group.has_inflight_rows]\n"
        "        self.groups = [group for group in self.groups if group.has_inflight_rows]\n",
        "        complete, self.groups = self.groups, []\n",
    ),
    Bug(
        "the last token is delivered again after a preemption or a loss",
        f"{CORE}/step/running_groups.py",
        "                    sequence.token_ids = batch.known_tokens(sequence.slot)\n",
        "                    sequence.token_ids = batch.known_tokens(sequence.slot)[:-1]\n",
    ),
    Bug(
        "output that is computed again counts as prompt",
        f"{CORE}/step/prefills.py",
        "                token_ids,\n                group.num_prompt_tokens,\n",
        "                token_ids,\n                len(token_ids),\n",
    ),
    Bug(
        "a beam search that is computed again has lost its beams",
        f"{CORE}/step/running_groups.py",
        "                group.take_tokens_of_beams()\n",
        "                pass\n",
    ),
    Bug(
        "the planner is not told of a stop string",
        f"{ENGINE}/live_requests.py",
        "            self._fleet.finish(planner, sequence)\n            self._on_room()\n",
        "            pass\n",
    ),
    Bug(
        "a stop string that is found while its group waits for a planner ends nothing",
        f"{ENGINE}/live_requests.py",
        "        elif group.is_last(sequence):\n",
        "        elif False:\n",
    ),
    Bug(
        "suspects are tried in company: nobody is found to break executors",
        f"{ENGINE}/live_requests.py",
        "        if request.group.runs_alone != (runs_alone := is_suspect(request)):\n",
        "        if request.group.runs_alone != (runs_alone := False):\n",
        LIVENESS,
    ),
    Bug(
        "an abort does not reach the planner",
        f"{CORE}/fleet/fleet.py",
        "            planner.abort(group)\n        else:\n",
        "            pass\n        else:\n",
    ),
    Bug(
        "a request that is aborted while it waits stays in the queue",
        f"{CORE}/fleet/fleet.py",
        "                self.dispatcher.withdraw(group)\n            group.end()\n",
        "                pass\n            group.end()\n",
    ),
    Bug(
        "computed tokens are not charged to their tenant",
        f"{CORE}/step/prefills.py",
        "        self._shares.charge(prefill.sequence.group.tenant, num_tokens)\n",
        "",
    ),
    Bug(
        "a request that was checked counts as waiting for ever",
        f"{ENGINE}/waiting_limits.py",
        "            self._num_checked_of[tenant] -= 1\n",
        "",
    ),
    Bug(
        "a request that no executor can hold waits for ever",
        f"{ENGINE}/orphans.py",
        "now_s - since_s >= self.timeout_s]",
        "now_s - since_s >= 1e9]",
    ),
    # Losses
    Bug(
        "zombies: what was preempted at a lost executor is never queued again",
        f"{ENGINE}/recovery.py",
        "            if not self._end_if_lost_too_often(request):\n",
        "            if group in running and not self._end_if_lost_too_often(request):\n",
    ),
    Bug(
        "broken executor: each of its losses counts against what ran there, and it is tried again at once",
        f"{EXECUTORS}/driver.py",
        "                    self._breaker.fail(self.instance_id, str(error), monotonic_s())\n"
        "            elif isinstance",
        "                    self._owner.on_probed(self.address, works=True)\n            elif isinstance",
    ),
    Bug(
        "smaller executor: what was accepted elsewhere is cut short there",
        f"{CORE}/step/admission.py",
        "        if accepted_len is not None and accepted_len > limits.max_model_len:\n",
        "        if accepted_len is not None and accepted_len < 0:\n",
    ),
    Bug(
        "poison: a request that breaks executors never ends",
        f"{ENGINE}/recovery.py",
        "        if request.num_lone_losses <= self._max_losses:\n",
        "        if request.num_lone_losses <= 1_000_000:\n",
    ),
    Bug(
        "a suspect is never released",
        f"{ENGINE}/suspects.py",
        "        self._current = self.parked.pop(0) if self.parked else None\n        return self._current\n",
        "        self._current = None\n        return None\n",
    ),
    Bug(
        "an executor that failed is never tried again",
        f"{EXECUTORS}/circuit_breaker.py",
        "        return max(0.0, self._opens_until_s - now_s)\n",
        "        return self._backoff.longest_s\n",
        LIVENESS,
    ),
    # Executors and the wire
    Bug(
        "fencing is off: an executor takes steps of an older epoch",
        f"{SERVICE}/attachment.py",
        "        if epoch != self.epoch:\n",
        "        if epoch > self.epoch:\n",
    ),
    Bug(
        "a step that is sent again is run again",
        f"{SERVICE}/step_runner.py",
        "        if message.step_id == self._next_step_id:\n",
        "        if message.step_id <= self._next_step_id:\n",
    ),
    Bug(
        "a resumed stream does not send the first unanswered step",
        f"{EXECUTORS}/session.py",
        "            if message.step_id > first.started.last_executed_step_id:\n",
        "            if message.step_id > first.started.last_executed_step_id + 1:\n",
    ),
    Bug(
        "a resumed stream loses a stored response",
        f"{SERVICE}/kept_responses.py",
        "        return list(kept[len(kept) - num_wanted :])\n",
        "        return list(kept[len(kept) - num_wanted + 1 :])\n",
    ),
    Bug(
        "an attachment outlives its lease: heartbeats that nobody answers keep it",
        f"{EXECUTORS}/session.py",
        "monotonic_s() - self._heartbeat_answered_at_s > lease_s:",
        "monotonic_s() - self._heartbeat_answered_at_s > 1e9:",
    ),
    Bug(
        "an executor whose address came back gets no requests",
        f"{EXECUTORS}/driver.py",
        "            self._tell_fleet(self.planner)\n        self.work.set()\n\n    async def _note_leaving",
        "            self._owner.fleet.set_takes_groups(self.planner, False)\n        self.work.set()\n\n"
        "    async def _note_leaving",
    ),
    Bug(
        "the next step is not decided when a result is there",
        f"{EXECUTORS}/driver.py",
        "            if not self._is_sending:\n                await self._send_what_is_due(planner, session)\n\n",
        "\n",
    ),
    Bug(
        "the dispatcher wakes a driver for what it had before, and that one the dispatcher",
        f"{CORE}/fleet/dispatcher.py",
        "                    self._dispatched_to.discard(inbox.planner)\n        return self.take",
        "                    pass\n        return self.take",
    ),
    Bug(
        "the lease of another scheduler is ignored at Attach",
        f"{SERVICE}/attachment.py",
        '        if holder not in ("", scheduler_id):\n',
        "        if holder is None:\n",
    ),
    # Aborts
    Bug(
        "an abort is lost while the engine is away",
        f"{LINK}/remote_engine.py",
        "        if self.is_away or ((remote := self._requests.get(number)) is not None and remote.is_put_back):\n",
        "        if (remote := self._requests.get(number)) is not None and remote.is_put_back:\n",
    ),
    Bug(
        "what was aborted goes on at the next engine, if the one before may not have heard of it",
        f"{LINK}/remote_engine.py",
        "            if request.aborted_with is not None:",
        "            if request.aborted_with is not None and not self.state:",
    ),
    Bug(
        "a client that leaves before its request is queued leaves the request behind",
        f"{LINK}/remote_engine.py",
        '            remote.abort(RequestAbortedError("the client cancelled the call or disconnected"))\n',
        "",
    ),
    # The link between fronts and engine
    Bug(
        "the requests of a front that is gone go on",
        f"{LINK}/front_session.py",
        "                await self._abort_all()  # first: a cancel while we wait leaves none behind\n",
        "",
    ),
    Bug(
        "the requests of a front that is gone end, unless somebody is in a hurry",
        f"{LINK}/front_session.py",
        "                await self._abort_all()  # first: a cancel while we wait leaves none behind\n"
        "                await asyncio.gather(*tasks, return_exceptions=True)\n",
        "                await asyncio.gather(*tasks, return_exceptions=True)\n"
        "                await self._abort_all()\n",
    ),
    Bug(
        "a newer session of a front does not end the older one",
        f"{LINK}/engine_servicer.py",
        "            older.end(FencedError(",
        "            repr(FencedError(",
    ),
    Bug(
        "a stream tells of a request before it is accepted",
        f"{FRONT}/api/stream_batch.py",
        "        if self.accepted is not None or self.error is not None:\n            self.is_announced = True\n",
        "        if True:\n            self.is_announced = True\n",
    ),
    Bug(
        "a front grants no further messages",
        f"{LINK}/engine_stream.py",
        "            self._outbox.message.credits += self._num_taken\n",
        "",
    ),
    Bug(
        "a front grants one message too few each time",
        f"{LINK}/engine_stream.py",
        "            self._outbox.message.credits += self._num_taken\n",
        "            self._outbox.message.credits += self._num_taken - 1\n",
    ),
    Bug(
        "the engine does not hear how a front ends an output",
        f"{LINK}/front_session.py",
        "                    sink.handle.finish_output(end.output_index, end.num_tokens, decode_reason(end.reason))\n",
        "                    pass\n",
    ),
    Bug(
        "what comes while a message is written is lost",
        f"{LINK}/front_session.py",
        "                batch, self._batch = self._batch, AnswerBatch()\n"
        "                self.num_output_tokens += batch.num_tokens\n"
        "                async with self._gate.limit():\n"
        "                    await write(batch.message())\n",
        "                async with self._gate.limit():\n"
        "                    await write(self._batch.message())\n"
        "                self._batch = AnswerBatch()\n",
    ),
    Bug(
        "the last tokens of a message come behind the ends",
        f"{LINK}/remote_request.py",
        '    if message.HasField("tokens"):\n        _deliver_tokens(message.tokens, requests)\n'
        "    for end in message.output_ends:\n"
        "        if (request := requests.get(end.number)) is not None:\n"
        "            request.end_output(end.output_index, end.num_tokens, decode_reason(end.reason))\n",
        "    for end in message.output_ends:\n"
        "        if (request := requests.get(end.number)) is not None:\n"
        "            request.end_output(end.output_index, end.num_tokens, decode_reason(end.reason))\n"
        '    if message.HasField("tokens"):\n        _deliver_tokens(message.tokens, requests)\n',
    ),
    Bug(
        "nobody goes on with the requests of an engine that is gone",
        f"{LINK}/remote_engine.py",
        "            self._outbox.submit(remote.resubmission(model))\n",
        "            remote.resubmission(model)\n",
    ),
    Bug(
        "the next engine begins anew, and not behind what there is",
        f"{LINK}/remote_request.py",
        "            request = replace(request, continuation=self.sink.so_far())\n",
        "            pass\n",
    ),
    Bug(
        "a request that goes on is as new as any other",
        f"{LINK}/remote_request.py",
        "max_model_len, was_queued=was_queued\n",
        "max_model_len, was_queued=False\n",
    ),
    Bug(
        "an output that had ended goes on at the next engine",
        f"{FRONT}/response.py",
        "                ContinuedOutput(np.array(output.token_ids, np.int32), output.finish_reason) for output",
        "                ContinuedOutput(np.array(output.token_ids, np.int32)) for output",
    ),
    Bug(
        "the engine counts the tokens of a continuation from its own first one",
        f"{LINK}/front_session.py",
        "        self._num_tokens_of = request.num_known_tokens\n",
        "        self._num_tokens_of = [0] * request.num_sequences\n",
    ),
    Bug(
        "each session of a front has the same numbers of requests again",
        f"{LINK}/remote_engine.py",
        "        self._is_front_ready = None\n",
        "        self._is_front_ready, self._numbers = None, itertools.count(1)\n",
    ),
    Bug(
        "what is left to say to an engine that is gone is said to the next one",
        f"{LINK}/engine_stream.py",
        "        self._outbox.clear()\n",
        "        self._outbox._full.clear()\n",
    ),
    Bug(
        "a refused request stays in the session of its front",
        f"{LINK}/front_session.py",
        '        """A request was not queued."""\n        self._requests.pop(number, None)\n',
        '        """A request was not queued."""\n',
    ),
    Bug(
        "a request that a front has checked counts as waiting for ever",
        f"{LINK}/cell.py",
        "        finally:\n            self._num_checked_of[tenant] -= 1\n",
        "        finally:\n            pass\n",
    ),
    Bug(
        "an engine ignores a larger incarnation",
        "scheduler_svc/processes/incarnation.py",
        "        if told < self.number or (told == self.number and self._is_granted):\n",
        "        if told:\n",
        LIVENESS,
    ),
    Bug(
        "an Abort that an engine was asked for is never answered if that one goes away",
        f"{LINK}/remote_engine.py",
        "        self._outbox.message.abort_calls.extend(call for call, _ in self._abort_calls.values())\n",
        "",
    ),
    Bug(
        "what a front has counted is counted for ever as if it were there",
        f"{LINK}/engine_servicer.py",
        "            self.metrics.end(number)\n",
        "",
    ),
    # Cells
    Bug(
        "the requests of a scheduler that is gone wait for it, and another one has nothing to do",
        f"{LINK}/cell.py",
        "            self._absence.begin()\n        self._rescue()\n",
        "            self._absence.begin()\n",
    ),
    Bug(
        "all fronts stay at one scheduler for ever",
        f"{LINK}/engines_in_use.py",
        "[joined[address] for address in agreement.used]",
        "[joined[address] for address in agreement.used[:1]]",
        LIVENESS,
    ),
    Bug(
        "a scheduler that the name has no more is left with requests",
        f"{LINK}/cell.py",
        "            if address not in self._addresses and not engine.num_requests:\n",
        "            if address not in self._addresses:\n",
    ),
    Bug(
        "a scheduler that the name has no more is never left",
        f"{LINK}/cell.py",
        "            if address not in self._addresses and not engine.num_requests:\n",
        "            if address is None and not engine.num_requests:\n",
        LIVENESS,
    ),
    Bug(
        "a request keeps its number at another scheduler",
        f"{LINK}/remote_engine.py",
        "        own_number = next(self._numbers)\n",
        "        own_number = number\n",
    ),
    Bug(
        "what a client says of a request that was moved goes to the scheduler that had it",
        f"{LINK}/remote_request.py",
        "        self._engine, self._number = engine, number\n",
        "        self._number = number\n",
    ),
    Bug(
        "a scheduler that is away is given new requests",
        f"{LINK}/engines_in_use.py",
        "        if engine.is_away or engine.why_not_ready or engine.model is None:\n",
        "        if engine.model is None:\n",
    ),
)
