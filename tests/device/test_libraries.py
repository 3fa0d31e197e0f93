"""flash-attn and xformers, where they are installed and load: the real libraries beside the reference, on a device."""

import pytest
import torch

from executor_svc.attention.interface import AttentionLayer
from executor_svc.attention.rules import AttentionNeeds
from executor_svc.attention.selection import BackendName, choose_backend
from octavo_shared.errors import ModelLoadError
from tests.kernels.device import DEVICE
from tests.numerics.attention import LayerInput, Rows, Step

STEPS: dict[str, Rows] = {
    "decodes": [(3, 1), (70, 1), (600, 1)],
    "decodes and chunks": [(3, 1), (0, 40), (300, 1), (70, 9)],
}


@pytest.mark.parametrize("name", ["flash_attn", "xformers"])
def test_a_library_attends_like_the_reference(name: BackendName) -> None:
    capability = torch.cuda.get_device_capability(DEVICE) if DEVICE.type == "cuda" else None
    layer = AttentionLayer(0.125)
    try:
        chosen = choose_backend(name, AttentionNeeds(torch.bfloat16, 8, 2, 64, [layer], capability))
    except ModelLoadError as reason:
        pytest.skip(str(reason))
    for rows in STEPS.values():
        step = Step(rows, chosen.block_size, device=DEVICE)
        inputs = LayerInput(step, (8, 2), 64, is_rotated=True, dtype=torch.bfloat16)
        inputs.keys.nan_to_num_(nan=1e3)  # some multiply by 0 what a mask hides
        inputs.values.nan_to_num_(nan=1e3)

        ours, _ = inputs.attend(chosen.make(), layer)

        naive, _ = inputs.attend_naively(layer)
        torch.testing.assert_close(ours.cpu().double(), naive, rtol=3e-2, atol=3e-2)
