"""The conversion of a GGUF file to a Hugging Face directory, on a tiny model with known weights."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from octavo.models.gguf_conversion import MODEL_FILES, convert_gguf, rotary_row_order
from octavo.models.progress import ModelPrepareError, ignore_progress
from tests.support import tiny_gguf


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted")
    gguf_file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny_gguf.write_gguf(gguf_file, tiny_gguf.make_weights())
    convert_gguf(gguf_file, directory, ignore_progress, {"temperature": 0.5})
    return directory


def test_conversion_writes_exactly_the_files_it_names(converted: Path) -> None:
    assert sorted(path.name for path in converted.iterdir()) == sorted(MODEL_FILES)


def test_every_tensor_has_its_known_values_and_the_tied_head_is_stored_once(converted: Path) -> None:
    expected = tiny_gguf.make_weights()

    tensors = load_file(converted / "model.safetensors")

    assert set(tensors) == set(expected)
    for name, values in expected.items():
        assert tensors[name].dtype == np.float32, name
        np.testing.assert_array_equal(tensors[name], values, err_msg=name)


def test_rotary_row_order_takes_the_first_members_of_all_pairs_before_the_second_ones() -> None:
    assert rotary_row_order(12, num_heads=2).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_config_repeats_the_metadata(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())

    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] == tiny_gguf.NUM_LAYERS
    assert config["hidden_size"] == tiny_gguf.HIDDEN_SIZE
    assert config["intermediate_size"] == tiny_gguf.INTERMEDIATE_SIZE
    assert config["num_attention_heads"] == tiny_gguf.NUM_HEADS
    assert config["num_key_value_heads"] == tiny_gguf.NUM_KV_HEADS
    assert config["head_dim"] == tiny_gguf.HEAD_DIM
    assert config["max_position_embeddings"] == tiny_gguf.CONTEXT_LENGTH
    assert config["vocab_size"] == len(tiny_gguf.TOKENS)
    assert config["rms_norm_eps"] == 1e-5  # stored as float32, whose nearest double is 9.99999974e-06
    assert config["rope_parameters"] == {"rope_theta": 100_000.0, "rope_type": "default"}
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)


def test_generation_config_stops_at_the_end_of_turn(converted: Path) -> None:
    generation_config = json.loads((converted / "generation_config.json").read_text())

    assert generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "temperature": 0.5}


def test_a_head_of_its_own_becomes_lm_head(tmp_path: Path) -> None:
    tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tiny_gguf.make_weights(), extra_tensor="output.weight")
    directory = tmp_path / "converted"
    directory.mkdir()

    convert_gguf(tmp_path / "tiny.gguf", directory, ignore_progress)

    assert "lm_head.weight" in load_file(directory / "model.safetensors")
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    "text", ["he said: the 12th!\n\n12. Zürich, 東京 🙂", "<|im_start|>user\nhe<|im_end|>", "  12"]
)
def test_tokenizer_round_trip(converted: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))

    token_ids = tokenizer.encode(text).ids

    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


def test_tokenizer_splits_every_digit_before_white_space_is_grouped(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))

    # Without the digit rule, byte-level BPE leaves the second new line to what follows it, and joins the digits.
    assert tokenizer.encode("a\n\n12").tokens == ["a", "ĊĊ", "1", "2"]


def test_special_tokens_are_one_token_and_are_skipped_in_plain_text(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))

    token_ids = tokenizer.encode("<|im_start|>he<|im_end|>").ids

    assert token_ids == [1, tiny_gguf.TOKENS.index("he"), 2]
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "he"


def test_tokenizer_config_names_the_special_tokens_and_the_template_is_a_file(converted: Path) -> None:
    tokenizer_config = json.loads((converted / "tokenizer_config.json").read_text())

    assert tokenizer_config["bos_token"] == "<|im_start|>"
    assert tokenizer_config["eos_token"] == "<|im_end|>"
    assert tokenizer_config["pad_token"] == "<|im_end|>"
    assert tokenizer_config["unk_token"] == "<|endoftext|>"
    assert tokenizer_config["model_max_length"] == tiny_gguf.CONTEXT_LENGTH
    assert (converted / "chat_template.jinja").read_text() == tiny_gguf.CHAT_TEMPLATE


def test_progress_of_the_weights_never_falls_and_ends_full(tmp_path: Path) -> None:
    tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tiny_gguf.make_weights())
    reports: list[tuple[int, int | None]] = []

    def record(stage: str, completed: int, total: int | None) -> None:
        if stage == "Converting the weights":
            reports.append((completed, total))

    convert_gguf(tmp_path / "tiny.gguf", tmp_path, record)

    num_bytes = sum(values.nbytes for values in tiny_gguf.make_weights().values())
    assert len(reports) > len(tiny_gguf.make_weights())
    assert reports == sorted(reports)
    assert reports[0] == (0, num_bytes)
    assert reports[-1] == (num_bytes, num_bytes)


def test_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tiny_gguf.make_weights(), extra_tensor="rope_freqs.weight")

    with pytest.raises(ModelPrepareError, match=r"'rope_freqs\.weight'"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path, ignore_progress)

    assert not (tmp_path / "model.safetensors").exists()


def test_other_architecture_is_refused_by_name(tmp_path: Path) -> None:
    tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tiny_gguf.make_weights(), architecture="gemma3")

    with pytest.raises(ModelPrepareError, match="'gemma3'"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path, ignore_progress)


def test_other_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tiny_gguf.make_weights(), pre_tokenizer="qwen2")

    with pytest.raises(ModelPrepareError, match="gpt2/qwen2"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path, ignore_progress)


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"not a model at all")

    with pytest.raises(ModelPrepareError, match=r"tiny\.gguf is not a readable GGUF file"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path, ignore_progress)
