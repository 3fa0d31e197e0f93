"""Faults in what both tiers share: the batch table, the check of a delta, the wire."""

from tests.mutants.fault import Fault

UNIT = "tests/unit/shared"

AGREEMENT = f"{UNIT}/test_wire_agreement.py"
CAPABILITIES = "tests/skew/test_capabilities.py"

FAULTS = (
    # The batch table
    Fault(
        "forks lose their token rules",
        "shared/batch_table.py",
        "for column in (*counters, self.cache_salt, self.token_rules):",
        "for column in (*counters, self.cache_salt):",
        (f"{UNIT}/test_batch_table.py",),
    ),
    Fault(
        "forks lose their cache salt",
        "shared/batch_table.py",
        "for column in (*counters, self.cache_salt, self.token_rules):",
        "for column in (*counters, self.token_rules):",
        (f"{UNIT}/test_batch_table.py", "tests/unit/executor_svc/fake/test_worker.py"),
    ),
    Fault(
        "a released slot goes on decoding",
        "shared/batch_table.py",
        "            self._set_active(delta.released_slots, False)\n",
        "",
        (f"{UNIT}/test_batch_table.py::test_a_released_slot_runs_no_more",),
    ),
    Fault(
        "a token of the slot's last user reaches the next one",
        "shared/table_columns.py",
        "self.live[index] & (self.generation[index] == generations)",
        "self.live[index]",
        (f"{UNIT}/test_batch_table.py::test_a_token_of_the_slots_last_user_does_not_reach_the_next_one",),
    ),
    Fault(
        "two blocks that one slot gets in one step take the same place",
        "shared/batch_table.py",
        "            ends += _num_equal_before(slots)\n",
        "            pass\n",
        (f"{UNIT}/test_batch_table.py::test_appended_blocks_keep_their_order_also_twice_for_one_slot",),
    ),
    Fault(
        "a beam slot gets the sampled token",
        "shared/batch_table.py",
        "        written = current if layout.num_candidates is None else current & (layout.num_candidates == 0)\n",
        "        written = current\n",
        (f"{UNIT}/test_batch_table.py",),
    ),
    Fault(
        "the digest of the table leaves out token rules",
        "shared/table_digest.py",
        "            hasher.update(table.token_rules[slot].content())\n",
        "            pass\n",
        (f"{UNIT}/test_batch_table.py::test_digest_covers_each_part_of_an_admission",),
    ),
    Fault(
        "a prompt answers log-probabilities beyond its last token",
        "shared/step_layout.py",
        "np.minimum(self.starts + self.lengths, num_prompt_tokens - 1)",
        "np.minimum(self.starts + self.lengths, num_prompt_tokens)",
        ("tests/unit/executor_svc/fake/test_sampling.py::test_prompt_logprobs_do_not_depend_on_the_chunks",),
    ),
    # The check of a delta
    Fault(
        "a chunk may be longer than what is left of the sequence",
        "shared/delta_check.py",
        '        self._require(slots, lengths <= num_left, "would compute more tokens than it has")\n',
        "",
        (f"{UNIT}/test_delta_check.py",),
    ),
    Fault(
        "a block with a negative number is taken",
        "shared/delta_check.py",
        "exists = (block_ids >= 0) & (block_ids < self.table.num_device_blocks)",
        "exists = block_ids < self.table.num_device_blocks",
        (f"{UNIT}/test_delta_check.py",),
    ),
    Fault(
        "a slot may be given out with any generation",
        "shared/delta_check.py",
        "        if generation != next_generation(int(self.table.generation[slot])):\n",
        "        if generation < 0:\n",
        (f"{UNIT}/test_delta_check.py",),
    ),
    Fault(
        "a slot may decode that has no block for its next token",
        "shared/delta_check.py",
        "np.minimum(self.num_blocks * self.table.block_size, self.table.max_model_len - 1)",
        "np.full_like(self.num_blocks, self.table.max_model_len - 1)",
        (f"{UNIT}/test_delta_check.py",),
    ),
    Fault(
        "more than the tokens of a sequence may count as computed",
        "shared/delta_check.py",
        "        if not 0 <= admission.num_computed_tokens < num_tokens:\n",
        "        if not 0 <= admission.num_computed_tokens <= num_tokens:\n",
        (f"{UNIT}/test_delta_check.py",),
    ),
    Fault(
        "the check of a step looks at each slot by itsel",
        "shared/delta_check.py",
        "        if np.count_nonzero((self.num_tokens > most_tokens) & self.active):\n",
        "        if sum(bool(row.any()) for row in (self.num_tokens > most_tokens) & self.active):\n",
        (f"{UNIT}/test_wire_cost.py",),
    ),
    # Steps and results as messages
    Fault(
        "a step may swap out and in",
        "shared/step.py",
        "        if len(self.blocks_to_swap_out) and len(self.blocks_to_swap_in):\n",
        "        if False:\n",
        (f"{UNIT}/test_step.py::test_a_step_does_not_swap_out_and_in",),
    ),
    Fault(
        "log-probabilities without alternatives are not asked for on the wire",
        "shared/wire.py",
        "(value := getattr(row, name)) != neutral}",
        "(value := getattr(row, name)) and value != neutral}",
        (f"{UNIT}/test_wire.py::test_zero_logprobs_are_not_none",),
    ),
    Fault(
        "arrays travel as big-endian numbers",
        "shared/wire.py",
        'INT32 = np.dtype("<i4")',
        'INT32 = np.dtype(">i4")',
        (f"{UNIT}/test_wire.py::test_arrays_of_any_width_are_sent_as_little_endian_32_bits",),
    ),
    Fault(
        "the last sampling parameter does not survive the wire",
        "shared/wire.py",
        "for field, value in message.ListFields()}",
        "for field, value in message.ListFields()[:-1]}",
        (f"{UNIT}/test_wire.py::test_sampling_survives_the_wire",),
    ),
    Fault(
        "a range lacks its largest value",
        "shared/sampling_parameters.py",
        'value < float("inf") if self.high is None else value <= self.high',
        'value < float("inf") if self.high is None else value < self.high',
        (f"{UNIT}/test_sampling_parameters.py", "tests/unit/scheduler_svc/front/api/test_sampling_validation.py"),
    ),
    Fault(
        "an executor takes any sampling parameter",
        "shared/delta_check.py",
        "    if not all(parameter.allows(getattr(row, parameter.name)) for parameter in ROW_PARAMETERS):\n",
        "    if False:\n",
        (f"{UNIT}/test_delta_check.py",),
    ),
    Fault(
        "an array of half a number is not refused in words",
        "shared/wire.py",
        "    if len(content) % dtype.itemsize:\n",
        "    if False:\n",
        (f"{UNIT}/test_wire.py",),
    ),
    Fault(
        "a banned word of one token is read",
        "shared/wire_rules.py",
        "num_tokens != len(token_ids) or any(length < 2 for length in lengths)",
        "num_tokens != len(token_ids)",
        (f"{UNIT}/test_wire.py::test_banned_words_that_do_not_add_up_are_refused",),
    ),
    Fault(
        "an allow-list without any token is no allow-list",
        "shared/wire_rules.py",
        'message.allowed_mask if message.HasField("allowed_mask") else None',
        "message.allowed_mask or None",
        (f"{UNIT}/test_wire.py::test_rules_without_any_content_cost_nothing_but_a_mask_without_a_bit_is_kept",),
    ),
    Fault(
        "banned words may take any memory",
        "shared/wire_rules.py",
        "    if num_words * longest > MAX_WORD_CELLS:\n",
        "    if False:\n",
        ("tests/contract/test_hostile_steps.py",),
    ),
    # What was agreed on at Attach
    Fault(
        "a field of a capability that was not agreed on is passed over",
        "shared/wire_agreement.py",
        "            if capability not in self.capabilities:\n                raise InvalidStepError(",
        "            if False:\n                raise InvalidStepError(",
        (AGREEMENT,),
    ),
    Fault(
        "fields of capabilities in admissions are not looked at",
        "shared/wire_agreement.py",
        "        if is_plain and self.has_feature_bits and not step.admissions:\n",
        "        if is_plain and self.has_feature_bits:\n",
        (AGREEMENT,),
    ),
    Fault(
        "feature bits of a later release are passed over",
        "shared/wire_agreement.py",
        "            if bits >> number & 1 and number not in self.capabilities:\n",
        "            if False:\n",
        (AGREEMENT,),
    ),
    Fault(
        "an answer without the feature bits of its step is taken",
        "shared/wire_agreement.py",
        "            if last.number == _FEATURE_BITS_OF_ANSWER and value == sent_bits:\n",
        "            if last.number <= _FEATURE_BITS_OF_ANSWER:\n",
        (AGREEMENT,),
    ),
    Fault(
        "an executor agrees on capabilities with wire version 1",
        "executor_svc/service/servicer.py",
        "common(request.capabilities, info.capabilities) if wire_version >= 2 else frozenset()",
        "common(request.capabilities, info.capabilities)",
        (CAPABILITIES,),
    ),
    Fault(
        "a scheduler asks for what no executor announced",
        "scheduler_svc/executors/client.py",
        "capabilities=encode_capabilities(common(info.capabilities, WANTED)),",
        "capabilities=encode_capabilities(WANTED),",
        (CAPABILITIES,),
    ),
    Fault(
        "an executor's numerics count though they were not agreed on",
        "scheduler_svc/executors/client.py",
        "    if Capability.NUMERICS in agreement.capabilities:\n",
        "    if True:\n",
        (CAPABILITIES,),
    ),
    Fault(
        "what GetExecutorInfo says counts, not what Attach says",
        "scheduler_svc/executors/client.py",
        "        check_sizes(attached.info)\n",
        "        attached.info.CopyFrom(info)\n",
        (CAPABILITIES,),
    ),
)
