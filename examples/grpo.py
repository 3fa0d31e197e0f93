"""Train a tiny random model by GRPO, with rollouts from Octavo that go on while the weights change.

The reward is the share of even tokens in an answer: about 0.5 at first, and above 0.9 after 20 steps, which take
seconds on two cores. `python -m examples.grpo` needs octavo[scheduler,executor], and starts both services itself.
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from octavo import Client
from octavo.admin_client import AdminClient
from octavo.calls.rollouts import RolloutGroup
from octavo.local.options import LocalOptions
from octavo.local.services import LocalServices

VOCAB_SIZE = 64
NUM_PROMPT_TOKENS = 8
NUM_OUTPUT_TOKENS = 24
GROUPS_PER_STEP = 8
OUTPUTS_PER_GROUP = 8
CLIP = 0.2


@dataclass(frozen=True)
class Sample:
    """An output as the loss takes it. `is_current`: by token, whether the trainer's weights of now made it."""

    token_ids: list[int]
    num_prompt_tokens: int
    logprobs: tuple[float, ...]
    advantage: float
    is_current: list[bool]


def reward(token_ids: Sequence[int]) -> float:
    """Return the share of even tokens."""
    return sum(token_id % 2 == 0 for token_id in token_ids) / len(token_ids)


def prompts(seed: int) -> Iterator[list[int]]:
    """Yield random prompts without end."""
    numbers = random.Random(seed)
    while True:
        yield [numbers.randrange(VOCAB_SIZE) for _ in range(NUM_PROMPT_TOKENS)]


def samples_of(group: RolloutGroup, version: str) -> list[Sample]:
    """Return the outputs of a group with their advantages: how far each reward is from the mean of the group."""
    rewards = torch.tensor([reward(output.token_ids) for output in group.outputs])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    samples = []
    for output, advantage in zip(group.outputs, advantages.tolist(), strict=True):
        last = output.provenance[-1]
        begin = last.first_token if last.weights_digest == version else len(output.token_ids)
        is_current = [place >= begin for place in range(len(output.token_ids))]
        token_ids = [*group.prompt_token_ids, *output.token_ids]
        samples.append(Sample(token_ids, len(group.prompt_token_ids), output.logprobs, advantage, is_current))
    return samples


def train(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, samples: Sequence[Sample]) -> float:
    """Take one step; return the largest difference of log-probabilities, where trainer and sampler have one version."""
    token_ids = pad_sequence([torch.tensor(sample.token_ids) for sample in samples], batch_first=True)
    logits = model(token_ids).logits[:, :-1].float()  # [num_samples, num_tokens - 1, VOCAB_SIZE]
    ours = logits.log_softmax(-1).gather(-1, token_ids[:, 1:, None]).squeeze(-1)
    losses, differences = [], [0.0]
    for row, sample in zip(ours, samples, strict=True):
        begin = sample.num_prompt_tokens - 1
        new, old = row[begin : begin + len(sample.logprobs)], torch.tensor(sample.logprobs)
        ratio = (new - old).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        losses.append(-torch.minimum(ratio * sample.advantage, clipped * sample.advantage).mean())
        differences += (new - old).abs().detach()[torch.tensor(sample.is_current)].tolist()
    optimizer.zero_grad()
    torch.autograd.backward(torch.stack(losses).mean())
    optimizer.step()
    return max(differences)


async def run(num_steps: int, folder: Path, *, seed: int = 0) -> list[float]:
    """Train; return the mean reward of each step."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=128, eos_token_id=None, **sizes)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for name in ("model", "updates"):
        (folder / name).mkdir()
    model.save_pretrained(folder / "model")
    options = LocalOptions(folder / "model", {"weights_dir": str(folder / "updates"), "kv_cache_gib": 0.1})
    rewards = []
    async with (
        LocalServices.from_options(options) as services,
        Client(services.address) as client,
        AdminClient(services.admin_address) as admin,
    ):
        version = (await admin.weight_version()).weights_digest
        rolling = client.rollouts(
            prompts(seed),
            OUTPUTS_PER_GROUP,
            max_groups=2 * GROUPS_PER_STEP,  # one batch is made while another is learnt from
            max_tokens=NUM_OUTPUT_TOKENS,
            temperature=1.0,
            seed=seed,
        )
        async with aclosing(rolling) as groups:
            for step in range(num_steps):
                batch = [await anext(groups) for _ in range(GROUPS_PER_STEP)]
                samples = [sample for group in batch for sample in samples_of(group, version)]
                rewards.append(sum(reward(sample.token_ids[NUM_PROMPT_TOKENS:]) for sample in samples) / len(samples))
                # In a thread, so that the stream of rollouts is read meanwhile.
                difference = await asyncio.to_thread(train, model, optimizer, samples)
                share = sum(sum(sample.is_current) for sample in samples) / (len(samples) * NUM_OUTPUT_TOKENS)
                print(
                    f"step {step:3}  reward {rewards[-1]:.3f}  weights {version[:8]}  made by them {share:4.0%}  "
                    f"largest difference {difference:.1e}",
                    flush=True,
                )
                await admin.pause("recompute")
                version = await admin.update_weights(files=[save(model.state_dict())])
                await admin.resume()
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(run(parser.parse_args().steps, Path(temporary)))
