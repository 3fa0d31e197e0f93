"""States equal those of transformers, and in C a token gets the same bits however its row was cut."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from transformers.models.granitemoehybrid.configuration_granitemoehybrid import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from executor_svc.models.state_config import DeltaNetConfig, Mamba2Config, ShortConvConfig, StateConfig
from executor_svc.native.library import NativeLibrary
from executor_svc.states.interface import (
    DeltaNetWeights,
    LayerState,
    Mamba2Weights,
    ShortConvWeights,
    StateBackend,
    StateRows,
    StateWeights,
    make_layer_state,
)
from executor_svc.states.native_states import NativeStateBackend
from executor_svc.states.torch_states import TorchStateBackend
from tests.numerics.native import LANES, library_path
from tests.support.each_row import each_row

NUM_SLOTS = 4
NUM_TOKENS = 150
STATES: list[StateConfig] = [
    DeltaNetConfig(num_key_heads=2, num_value_heads=2, key_dim=128, value_dim=128, conv_size=4),
    DeltaNetConfig(num_key_heads=2, num_value_heads=6, key_dim=20, value_dim=24, conv_size=4),
    DeltaNetConfig(num_key_heads=1, num_value_heads=3, key_dim=7, value_dim=37, conv_size=3),
    ShortConvConfig(size=128, conv_size=3, has_bias=False),
    ShortConvConfig(size=37, conv_size=5, has_bias=True),
    Mamba2Config(4, 1, head_dim=64, state_size=128, conv_size=4, has_conv_bias=True, has_bias=False),
    Mamba2Config(6, 2, head_dim=37, state_size=7, conv_size=3, has_conv_bias=False, has_bias=False),
]


@dataclass(frozen=True, slots=True)
class Case:
    """A layer, what it takes for the tokens of a sequence, and what transformers makes of that."""

    weights: StateWeights
    projected: torch.Tensor
    expected: torch.Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, state: StateConfig) -> "Case":
        torch.manual_seed(7)
        if isinstance(state, Mamba2Config):
            return cls.of_mamba2(state)
        return cls.of_delta_net(state) if isinstance(state, DeltaNetConfig) else cls.of_short_conv(state)

    @classmethod
    def of_mamba2(cls, mamba: Mamba2Config) -> "Case":
        config = GraniteMoeHybridConfig(
            hidden_size=mamba.output_dim // 2,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            mamba_n_heads=mamba.num_heads,
            mamba_n_groups=mamba.num_groups,
            mamba_d_head=mamba.head_dim,
            mamba_d_state=mamba.state_size,
            mamba_d_conv=mamba.conv_size,
            mamba_conv_bias=mamba.has_conv_bias,
        )
        module = GraniteMoeHybridMambaLayer(config, 0).float()
        for vector in (module.dt_bias, module.D, module.norm.weight):
            vector.normal_()
        hidden = torch.randn(1, NUM_TOKENS, config.hidden_size)
        expected = output_of(module, hidden)
        sizes = [mamba.output_dim, mamba.conv_dim, mamba.num_heads]
        gate, convolved, dt = module.in_proj(hidden[0]).split(sizes, -1)
        weights = Mamba2Weights(
            config=mamba,
            conv_weight=module.conv1d.weight[:, 0].T.contiguous(),
            conv_bias=module.conv1d.bias,
            a_log=module.A_log.detach(),
            dt_bias=module.dt_bias.detach(),
            d=module.D.detach(),
            norm_weight=module.norm.weight.detach(),
            epsilon=config.rms_norm_eps,
        )
        return cls(weights, torch.cat([convolved, gate, dt], -1), expected)

    @classmethod
    def of_short_conv(cls, conv: ShortConvConfig) -> "Case":
        config = Lfm2Config(
            hidden_size=conv.size,
            num_hidden_layers=1,
            layer_types=["conv"],
            conv_L_cache=conv.conv_size,
            conv_bias=conv.has_bias,
        )
        module = Lfm2ShortConv(config, 0).float()
        hidden = torch.randn(1, NUM_TOKENS, conv.size)
        expected = output_of(module, hidden)
        weights = ShortConvWeights(conv, module.conv.weight[:, 0].T.contiguous(), module.conv.bias)
        return cls(weights, module.in_proj(hidden[0]), expected)

    @classmethod
    def of_delta_net(cls, net: DeltaNetConfig) -> "Case":
        config = Qwen3_5TextConfig(
            hidden_size=64,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_key_heads=net.num_key_heads,
            linear_num_value_heads=net.num_value_heads,
            linear_key_head_dim=net.key_dim,
            linear_value_head_dim=net.value_dim,
            linear_conv_kernel_dim=net.conv_size,
        )
        module = Qwen3_5GatedDeltaNet(config, 0).float()
        module.dt_bias.normal_()
        module.norm.weight.normal_()
        hidden = torch.randn(1, NUM_TOKENS, 64)
        expected = output_of(module, hidden)
        projections = (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
        weights = DeltaNetWeights(
            config=net,
            conv_weight=module.conv1d.weight[:, 0].T.contiguous(),
            a_log=module.A_log.detach(),
            dt_bias=module.dt_bias.detach(),
            norm_weight=module.norm.weight.detach(),
            epsilon=config.rms_norm_eps,
        )
        return cls(weights, torch.cat([project(hidden[0]) for project in projections], -1), expected)

    def unread_state(self) -> LayerState:
        """Return states that a sequence must not see the last users of."""
        state = make_layer_state(self.weights.config, NUM_SLOTS, torch.device("cpu"))
        state.conv.fill_(torch.nan)
        state.recurrent.fill_(torch.nan)
        return state

    def run(
        self,
        backend: StateBackend,
        state: LayerState,
        slots: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        commits: Sequence[int] | None = None,
    ) -> Sequence[torch.Tensor]:
        """Run a step; each row has its tokens of the sequence. Return what each row gets."""
        tokens = np.concatenate([start + np.arange(length) for start, length in zip(starts, lengths, strict=True)])
        rows = StateRows(*(np.array(column, np.int32) for column in (slots, starts, lengths, commits or lengths)))
        return torch.split(self.weights.run_on(backend, self.projected[tokens], rows, state), list(lengths))


def output_of(
    module: Lfm2ShortConv | Qwen3_5GatedDeltaNet | GraniteMoeHybridMambaLayer, hidden: torch.Tensor
) -> torch.Tensor:
    """Return what a layer of transformers has before its last projection."""
    found: list[torch.Tensor] = []
    module.out_proj.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    module(hidden)
    return found[0][0]


def native(lanes: str, num_threads: int = 1) -> NativeStateBackend:
    return NativeStateBackend(NativeLibrary(library_path(lanes), num_threads))


@pytest.mark.parametrize("config", STATES, ids=str)
def test_all_backends_are_near_transformers(config: StateConfig) -> None:
    case = Case.of(config)
    backends: list[StateBackend] = [TorchStateBackend(), *map(native, LANES)]
    for backend in backends:
        state = case.unread_state()
        for start, length in ((0, 40), (40, 1), (41, NUM_TOKENS - 41)):
            out, *_ = case.run(backend, state, [2, 1], [start, 0], [length, 3])
            difference = (out - case.expected[start : start + length]).norm()
            assert difference < 2e-6 * case.expected.norm(), (backend, start)


def test_tiled_value_heads_have_the_bits_of_those_side_by_side() -> None:
    net = STATES[1]
    assert isinstance(net, DeltaNetConfig)
    case = Case.of(net)
    assert isinstance(case.weights, DeltaNetWeights)
    order = torch.arange(net.num_value_heads).view(net.num_key_heads, -1).t().reshape(-1)
    channels = (order[:, None] * net.value_dim + torch.arange(net.value_dim)).flatten()
    keys = torch.arange(2 * net.num_key_heads * net.key_dim)
    begins = (net.conv_dim, net.conv_dim + net.output_dim, net.projected_dim - net.num_value_heads)
    of_conv = torch.cat([keys, len(keys) + channels])
    places = torch.cat([of_conv, begins[0] + channels, begins[1] + order, begins[2] + order])
    tiled = replace(
        case.weights,
        config=replace(net, is_tiled=True),
        conv_weight=case.weights.conv_weight[:, of_conv].contiguous(),
        a_log=case.weights.a_log[order].contiguous(),
        dt_bias=case.weights.dt_bias[order].contiguous(),
    )
    other = Case(tiled, case.projected[:, places].contiguous(), case.expected)
    backends: list[StateBackend] = [TorchStateBackend(), native(LANES[0])]
    for backend in backends:
        (expected,) = case.run(backend, case.unread_state(), [1], [0], [NUM_TOKENS])
        (out,) = other.run(backend, other.unread_state(), [1], [0], [NUM_TOKENS])
        assert torch.equal(out, expected[:, channels])


@each_row(*product(LANES, STATES))
def test_chunks_neighbours_and_threads_change_no_bit(lanes: str, config: StateConfig) -> None:
    case = Case.of(config)
    alone = case.unread_state()
    (whole,) = case.run(native(lanes), alone, [1], [0], [NUM_TOKENS])
    for num_threads, lengths in product((1, 2, 3), ([NUM_TOKENS], [1] * NUM_TOKENS, [7, 1, 2, 100, 40])):
        backend, state, start, parts = native(lanes, num_threads), case.unread_state(), 0, []
        case.run(backend, state, [2], [0], [5])
        for length in lengths:
            # Between a newcomer, and a neighbour that takes the same tokens later on.
            _, part, *_ = case.run(backend, state, [0, 3, 2], [0, start, 5 + start % 90], [4, length, 9])
            parts.append(part)
            start += length
        assert torch.equal(torch.cat(parts), whole), (num_threads, lengths)
        assert torch.equal(state.conv[3], alone.conv[1])
        assert torch.equal(state.recurrent[3], alone.recurrent[1])


@each_row(*product(LANES, STATES))
def test_a_state_takes_no_more_than_the_committed_tokens(lanes: str, config: StateConfig) -> None:
    """Those behind them, of which the last ones are wrong, are computed; then the right ones are taken."""
    case = Case.of(config)
    one_by_one, outs, convs, states = case.unread_state(), list[torch.Tensor](), [], []
    for position in range(60):
        outs += case.run(native(lanes), one_by_one, [1], [position], [1])
        convs.append(one_by_one.conv[1].clone())
        states.append(one_by_one.recurrent[1].clone())

    backends: list[StateBackend] = [native(lanes), native(lanes, 2), TorchStateBackend()]
    for backend, num_drafts in [*product(backends[:2], (1, 3, 7)), (backends[2], 3)]:
        tolerance = 1e-4 if isinstance(backend, TorchStateBackend) else 0.0

        def check(found: torch.Tensor, expected: torch.Tensor, tolerance: float = tolerance) -> None:
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)

        state, start = case.unread_state(), 9
        case.run(backend, state, [3], [0], [start])
        for num_right in range(num_drafts + 1):
            wrong = replace(case, projected=case.projected.clone())
            wrong.projected[start + num_right + 1 :] = torch.nan
            # Between a prompt, and a sequence that begins with drafts.
            _, found, _ = wrong.run(backend, state, [0, 3, 2], [0, start, 0], [4, 1 + num_drafts, 3], commits=[4, 1, 1])
            check(found[: num_right + 1], torch.cat(outs[start : start + num_right + 1]))
            for slot, last in ((0, 3), (3, start), (2, 0)):
                check(state.conv[slot], convs[last])
                check(state.recurrent[slot], states[last])
            if num_right:
                case.run(backend, state, [3], [start + 1], [num_right])
            start += num_right + 1
            check(state.conv[3], convs[start - 1])
            check(state.recurrent[3], states[start - 1])


# Of the state, an input of each kind: q, the last of v, b and a; b, c and x; x, B, C, a gate and dt.
DELTA_NET_PLACES = [(1, 0), (1, 2 * 40 + 6 * 24 - 1), (1, -12), (1, -6)]
MAMBA2_PLACES = [(6, 0), (6, 6 * 37), (6, 6 * 37 + 2 * 7), (6, 6 * 37 + 4 * 7), (6, -1)]


@each_row(*product(LANES, [*DELTA_NET_PLACES, (4, 0), (4, 37), (4, 74), *MAMBA2_PLACES]))
def test_what_is_not_a_number_is_seen_and_ends_with_its_sequence(lanes: str, place: tuple[int, int]) -> None:
    index, number = place
    case, backend = Case.of(STATES[index]), native(lanes)
    state = case.unread_state()
    case.projected[8, number] = torch.nan
    out, neighbour = case.run(backend, state, [1, 2], [0, 0], [9, 8])
    assert out[8].isnan().any()
    assert not out[:8].isnan().any()
    assert torch.equal(out[:8], neighbour)
    (again,) = case.run(backend, state, [1], [0], [8])
    assert torch.equal(again, neighbour)
