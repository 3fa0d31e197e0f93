"""Faults in the numbers: sampling, log-probabilities, attention, rotation, sharding, weights."""

from tests.mutants.fault import Fault

EXECUTOR = "executor_svc"
UNIT = "tests/unit/executor_svc"
NUMERICS = "tests/numerics"

FAULTS = (
    # Sampling
    Fault(
        "outputs of one seed draw alike",
        f"{EXECUTOR}/sampler/sample_rows.py",
        "(seeds, output_indices.astype(np.uint64), num_output_tokens.astype(np.uint64))",
        "(seeds, num_output_tokens.astype(np.uint64))",
        (f"{UNIT}/sampler/test_sampler.py::test_uniforms_are_a_pure_function_of_seed_output_and_position",),
    ),
    Fault(
        "a nucleus lacks the token that fills it",
        f"{EXECUTOR}/sampler/filters.py",
        "(cumulative - weights < mass).sum(-1, keepdim=True)",
        "(cumulative < mass).sum(-1, keepdim=True)",
        (f"{UNIT}/sampler/test_sampler.py::test_filtered_scores_equal_transformers",),
    ),
    Fault(
        "filters come before the temperature",
        f"{EXECUTOR}/sampler/filters.py",
        "    scores = scores / _temperatures(sampling, scores.device)\n    for name",
        "    scores = scores.clone()\n    for name",
        (f"{UNIT}/sampler/test_sampler.py::test_filtered_scores_equal_transformers",),
    ),
    Fault(
        "a repetition penalty raises negative logits",
        f"{EXECUTOR}/sampler/processors.py",
        "torch.where(former < 0, former * penalties, former / penalties)",
        "former / penalties",
        (f"{NUMERICS}/test_processors.py::test_processed_logits_equal_transformers",),
    ),
    Fault(
        "the presence penalty grows with each occurrence",
        f"{EXECUTOR}/sampler/processors.py",
        " * counts.astype(np.float32) + presence[of_rows]",
        " * counts.astype(np.float32) + presence[of_rows] * counts",
        (f"{NUMERICS}/test_processors.py::test_output_penalties_are_those_of_openai",),
    ),
    Fault(
        "output penalties count the prompt",
        f"{EXECUTOR}/sampler/processors.py",
        "    output = rows.history(asking, output_only=True)\n",
        "    output = rows.history(asking, output_only=False)\n",
        (f"{NUMERICS}/test_processors.py::test_output_penalties_are_those_of_openai",),
    ),
    Fault(
        "an output may end before min_tokens",
        f"{EXECUTOR}/sampler/sample_rows.py",
        '        is_short = self.sampling["min_tokens"] > self.num_output_tokens\n',
        '        is_short = self.sampling["min_tokens"] > self.num_output_tokens + 1\n',
        (f"{UNIT}/fake/test_sampling.py::test_no_end_comes_before_min_tokens",),
    ),
    Fault(
        "a banned word at the beginning of a history is not seen",
        f"{EXECUTOR}/sampler/sample_rows.py",
        "np.where(positions >= 0, self.token_ids",
        "np.where(positions > 0, self.token_ids",
        (f"{NUMERICS}/test_processors.py::test_greedy_rows_get_the_processors_too",),
    ),
    Fault(
        "candidates of beams are not penalized",
        f"{EXECUTOR}/sampler/torch_backend.py",
        "        process(logprobs, rows)\n",
        "        pass\n",
        (f"{NUMERICS}/test_processors.py::test_candidates_are_processed_log_probabilities_as_in_transformers",),
    ),
    Fault(
        "log-probabilities of a prompt are wrong where its parts meet",
        f"{EXECUTOR}/sampler/sampler.py",
        "            logits = to_logits(hidden[span])\n",
        "            logits = to_logits(hidden[: len(rows)])\n",
        (f"{NUMERICS}/test_prompt_logprobs.py",),
    ),
    Fault(
        "the C sampler allows the last tokens of a vocabulary",
        f"{EXECUTOR}/native/csrc/processors.c",
        "for (long id = size / 8 * 8; id < size; id++)",
        "for (long id = size; id < size; id++)",
        (f"{NUMERICS}/test_native_sampling.py::test_allow_lists_of_every_length",),
    ),
    Fault(
        "the sum of a row's weights depends on whether other rows are there",
        f"{EXECUTOR}/native/csrc/scores.h",
        "        if (!sums && (block + 1) % 16 &&",
        "        static _Thread_local const float *first;\n"
        "        if (!first) first = scores;\n"
        "        if (!sums && (block + 1) % (scores == first ? 16 : 8) &&",
        (f"{NUMERICS}/test_sampler_invariance.py::test_a_row_alone_is_the_row_in_any_batch",),
    ),
    Fault(
        "a penalty counts tokens of the row before",
        f"{EXECUTOR}/native/csrc/processors.c",
        "        if (is_token(output[i], size)) counts[output[i]] = 0;\n",
        "        ;\n",
        (f"{NUMERICS}/test_sampler_invariance.py::test_so_it_is_with_rows_and_neighbours_that_are_drawn",),
    ),
    Fault(
        "candidates of beams have log-probabilities of their own",
        f"{EXECUTOR}/native/csrc/logprobs.c",
        "logprobs[id] = logprob_of(scores[id], log_total);",
        "logprobs[id] = scores[id] - (float)log_total;",
        (f"{NUMERICS}/test_sampler_invariance.py::test_a_token_has_one_log_probability_whoever_asks",),
    ),
    # Attention
    Fault(
        "a token sees one position more than its window",
        f"{EXECUTOR}/attention/step_reads.py",
        "np.maximum(metadata.starts + 1 - window, 0)",
        "np.maximum(metadata.starts - window, 0)",
        (f"{NUMERICS}/test_torch_attention.py::test_every_combination",),
    ),
    Fault(
        "ALiBi is left out",
        f"{EXECUTOR}/attention/explicit_attention.py",
        "        if slopes is not None:\n",
        "        if False:\n",
        (f"{NUMERICS}/test_torch_attention.py::test_every_combination",),
    ),
    Fault(
        "scores are not brought back to the size of the soft cap",
        f"{EXECUTOR}/attention/explicit_attention.py",
        "scores.div_(soft_cap).tanh_().mul_(soft_cap)",
        "scores.div_(soft_cap).tanh_()",
        (f"{NUMERICS}/test_torch_attention.py::test_every_combination",),
    ),
    Fault(
        "what other sequences left in a block reaches the output",
        f"{EXECUTOR}/attention/torch_backend.py",
        "        values.index_fill_(0, bucket.padding, 0)\n",
        "",
        (f"{NUMERICS}/test_torch_attention.py::test_every_combination",),
    ),
    Fault(
        "the C attention sees one position more than the window",
        f"{EXECUTOR}/native/csrc/attention_packed.h",
        "end - step->window)",
        "end - 1 - step->window)",
        (f"{NUMERICS}/test_native_attention.py::test_a_window_begins_anywhere_in_a_block",),
    ),
    Fault(
        "a query of a strip sees what the last of them does",
        f"{EXECUTOR}/native/csrc/attention_packed.h",
        "strip->sight.lower[i], strip->sight.upper[i]);",
        "strip->sight.lower[i], strip->sight.last);",
        (f"{NUMERICS}/test_native_attention.py::test_every_combination",),
    ),
    Fault(
        "parts of a long context are joined without their weights",
        f"{EXECUTOR}/native/csrc/attention.c",
        "vf_mul(vf_load(part->weights + i), other_factor)",
        "vf_load(part->weights + i)",
        (f"{NUMERICS}/test_native_attention.py::test_a_long_context_is_split_over_the_threads",),
    ),
    Fault(
        "the GPU kernel sees one position more than the window",
        f"{EXECUTOR}/triton_kernels/prefill.py",
        "is_visible = is_visible & (distances > -window)",
        "is_visible = is_visible & (distances >= -window)",
        ("tests/kernels/test_triton_attention.py::test_a_window_begins_anywhere_in_a_tile",),
    ),
    Fault(
        "splits of keys on a GPU follow the batch",
        f"{EXECUTOR}/triton_kernels/invariant_attention.py",
        "        SPLIT_KEYS=SPLIT_KEYS,\n        num_warps=shape",
        "        SPLIT_KEYS=SPLIT_KEYS * (2 if num_tiles > 2 else 1),\n        num_warps=shape",
        ("tests/kernels/test_invariant_attention.py::test_only_the_shape_of_the_model_chooses_tiles",),
    ),
    Fault(
        "tiles of a product on a GPU follow the number of rows",
        f"{EXECUTOR}/triton_kernels/matmul.py",
        "tile = matmul_tile(num_outputs, x.dtype.itemsize)",
        "tile = matmul_tile(num_outputs * num_rows, x.dtype.itemsize)",
        ("tests/kernels/test_matmul.py::test_only_the_weight_chooses_tiles",),
    ),
    Fault(
        "a row on a GPU is drawn otherwise beside one that asks for log-probabilities",
        f"{EXECUTOR}/sampler/sampler.py",
        "TorchBackend(draw_on_device) if native is None",
        "TorchBackend() if native is None",
        (
            f"{UNIT}/sampler/test_sampler.py"
            "::test_a_gpu_draws_a_row_alike_whether_a_neighbour_asks_for_log_probabilities_or_not",
        ),
    ),
    Fault(
        "ranks on a GPU are added from the last to the first",
        f"{EXECUTOR}/models/triton_dense.py",
        "    total = parts[0].float()\n    for other in parts[1:]:",
        "    parts = parts.flip(0)\n    total = parts[0].float()\n    for other in parts[1:]:",
        ("tests/kernels/test_dense_kernels.py::test_ranks_are_added_up_in_their_order",),
    ),
    # Rotation
    Fault(
        "linear RoPE scaling is ignored",
        f"{EXECUTOR}/models/rotary_embedding.py",
        "    if isinstance(scaling, LinearScaling):\n        return frequencies / scaling.factor\n",
        "    if isinstance(scaling, LinearScaling):\n        return frequencies\n",
        (
            "tests/numerics/test_architectures.py::"
            "test_settings_that_our_own_code_has_equal_plain_transformers[linear rotary scaling]",
        ),
    ),
    Fault(
        "short waves of Llama 3 are stretched too",
        f"{EXECUTOR}/models/rotary_embedding.py",
        "    share_kept.clamp_(0, 1)\n",
        "    share_kept.zero_()\n",
        (f"{NUMERICS}/test_llama.py::test_logits_at_every_position_equal_transformers[llama3_rope]",),
    ),
    Fault(
        "keys are rotated the other way",
        f"{EXECUTOR}/native/csrc/rotation.c",
        "        sin[i] = -sin[half + i];\n",
        "        sin[i] = sin[half + i];\n        sin[half + i] = -sin[i];\n",
        (f"{NUMERICS}/test_llama.py::test_logits_at_every_position_equal_transformers",),
    ),
    Fault(
        "the last of equal logits is taken",
        f"{EXECUTOR}/native/csrc/likeliest.c",
        "        if (!(row[found[part]] > top)) continue;\n",
        "        if (!(row[found[part]] >= top)) continue;\n",
        (f"{NUMERICS}/test_native_forward.py::test_the_first_of_equal_logits_is_the_likeliest_in_every_part_of_a_row",),
    ),
    Fault(
        "a step's one call runs the sequences of the last step",
        f"{EXECUTOR}/worker/native_runner.py",
        "last_layout.slots is layout.slots",
        "len(last_layout.slots) == len(layout.slots)",
        (f"{NUMERICS}/test_native_forward.py::test_every_family_and_every_kind_of_step",),
    ),
    Fault(
        "rows are sampled as those of the last step",
        f"{EXECUTOR}/sampler/sample_rows.py",
        "rows.slots is layout.sample_slots",
        "len(rows.slots) == len(layout.sample_slots)",
        (f"{NUMERICS}/test_native_forward.py::test_sequences_that_take_turns_are_sampled_each_as_it_asks",),
    ),
    Fault(
        "a step's one call ends the last layer for other tokens than those that are wanted",
        f"{EXECUTOR}/native/csrc/forward.c",
        "work->attended + batch->wanted[i] * width",
        "work->attended + i * width",
        (f"{NUMERICS}/test_native_forward.py::test_every_family_and_every_kind_of_step",),
    ),
    Fault(
        "sample rows are looked up in every step",
        f"{EXECUTOR}/sampler/sample_rows.py",
        "        if rows is not None and rows.slots is layout.sample_slots:\n",
        "        if rows is not None and rows.slots is None:\n",
        (f"{NUMERICS}/test_step_calls.py::test_a_decode_step_takes_as_much_python_for_many_rows_as_for_one",),
    ),
    # Ranks
    Fault(
        "ranks that share a KV head take different ones",
        f"{EXECUTOR}/models/sharding.py",
        "        first_kv_head = rank * num_kv_heads // size\n",
        "        first_kv_head = rank % num_kv_heads\n",
        (f"{NUMERICS}/test_tensor_parallel.py::test_ranks_that_share_a_kv_head_give_the_tokens_of_one_process",),
    ),
    Fault(
        "every rank adds the bias",
        f"{EXECUTOR}/models/decoder_weights.py",
        "has_bias and self._shard.rank == 0",
        "has_bias",
        (f"{NUMERICS}/test_tensor_parallel.py::test_tokens_equal_those_of_one_process[OPTForCausalLM-2]",),
    ),
    Fault(
        "all ranks have the ALiBi slopes of the first",
        f"{EXECUTOR}/models/sharding.py",
        "layer.alibi_slopes[slice(*self.heads)]",
        "layer.alibi_slopes[: self.num_heads]",
        (f"{NUMERICS}/test_tensor_parallel.py::test_tokens_equal_those_of_one_process[BloomForCausalLM-2]",),
    ),
    # Weights
    Fault(
        "int8 weights use another scale than they are restored with",
        f"{EXECUTOR}/models/quantized_linear.py",
        "groups.abs().amax(-1, keepdim=True) / 127",
        "groups.abs().amax(-1, keepdim=True) / 64",
        (f"{NUMERICS}/test_kernels.py::test_int8_is_the_same_on_every_kernel_and_near_float32",),
    ),
    Fault(
        "the search for int4 scales fuses a product with a sum",
        f"{EXECUTOR}/native/csrc/pack.c",
        "squares = vf_add(squares, vf_mul(part, code));",
        "squares = vf_fma(part, code, squares);",
        (
            f"{NUMERICS}/test_number_formats.py::test_rows_of_a_weight_and_products_of_every_number_of_rows[shape8-INT4-avx2]",
        ),
    ),
    Fault(
        "the last minimum that the search for int4 tries is taken, not the best",
        f"{EXECUTOR}/native/csrc/pack.c",
        "vf_where_less(fit.error, best.error, fit.minimum, best.minimum)",
        "fit.minimum",
        (f"{NUMERICS}/test_number_formats.py::test_weights_that_were_in_int4_come_back",),
    ),
    Fault(
        "values in 8 bits are written over queries in 4",
        f"{EXECUTOR}/native/csrc/linear.c",
        "out + (is_rest ? matrix->num_outputs : 0)",
        "out",
        (f"{NUMERICS}/test_number_formats.py::test_a_part_in_another_format_has_the_bits_of_its_own_matrix",),
    ),
    Fault(
        "a tensor of another shape is loaded",
        f"{EXECUTOR}/checkpoint/weights.py",
        "    if shape != list(target.shape):\n",
        "    if False:\n",
        (f"{UNIT}/checkpoint/test_weights.py::test_wrong_shape",),
    ),
    Fault(
        "an index may name files outside of its directory",
        f"{EXECUTOR}/checkpoint/weights.py",
        "    return isinstance(value, str) and Path(value).name == value\n",
        "    return isinstance(value, str)\n",
        (f"{UNIT}/checkpoint/test_weights.py::test_a_shard_outside_the_directory_is_refused",),
    ),
    Fault(
        "int8 weights are the same model to a fleet",
        f"{EXECUTOR}/checkpoint/weights.py",
        '        if quantization != "none":  # other weights\n',
        "        if False:\n",
        (f"{NUMERICS}/test_kernels.py::test_int8_is_another_model_to_a_fleet",),
    ),
    Fault(
        "the weights of the chosen experts do not add up to 1",
        f"{EXECUTOR}/native/csrc/experts.c",
        "    if (!experts->is_normalized) return;\n",
        "    return;\n",
        (
            f"{NUMERICS}/test_architectures.py::test_logits_and_greedy_tokens_equal_plain_transformers[MixtralForCausalLM]",
        ),
    ),
    # Dense work in C
    Fault(
        "of equal scores the last expert is chosen",
        f"{EXECUTOR}/native/csrc/experts.c",
        "scores[expert] > scores[best]",
        "scores[expert] >= scores[best]",
        (f"{NUMERICS}/test_native_families.py::test_of_equal_scores_the_first_expert_is_chosen",),
    ),
    Fault(
        "a row's experts are added in an order that depends on the rows before",
        f"{EXECUTOR}/native/csrc/experts.c",
        "        for (long j = 0; j < num_chosen; j++)\n            sum = vf_fma",
        "        for (long n = 0, j = row % num_chosen; n < num_chosen; n++, j = (j + 1) % num_chosen)\n"
        "            sum = vf_fma",
        (f"{NUMERICS}/test_native_families.py::test_the_experts_of_a_row_do_not_depend_on_the_other_rows",),
    ),
    Fault(
        "a long sum is cut by the number of rows",
        f"{EXECUTOR}/native/csrc/dense_float.c",
        "long depth = least(DEPTH, num_inputs - k);",
        "long depth = least(num_rows > 8 ? DEPTH : DEPTH / 2, num_inputs - k);",
        (f"{NUMERICS}/test_native_dense.py::TestSegments::test_the_result_does_not_depend_on_the_other_rows",),
    ),
    Fault(
        "key heads are normed as query heads are",
        f"{EXECUTOR}/native/csrc/segment.c",
        "head < norms->num_heads ? &norms->query : &norms->key",
        "&norms->query",
        (f"{NUMERICS}/test_native_families.py::test_it_equals_torch",),
    ),
    Fault(
        "parts of ranks are added from the last on",
        f"{EXECUTOR}/native/csrc/norm.c",
        "for (long part = 1; part < num_parts; part++)",
        "for (long part = num_parts - 1; part > 0; part--)",
        (f"{NUMERICS}/test_native_families.py::test_parts_are_added_in_the_order_of_the_ranks",),
    ),
)
