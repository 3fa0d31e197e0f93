"""A decoder-only transformer: a loop of dense segments and attentions over the tokens of a step.

One flat forward pass over the tokens of all sequences of a step. Which sequence a token belongs to is known to the
attention plan alone. The model is a loop: a segment of dense work (`dense.py`), the attention of a layer or what it has
in its place (`executor_svc/states/`), the next segment. What a family does its own way is in its `ModelConfig`; the
weights are made by `decoder_weights.py` and filled in place by `executor_svc/checkpoint/weights.py`. On a CPU the C
library runs all of it in one call, with the same bits (`native_forward.py`).
"""

import re
from collections.abc import Sequence
from typing import Any, Final

import torch

from executor_svc.adapters.slots import AdapterSlots
from executor_svc.attention.interface import AttentionPlan, CachedLayer, LayerCache
from executor_svc.checkpoint.cache_scales import is_cache_scale
from executor_svc.checkpoint.weight_map import WeightSource
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder_weights import DecoderWeights, StoredFormats
from executor_svc.models.dense import DenseKernels
from executor_svc.models.language_model import ModelShape
from executor_svc.models.rotary_embedding import inverse_frequencies, query_factors
from executor_svc.models.sharding import Shard
from executor_svc.models.state_config import LastHiddenConfig, SlotState
from executor_svc.parallel.group import SINGLE_RANK, TensorParallelGroup
from executor_svc.states.interface import Mamba2Weights, StateBackend
from executor_svc.states.live_states import AcceptedDrafts, StepStates
from executor_svc.states.torch_states import TorchStateBackend

_LAYER: Final = re.compile(r"model\.layers\.(\d{1,9})\.")


class Decoder:
    """A decoder with uninitialised weights; `load` fills them.

    Raises: ModelLoadError: the ranks cannot share this model.
    """

    # Any: mypy does not solve for the matrices of the kernels here, as it does in DecoderWeights.
    def __init__(
        self,
        config: ModelConfig,
        kernels: DenseKernels[Any],
        group: TensorParallelGroup = SINGLE_RANK,
        stored: StoredFormats | None = None,
        states: StateBackend | None = None,
        drafts_for: "Decoder | None" = None,
        adapters: AdapterSlots | None = None,
        encodes_for: "Decoder | None" = None,
    ) -> None:
        self.config = config
        self.dtype = kernels.dtype
        self.device = kernels.device
        self._group = group
        self._shard = Shard.of(config, self._group.rank, self._group.size)
        self._kernels = kernels
        self._states = states or TorchStateBackend()
        self.weights: DecoderWeights[Any] = DecoderWeights(
            config,
            kernels,
            self._shard,
            stored,
            None if drafts_for is None else drafts_for.weights,
            adapters,
            None if encodes_for is None else encodes_for.weights,
        )
        self.adapters = adapters  # None: it has no slots for any
        # How the heads of this rank attend.
        self.attention_layers = [
            self._shard.attention_layer(layer, sinks, biases)
            for layer, sinks, biases in zip(
                config.layers, self.weights.sinks, self.weights.distance_biases, strict=True
            )
        ]
        self.frequencies = {
            layer.rope: inverse_frequencies(layer.rope, layer.head_dim).to(kernels.device)
            for layer in config.layers
            if layer.rope is not None
        }
        self.query_factors = {
            rope: query_factors(rope, config.max_position_embeddings).to(kernels.device) for rope in self.frequencies
        }
        # The head that drafts: it begins with hidden states beside tokens, which `forward` calls `previous`.
        self.mtp = None
        if config.uses_mtp:
            self.mtp = Decoder(config.of_mtp(), kernels, group, stored, states, drafts_for=self)

    @property
    def shape(self) -> ModelShape:
        """What the executor needs to know of the model."""
        config = self.config
        mixers = [layer for layer in config.layers if layer.has_mixer]  # a cache or a state is numbered among these
        cached = [layer for layer in mixers if layer.attends and layer.cache_of is None]
        states: dict[int, SlotState] = {
            index: layer.state.shared_by(self._shard.size)
            for index, layer in enumerate(mixers)
            if layer.state is not None
        }
        if config.uses_mtp:
            assert config.mtp is not None, "it has one"
            cached.append(config.mtp)
            states[len(mixers) + 1] = LastHiddenConfig(config.hidden_size)
        return ModelShape(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            caches=tuple(
                CachedLayer(
                    self._shard.num_kv_heads(each),
                    each.head_dim,
                    each.attention.window_tokens,
                    each.value_begin,
                    each.attends_to_encoder,
                )
                for each in cached
            ),
            states=states,
            has_position_limit=all(layer.distance_buckets is None for layer in config.layers),
        )

    @property
    def hidden_size(self) -> int:
        """Numbers in a hidden state."""
        return self.config.hidden_size

    @property
    def why_not_capturable(self) -> str | None:
        """Why a CUDA graph cannot hold `forward`, in a few words; None: it can."""
        if any(layer.state is not None for layer in self.config.layers):
            return "a layer has a state, which is computed on the host"
        if self.weights.has_experts_apart:
            return "the host reads which experts are chosen"
        if self.config.encoder is not None:
            return "a step has the plan of an encoder's inputs beside its own"
        return self._group.why_not_capturable

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        attention: AttentionPlan,
        wanted: torch.Tensor,
        states: StepStates | None = None,
        previous: torch.Tensor | None = None,
        encoded: AttentionPlan | None = None,
    ) -> torch.Tensor:
        """Run the decoder; see `LanguageModel.forward`. The last layer ends for the wanted tokens only.

        A head that drafts takes `previous` too: the normed hidden state before each token, [num_tokens, hidden_size].
        Layers that attend to an encoder take `encoded`: how the tokens see its inputs; see `encoder_decoder.py`.
        """
        rotation_of = {
            rope: self._kernels.rotations(positions, frequencies, rope.attention_factor)
            for rope, frequencies in self.frequencies.items()
        }
        residual = self.weights.embed(token_ids, positions)  # [num_tokens, hidden_size]
        if previous is not None:
            of_tokens, of_hidden = self.weights.joins
            residual = of_tokens(None, residual) + of_hidden(None, previous)
        if self.weights.token_inputs is not None:
            rows, projection = self.weights.token_inputs
            own = projection(None, residual) + rows(token_ids, positions)
            self.weights.layer_inputs.values = (own * 2**-0.5).contiguous()
        attended: torch.Tensor | None = None
        next_state = iter(() if states is None else states.layers)
        cache_of = self.caches_of(caches)
        for index, layer in enumerate(self.config.layers):
            projected = self.weights.segments[index](attended, residual)
            if projected is None:
                attended = None
                continue
            projected = projected.contiguous()
            if (weights := self.weights.states[index]) is not None:
                assert states is not None, "a model with states is run on some"
                attended = weights.run_on(self._states, projected, states.rows, next(next_state))
                states.keep(projected)
                if isinstance(weights, Mamba2Weights) and weights.is_normed_apart:
                    attended = self._norm_with_others(attended, weights)
                continue
            rotation = None if layer.rope is None else rotation_of[layer.rope]
            if (latent := self.weights.latents[index]) is not None:
                queries = latent.queries(projected)
                attended = attention.attend(queries, rotation, cache_of[index], self.attention_layers[index])
                attended = latent.values(attended)
                continue
            num_gates = self._shard.num_heads(layer) * layer.head_dim if layer.has_output_gate else 0
            num_projected = projected.shape[1] - num_gates
            qkv, gate = projected[:, :num_projected], projected[:, num_projected:]
            qkv = qkv.contiguous().view(residual.shape[0], -1, layer.head_dim)
            if layer.rope is not None and layer.rope.query_growth:
                factors = self.query_factors[layer.rope][positions // layer.rope.query_interval]
                qkv[:, : self._shard.num_heads(layer)] *= factors.to(qkv.dtype)[:, None, None]
            plan = encoded if layer.attends_to_encoder else attention
            assert plan is not None, "a model with an encoder is run with a plan for it"
            attended = plan.attend(qkv, rotation, cache_of[index], self.attention_layers[index])
            if num_gates:
                attended = self._kernels.gate(attended, gate)
        residual = residual[wanted]
        if self.weights.token_inputs is not None:
            self.weights.layer_inputs.values = self.weights.layer_inputs.values[wanted]
        self.weights.last_segment(None if attended is None else attended[wanted], residual)
        return residual

    def caches_of(self, caches: Sequence[LayerCache]) -> dict[int, LayerCache]:
        """Return the cache that each layer with attention reads."""
        own, found = iter(caches), dict[int, LayerCache]()
        for index, layer in enumerate(self.config.layers):
            if layer.attends:
                found[index] = next(own) if layer.cache_of is None else found[layer.cache_of]
        return found

    @torch.inference_mode()
    def accept_drafts(self, step: StepStates, accepted: AcceptedDrafts) -> None:
        """Let the states take drafts that `forward` has computed; `step` has what it took for them."""
        weights = [each for each in self.weights.states if each is not None]
        for of_layer, inputs, state in zip(weights, step.draft_inputs, step.layers[: len(weights)], strict=True):
            of_layer.run_on(self._states, accepted.inputs_of(inputs), accepted.rows, state)

    def _norm_with_others(self, gated: torch.Tensor, weights: Mamba2Weights) -> torch.Tensor:
        """Norm what a Mamba-2 layer returns, [num_tokens, output_dim of this rank], over the heads of all ranks."""
        squares = gated.double().square().sum(-1, keepdim=True)  # so exact that its order shows in no float32
        of_ranks = squares.new_empty((self._group.size, *squares.shape))
        self._group.gather(squares, of_ranks)
        mean = (of_ranks.sum(0) / (self._group.size * gated.shape[1])).float()
        normed = gated.float() * torch.rsqrt(mean + weights.epsilon) * weights.norm_weight
        return normed.to(gated.dtype)

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Norm hidden states as the head does it."""
        return self.weights.norm(hidden)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Map hidden states [num_rows, hidden_size] to raw logits, [num_rows, vocab_size] float32.

        All ranks call this together; only rank 0 gets the logits, the others None.
        """
        logits = self._group.gather_columns(self.weights.head(None, hidden))
        if logits is None:
            return None
        logits = logits[:, : self.config.vocab_size].float()
        if self.config.logit_scale != 1.0:
            logits = self._kernels.scale_logits(logits, self.config.logit_scale)
        cap = self.config.logit_soft_cap
        return logits if cap is None else self._kernels.cap_logits(logits, cap)

    def load(self, checkpoint: WeightSource) -> None:
        """Fill the weights. Raises: ModelLoadError: see `Checkpoint.load_into`."""
        # Embedders are stored without the head, and so without the name of what is before it.
        prefix = self.config.names.optional_prefix or "model."
        checkpoint.load_into(self.weights.map.targets, self._is_redundant, prefix)

    def _is_redundant(self, name: str) -> bool:
        """Whether a checkpoint may hold the tensor `name` although the model computes or shares it."""
        if name == f"{self.config.names.head}.weight":
            return self.config.tie_word_embeddings
        # Layers that predict further tokens (`mtp.`, or behind the last one) are for drafts.
        layer = _LAYER.match(name)
        further = -1 if layer is None else int(layer[1]) - self.config.num_hidden_layers
        if layer is not None and further < 0 and self.config.layers[further].cache_of is not None:
            names = self.config.names  # of what checkpoints may have beside a cache that is read
            if name in {f"{each.format(layer=layer[1])}.weight" for each in (*names.qkv[1:], names.key_norm)}:
                return True
        if name.startswith("mtp.") or 0 <= further < self.config.num_further_layers:
            return True
        return name.endswith(".rotary_emb.inv_freq") or is_cache_scale(name)
