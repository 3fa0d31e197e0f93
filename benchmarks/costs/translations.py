"""Scenario of 32 translations at once by a model with an encoder, beside transformers and CTranslate2.

The model has the sizes of opus-mt (Marian: 6 + 6 layers of 512, 58,101 tokens) and random weights. Inputs have 8 to 100
tokens, and each output as many tokens as its input: what would end one earlier is never drawn, so all do the same work.
transformers takes them as one padded batch, which runs as long as the longest; the others let go of what is complete.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
import transformers

import octavo
from benchmarks.costs.harness import Figures, Groups, Size, Way, in_turn, scenario
from benchmarks.costs.services import PATIENCE_S, QUIET, until_ready
from benchmarks.costs.workers import title
from executor_svc.device.cpus import read_cpus
from tests.support.processes import running_service

EOS, PAD, VOCAB_SIZE = 0, 58_100, 58_101
SHORTEST, LONGEST = 8, 100
PEER: Final = "transformers, float32"


@scenario("translations", "32 translations of mixed lengths at once, beside transformers and CTranslate2", pairs=5)
async def translations(size: Size) -> Groups:
    """CTranslate2 takes part if it can be imported."""
    draw = random.Random(0)
    lengths = [draw.randint(SHORTEST, LONGEST) for _ in range(size.of(32, 2))]
    texts = [[draw.randrange(2, PAD) for _ in range(length - 1)] + [EOS] for length in lengths]
    with tempfile.TemporaryDirectory(prefix="octavo-translations-") as folder:
        model = write_model(Path(folder) / "model", size)
        ways = [Way(PEER, in_turn(timed, partial(translate_by_transformers, model), texts))]
        peers = ((kind, load_ctranslate2(model, Path(folder), kind)) for kind in ("float32", "int8"))
        ways += [
            Way(f"CTranslate2, {kind}", in_turn(timed, run, texts), PEER) for kind, run in peers if run is not None
        ]
        async with AsyncExitStack() as stack:
            for number_format in ("none", "int8-a8"):
                flags = ("--model", f"{folder}/model", "--dtype", "float32", "--quantization", number_format, *QUIET)
                executor = await stack.enter_async_context(running_service("executor_svc", *flags))
                started = running_service("scheduler_svc", "--executor", executor.address, *QUIET)
                scheduler = await stack.enter_async_context(started)
                await until_ready(scheduler)
                client = await stack.enter_async_context(octavo.Client(scheduler.address))
                ways.append(Way(f"Octavo, {title(number_format)}", partial(ask, client, texts), PEER))
            yield ways


def write_model(directory: Path, size: Size) -> transformers.MarianMTModel:
    """Make a model, and write it."""
    width, num_layers, mlp = size.of((512, 6, 2048), (16, 1, 32))
    common: dict[str, Any] = {"d_model": width, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512}
    for stack in ("encoder", "decoder"):
        sizes = {"layers": num_layers, "attention_heads": 8, "ffn_dim": mlp}
        common |= {f"{stack}_{name}": value for name, value in sizes.items()}
    special = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": PAD, "forced_eos_token_id": None}
    torch.manual_seed(0)
    config = transformers.MarianConfig(**common, **special, activation_function="swish", scale_embedding=True)
    model = transformers.MarianMTModel(config).eval()
    model.save_pretrained(directory)
    return model


async def ask(client: octavo.Client, texts: Sequence[Sequence[int]]) -> Figures:
    """Return what the whole stack takes, over gRPC."""
    began_s = time.perf_counter()
    given: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "timeout_s": PATIENCE_S, "cache_salt": str(began_s)}
    outputs = await asyncio.gather(*(client.generate(text, max_tokens=len(text), **given) for text in texts))
    took_s = time.perf_counter() - began_s
    assert [len(output.outputs[0].token_ids) for output in outputs] == [len(text) for text in texts]
    return _figures(took_s, texts)


def timed(run: Callable[[Sequence[Sequence[int]]], object], texts: Sequence[Sequence[int]]) -> Figures:
    began_s = time.perf_counter()
    run(texts)
    return _figures(time.perf_counter() - began_s, texts)


def _figures(took_s: float, texts: Sequence[Sequence[int]]) -> Figures:
    return {"time, s": took_s, "tokens/s": sum(map(len, texts)) / took_s}


@torch.inference_mode()
def translate_by_transformers(model: transformers.MarianMTModel, texts: Sequence[Sequence[int]]) -> None:
    torch.set_num_threads(read_cpus().num_threads())
    longest = max(map(len, texts))
    rows = torch.tensor([[*text, *[PAD] * (longest - len(text))] for text in texts])
    model.generate(
        rows,
        attention_mask=(rows != PAD).long(),
        do_sample=False,
        num_beams=1,
        min_new_tokens=longest,
        max_new_tokens=longest,
    )


def load_ctranslate2(
    model: transformers.MarianMTModel, folder: Path, compute_type: str
) -> Callable[[Sequence[Sequence[int]]], None] | None:
    """Return what translates by CTranslate2; None: it is not installed."""
    try:
        ctranslate2, loaders = import_module("ctranslate2"), import_module("ctranslate2.converters.transformers")
    except ImportError:
        return None
    tokens = ["</s>", "<unk>", *map(str, range(2, PAD))]
    spec = loaders._MODEL_LOADERS["MarianConfig"].get_model_spec(model)
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.eos_token, spec.config.unk_token, spec.config.decoder_start_token = "</s>", "<unk>", "</s>"
    spec.validate()
    spec.optimize(quantization=compute_type)
    directory = folder / f"ctranslate2-{compute_type}"
    directory.mkdir()
    spec.save(str(directory))
    threads = {"inter_threads": 1, "intra_threads": read_cpus().num_threads()}
    translator = ctranslate2.Translator(str(directory), compute_type=compute_type, **threads)

    def translate(texts: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, texts))
        results = translator.translate_batch(
            [[tokens[token] for token in text] for text in texts],
            beam_size=1,
            min_decoding_length=longest,
            max_decoding_length=longest,
            callback=lambda step: step.step + 1 >= len(texts[step.batch_id]),
        )
        assert [len(result.hypotheses[0]) for result in results] == [len(text) for text in texts]

    return translate
