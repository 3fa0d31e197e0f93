"""Mutants of the numbers: kernels in C, in Triton and in torch, attention, sampler, cache and ranks.

Some change no more than a rounding: after them a number depends on how the work was cut.
"""

from tests.mutants.mutant import Mutant

CSRC = "executor_svc/native/csrc"
NUMERICS = "tests/numerics"
KERNELS = "tests/kernels"
SAME_BITS = f"{NUMERICS}/test_same_bits.py::test_logits_are_those_of_the_sequence_alone"

KERNEL_MUTANTS = (
    # Attention in C
    Mutant(
        "threads that share a long context add its parts from the last one on",
        f"{CSRC}/attention.c:join_parts",
        "long index = 1; index < tile->num_partials; index++",
        "long index = tile->num_partials - 1; index > 0; index--",
        "tests/e2e/test_invariance.py::test_outputs_after_contexts_of_2000_tokens_are_those_alone",
    ),
    Mutant(
        "a single token adds the sums of a score in another order than a chunk",
        f"{CSRC}/attention_direct.h:score_heads",
        "vf_add(vf_add(vf_add(chains[0], chains[1]), chains[2]), chains[3])",
        "vf_add(vf_add(chains[0], chains[1]), vf_add(chains[2], chains[3]))",
        SAME_BITS,
    ),
    Mutant(
        "a chunk rounds the older values once more than a single token does",
        f"{CSRC}/attention_packed.h:add_columns",
        "vf_fma(vf_load(p), vf_all(shrink[i]), sum[i][v])",
        "vf_add(vf_mul(vf_load(p), vf_all(shrink[i])), sum[i][v])",
        SAME_BITS,
    ),
    Mutant(
        "a query of a strip sees what the last of them does",
        f"{CSRC}/attention_packed.h:score_strip",
        "strip->sight.upper[i]",
        "strip->sight.last",
        f"{NUMERICS}/test_native_attention.py::test_every_combination",
    ),
    Mutant(
        "keys are rotated the other way",
        f"{CSRC}/rotation.c:turn_by_position",
        "sin[i] = -sin[half + i];",
        "sin[i] = sin[half + i], sin[half + i] = -sin[i];",
        f"{NUMERICS}/test_llama.py::test_logits_at_every_position_equal_transformers",
    ),
    # Dense work in C
    Mutant(
        "a long sum is cut by the number of rows",
        f"{CSRC}/dense_float.c:multiply_format",
        "least(DEPTH, num_inputs - k)",
        "least(num_rows > 8 ? DEPTH : DEPTH / 2, num_inputs - k)",
        f"{NUMERICS}/test_native_dense.py::TestSegments::test_the_result_does_not_depend_on_the_other_rows",
    ),
    Mutant(
        "a row that a thread has for itself is rounded to 16 bits by another scale",
        f"{CSRC}/rows.c:quantize_rows",
        "quantize_to_int16(rows, row, num_values, values + row * value_stride);",
        "quantize_to_int16(rows, row, num_values, values + row * value_stride),"
        " rows->scales[row] *= end - begin == 1 ? 1.0001f : 1.0f;",
        SAME_BITS,
    ),
    Mutant(
        "odd rows of a step add the outputs of their experts in another order",
        f"{CSRC}/experts.c:sum_outputs",
        "vf_fma(vf_all(weights[j]), vf_load_part(scratch->outputs + places[j] * size + i, size - i), sum)",
        "vf_fma(vf_all(weights[j ^ (row & 1)]),"
        " vf_load_part(scratch->outputs + places[j ^ (row & 1)] * size + i, size - i), sum)",
        SAME_BITS,
    ),
    Mutant(
        "parts of ranks are added from the last on",
        f"{CSRC}/norm.c:octavo_add_parts",
        "long part = 1; part < num_parts; part++",
        "long part = num_parts - 1; part > 0; part--",
        f"{NUMERICS}/test_native_families.py::test_parts_are_added_in_the_order_of_the_ranks",
    ),
    Mutant(
        "the last minimum that the search for int4 tries is taken, not the best",
        f"{CSRC}/pack.c:fit_groups",
        "vf_where_less(fit.error, best.error, fit.minimum, best.minimum)",
        "fit.minimum",
        f"{NUMERICS}/test_number_formats.py::test_weights_that_were_in_int4_come_back",
    ),
    # The sampler in C
    Mutant(
        "NaN among large logits is passed over",
        f"{CSRC}/likeliest.c:largest_of",
        "vm_or(broken, vf_not_below_infinity(x))",
        "broken",
        f"{NUMERICS}/test_not_finite.py",
    ),
    Mutant(
        "the last tokens of a vocabulary are allowed, whatever the list says",
        f"{CSRC}/processors.c:keep_allowed",
        "long id = size / 8 * 8;",
        "long id = size;",
        f"{NUMERICS}/test_native_sampling.py::test_allow_lists_of_every_length",
    ),
    Mutant(
        "a penalty counts tokens of the row before",
        f"{CSRC}/processors.c:penalize_output",
        "counts[output[i]] = 0",
        "continue",
        f"{NUMERICS}/test_sampler_invariance.py::test_so_it_is_with_rows_and_neighbours_that_are_drawn",
    ),
    Mutant(
        "candidates of beams have log-probabilities of their own",
        f"{CSRC}/logprobs.c:run_candidates",
        "logprob_of(scores[id], log_total)",
        "scores[id] - (float)log_total",
        f"{NUMERICS}/test_sampler_invariance.py::test_a_token_has_one_log_probability_whoever_asks",
    ),
    # Triton
    Mutant(
        "a chunk on a GPU sees one position more than the window",
        "executor_svc.triton_kernels.prefill:attend_to_tiles",
        "distances > -window",
        "distances >= -window",
        f"{KERNELS}/test_triton_attention.py::test_a_window_begins_anywhere_in_a_tile",
    ),
    Mutant(
        "parts of a row's keys are joined without their weights",
        "executor_svc.triton_kernels.decode:reduce_kernel",
        "tl.exp2(scores - tl.max(scores, 0))",
        "tl.where(is_used, 1.0, 0.0)",
        f"{KERNELS}/test_triton_attention.py::test_keys_are_split",
    ),
    Mutant(
        "a split of keys begins where the first of several queries does",
        "executor_svc.triton_kernels.invariant_attention:attend_kernel",
        "split * (SPLIT_KEYS // TILE_KEYS)",
        "split * (SPLIT_KEYS // TILE_KEYS) + (1 if num_programs == 1 else 0)",
        f"{KERNELS}/test_invariant_attention.py",
    ),
    Mutant(
        "tiles of a product on a GPU follow the number of rows",
        "executor_svc.triton_kernels.matmul:matmul",
        "matmul_tile(num_outputs, x.dtype.itemsize)",
        "matmul_tile(num_outputs * num_rows, x.dtype.itemsize)",
        f"{KERNELS}/test_matmul.py::test_only_the_weight_chooses_tiles",
    ),
    Mutant(
        "the last part of a block is not copied",
        "executor_svc.triton_kernels.block_copy:BlockCopier.copy_blocks",
        "triton.cdiv(self._num_words, TILE_WORDS)",
        "max(1, self._num_words // TILE_WORDS)",
        f"{KERNELS}/test_block_copy.py",
    ),
    Mutant(
        "the second half of a key is rotated as the first is",
        "executor_svc.triton_kernels.key_value_write:key_value_write_kernel",
        "wide_high * cos_high + wide_low * sin_high",
        "wide_high * cos_high + wide_low * sin_low",
        f"{KERNELS}/test_key_value_write.py",
    ),
    Mutant(
        "of equally likely experts the last is chosen",
        "executor_svc.triton_kernels.routing:route_kernel",
        "tl.min(tl.where(left == largest, experts, NUM_EXPERTS - 1), 0)",
        "tl.max(tl.where(left == largest, experts, 0), 0)",
        f"{KERNELS}/test_row_kernels.py",
    ),
    Mutant(
        "a draw on a GPU counts the token before the one that it hits",
        "executor_svc.triton_kernels.sampling:_drawn",
        "before + tl.cumsum(masses, axis=1) > target",
        "before + tl.cumsum(masses, axis=1) >= target",
        f"{KERNELS}/test_device_sampling.py",
    ),
    Mutant(
        "ranks on a GPU are added from the last to the first",
        "executor_svc.models.triton_dense:sum_in_rank_order",
        "parts[1:]",
        "parts[1:].flip(0)",
        f"{KERNELS}/test_dense_kernels.py::test_ranks_are_added_up_in_their_order",
    ),
    # Torch: attention, sampler, cache, ranks
    Mutant(
        "what other sequences left in a block reaches the output",
        "executor_svc.attention.torch_backend:TorchAttentionPlan._decode",
        "values.index_fill_(0, bucket.padding, 0)",
        "None",
        f"{NUMERICS}/test_torch_attention.py::test_every_combination",
    ),
    Mutant(
        "outputs of one seed draw alike",
        "executor_svc.sampler.sample_rows:uniforms",
        "(seeds, output_indices.astype(np.uint64), num_output_tokens.astype(np.uint64))",
        "(seeds, num_output_tokens.astype(np.uint64))",
        "tests/unit/executor_svc/sampler/test_sampler.py",
    ),
    Mutant(
        "a nucleus lacks the token that fills it",
        "executor_svc.sampler.filters:_last_key",
        "cumulative - weights < mass",
        "cumulative < mass",
        "tests/unit/executor_svc/sampler/test_sampler.py::test_filtered_scores_equal_transformers",
    ),
    Mutant(
        "keys come back from the host as values",
        "executor_svc.cache.cache_engine:CacheEngine._swap_in",
        "staged[:, index]",
        "staged[:, index ^ 1]",
        "tests/unit/executor_svc/cache/test_cache_engine.py",
    ),
    Mutant(
        "ranks that share a KV head take different ones",
        "executor_svc.models.sharding:Shard.of",
        "rank * num_kv_heads // size",
        "rank % num_kv_heads",
        f"{NUMERICS}/test_tensor_parallel.py::test_ranks_that_share_a_kv_head_give_the_tokens_of_one_process",
    ),
)
