"""Faults in an executor: who owns it, its steps and its blocks, ranks, and what the fake one checks."""

from tests.mutants.fault import Fault

EXECUTOR = "executor_svc"
UNIT = "tests/unit/executor_svc"
CONTRACT = "tests/contract"

FAULTS = (
    # Epochs, leases, the stream of steps
    Fault(
        "another scheduler takes an executor whose lease lives",
        f"{EXECUTOR}/service/attachment.py",
        '        if holder not in ("", scheduler_id):\n',
        "        if False:\n",
        (f"{UNIT}/service/test_attachment.py",),
    ),
    Fault(
        "a later incarnation takes an executor from a holder that has its stream",
        f"{EXECUTOR}/service/attachment.py",
        "            if self.grace_s(scheduler_id, incarnation, now):\n",
        "            if False:\n",
        (f"{UNIT}/service/test_attachment.py",),
    ),
    Fault(
        "an older incarnation takes an executor",
        f"{EXECUTOR}/service/attachment.py",
        "            if incarnation < (largest := self.incarnations.get(scheduler_id, 0)):\n",
        "            if incarnation < (largest := 0):\n",
        (f"{UNIT}/service/test_attachment.py",),
    ),
    Fault(
        "an older epoch may still write",
        f"{EXECUTOR}/service/attachment.py",
        "        if epoch != self.epoch:\n",
        "        if epoch > self.epoch:\n",
        (f"{UNIT}/service/test_attachment.py",),
    ),
    Fault(
        "a heartbeat does not prolong the lease",
        f"{EXECUTOR}/service/attachment.py",
        "        self.require(epoch)\n        self._expires_s = now + self._lease_s\n",
        "        self.require(epoch)\n",
        (f"{UNIT}/service/test_attachment.py::test_renewing_prolongs_the_lease_from_now",),
    ),
    Fault(
        "a caller of an instance that is gone is not fenced",
        f"{EXECUTOR}/service/servicer.py",
        '        if instance_id not in ("", own):\n',
        "        if False:\n",
        (f"{CONTRACT}/test_execution_service.py::test_a_caller_of_an_instance_that_is_gone_is_fenced",),
    ),
    Fault(
        "the highest wire version is taken whatever the other side speaks",
        f"{EXECUTOR}/service/servicer.py",
        "    version = min(request.max_wire_version, wire.MAX_WIRE_VERSION)\n",
        "    version = wire.MAX_WIRE_VERSION\n",
        ("tests/skew/test_wire_range.py::test_both_sides_go_on_with_the_highest_version_that_both_speak",),
    ),
    Fault(
        "a resumed stream gets a response too few",
        f"{EXECUTOR}/service/step_log.py",
        "        return list(kept[len(kept) - num_wanted :])\n",
        "        return list(kept[len(kept) - num_wanted + 1 :])\n",
        (f"{UNIT}/service/test_step_log.py",),
    ),
    Fault(
        "a step that comes twice runs twice",
        f"{EXECUTOR}/service/step_runner.py",
        "        return self._log.find(message.step_id)\n",
        "        return None\n",
        (f"{CONTRACT}/test_execution_steps.py::test_a_step_that_comes_twice_runs_once",),
    ),
    Fault(
        "the step thread wakes the event loop itself",
        f"{EXECUTOR}/service/step_runner.py",
        "        self._thread.answer(lambda: self._answer(first, result))\n",
        "        self._answer(first, result)\n",
        (f"{UNIT}/service/test_step_runner.py",),
    ),
    Fault(
        "steps run on after one that failed",
        f"{EXECUTOR}/service/step_runner.py",
        '            self._failure = f"step {message.step_id} failed',
        '            _ = f"step {message.step_id} failed',
        (f"{CONTRACT}/test_execution_steps.py::test_after_a_failed_step_the_epoch_runs_no_more",),
    ),
    # Steps and blocks
    Fault(
        "a step may move blocks that do not exist",
        f"{EXECUTOR}/worker/interface.py",
        "    outside = block_ids[(block_ids < 0) | (block_ids >= num_blocks)]\n",
        "    outside = block_ids[:0]\n",
        (f"{UNIT}/fake/test_moves.py::test_moves_of_unknown_blocks_write_nothing",),
    ),
    Fault(
        "a step may compute more tokens than the limit",
        f"{EXECUTOR}/worker/interface.py",
        "    if layout.num_tokens > max_num_batched_tokens:\n",
        "    if False:\n",
        (f"{UNIT}/fake/test_worker.py::test_a_step_beyond_the_token_budget_fails",),
    ),
    Fault(
        "a block is not copied",
        f"{EXECUTOR}/cache/cache_engine.py",
        "            self._copy_blocks(step.blocks_to_copy)\n",
        "            pass\n",
        (f"{UNIT}/cache/test_cache_engine.py",),
    ),
    Fault(
        "keys come back from the host as values",
        f"{EXECUTOR}/cache/cache_engine.py",
        "pool.index_copy_(0, destinations, staged[:, index])",
        "pool.index_copy_(0, destinations, staged[:, index ^ 1])",
        (f"{UNIT}/cache/test_cache_engine.py",),
    ),
    Fault(
        "the next step feeds a token that is not known yet",
        f"{EXECUTOR}/worker/last_tokens.py",
        "torch.where(token_ids == UNKNOWN_TOKEN, self.token_ids[slots], token_ids)",
        "token_ids.clamp(min=0)",
        ("tests/numerics/test_launch_ahead.py::test_sequences_come_and_go_while_tokens_are_in_flight",),
    ),
    Fault(
        "a new attachment keeps the unfinished steps of the last one",
        f"{EXECUTOR}/worker/torch_worker.py",
        "        self._unrecorded.clear()\n",
        "",
        ("tests/numerics/test_launch_ahead.py::test_a_new_epoch_knows_nothing_of_steps_that_were_not_finished",),
    ),
    Fault(
        "rows that pad a graph write into block 0",
        f"{EXECUTOR}/worker/decode_graphs.py",
        "[0, 0, 0, self._spare_block_id * caches[0].block_size]",
        "[0, 0, 0, 0]",
        ("tests/numerics/test_decode_graphs.py::test_padding_rows_write_to_no_block_that_sequences_have",),
    ),
    Fault(
        "rows that pad a graph keep the values of the last step",
        f"{EXECUTOR}/worker/decode_graphs.py",
        "        self._inputs.copy_(to_device(inputs, self._inputs.device))\n",
        "        self._inputs[:, :num_rows].copy_(to_device(inputs[:, :num_rows], self._inputs.device))\n",
        ("tests/numerics/test_decode_graphs.py::test_padding_rows_write_to_no_block_that_sequences_have",),
    ),
    # Memory
    Fault(
        "the largest step runs half of its tokens",
        f"{EXECUTOR}/worker/largest_step.py",
        "budget, longest = info.max_num_batched_tokens, info.max_model_len - 1",
        "left, longest = max(info.max_num_seqs, info.max_num_batched_tokens // 2), info.max_model_len - 1",
        ("tests/numerics/test_torch_worker.py",),
    ),
    Fault(
        "the warm-up does nothing",
        f"{EXECUTOR}/worker/warm_up.py",
        "        execute(worker, Step(0, step_id, delta))\n",
        "        pass\n",
        ("tests/numerics/test_torch_worker.py::test_a_warm_up_runs_every_kind_of_step",),
    ),
    Fault(
        "the cache of a GPU takes what other processes have",
        f"{EXECUTOR}/cache/block_count.py",
        "    others = memory.total() - memory.free() - memory.used_by_torch()\n",
        "    others = 0\n",
        (f"{UNIT}/cache/test_block_count.py",),
    ),
    # Ranks
    Fault(
        "a stranger may join the ranks",
        f"{EXECUTOR}/parallel/step_channel.py",
        "kind is FrameKind.HELLO and hmac.compare_digest(secret.encode(), self.address.secret.encode())",
        "kind is FrameKind.HELLO",
        (f"{UNIT}/parallel/test_step_channel.py",),
    ),
    Fault(
        "two processes may be the same rank",
        f"{EXECUTOR}/parallel/step_channel.py",
        " or rank in self._connections:\n            sock.close()",
        ":\n            sock.close()",
        (f"{UNIT}/parallel/test_step_channel.py",),
    ),
    Fault(
        "a rank that is frozen is never given up",
        f"{EXECUTOR}/parallel/connection.py",
        "                if not self._was_frozen():\n                    raise\n",
        "                continue\n",
        (
            f"{UNIT}/parallel/test_step_channel.py::test_a_peer_that_says_nothing_is_lost_and_one_that_only_waits_is_not",
        ),
    ),
    # The fake executor
    Fault(
        "the fake executor reads blocks without a check",
        f"{EXECUTOR}/fake/worker.py",
        "        self._cache.check_reads(self._table, layout, self._histories)\n",
        "",
        (f"{UNIT}/fake/test_worker.py",),
    ),
    Fault(
        "the fake executor lets two sequences write one place",
        f"{EXECUTOR}/fake/cache.py",
        "        if np.count_nonzero(lost):\n",
        "        if False:\n",
        (f"{UNIT}/fake/test_worker.py",),
    ),
    Fault(
        "the fake executor finds a prefix of another salt",
        f"{EXECUTOR}/fake/cache.py",
        "_wrap(SALT_BASE * (2 * admission.cache_salt + 1))",
        "_wrap(SALT_BASE)",
        (f"{UNIT}/fake/test_worker.py::test_a_prefix_of_another_salt_is_found",),
    ),
    Fault(
        "the fake executor misses the first token of a window",
        f"{EXECUTOR}/fake/cache.py",
        "starts - (self._sliding_window_tokens - 1)",
        "starts - (self._sliding_window_tokens - 2)",
        (f"{UNIT}/fake/test_moves.py",),
    ),
)
