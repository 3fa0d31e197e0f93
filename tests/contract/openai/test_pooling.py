"""/v1/embeddings, /v1/rerank and /v1/score: what clients send and get, and what is refused."""

import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest

from tests.contract.openai.api import Answer, Api, Json, running_api
from tests.contract.test_pooling import LONG, score, vector, wrapped
from tests.support.encoder_worker import EncoderWorker

TEXTS = {"input": ["hello there", "bye"], "encoding_format": "base64"}
TOKENS = {"input": [[*b"hello there"], [*b"bye"]], "encoding_format": "base64"}

# Recorded bodies, but for the model.
BODIES: dict[str, Json] = {
    "openai 3.57": TEXTS,
    "openai 3.57, numbers": {"input": ["hello there", "bye"], "user": "me", "encoding_format": "float"},
    "langchain-openai 1.7.4": TOKENS,
    "langchain-openai 1.7.4, check_embedding_ctx_length=False": TEXTS,
    "langchain-openai 1.7.4, dimensions": {**TEXTS, "dimensions": 8},
    "llama-index-embeddings-openai 0.6": TEXTS,
    "llama-index-embeddings-openai-like 0.4": TEXTS,
}


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with running_api(EncoderWorker()) as running:
        yield running


async def post(api: Api, path: str, **fields: Any) -> Answer:
    return await api.send("POST", path, json={"model": "fake", **fields})


async def test_bodies_of_clients_are_answered(api: Api) -> None:
    for name, body in BODIES.items():
        answer = await post(api, "/v1/embeddings", **body)
        assert answer.status == 200, (name, answer.text)
        content = answer.json
        expected = [vector([*b"hello there"]), vector([*b"bye"])] if body is TOKENS else None
        expected = expected or [vector(wrapped("hello there")), vector(wrapped("bye"))]
        if "dimensions" in body:
            expected = [(np.array(each[:8]) / np.linalg.norm(each[:8])).tolist() for each in expected]
        vectors = [each["embedding"] for each in content.pop("data")]
        if body["encoding_format"] == "base64":
            vectors = [np.frombuffer(base64.b64decode(each), "<f4").tolist() for each in vectors]
        np.testing.assert_allclose(vectors, expected, rtol=1e-6)
        num_tokens = 14 if body is TOKENS else 18
        assert content == {
            "object": "list",
            "model": "fake",
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


async def test_embeddings_are_at_both_paths(api: Api) -> None:
    one, other = [await post(api, path, input="x") for path in ("/v1/embeddings", "/embeddings")]
    assert one.status == 200
    assert one.json == other.json


async def test_openai_s_client_gets_the_vectors_of_one_text(api: Api) -> None:
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        created = await client.embeddings.create(model="fake", input="hello")
        assert (created.data[0].embedding, created.data[0].index) == (vector(wrapped("hello")), 0)
        ids = await client.embeddings.create(model="fake", input=[1, 2], encoding_format="float")
        assert [each.embedding for each in ids.data] == [vector([1, 2])]
        many = await client.embeddings.create(model="fake", input=["a"] * 2048)
        assert len(many.data) == 2048
        with pytest.raises(openai.BadRequestError, match="context length is 512 tokens") as raised:
            await client.embeddings.create(model="fake", input=LONG)
        assert raised.value.code == "context_length_exceeded"
        cut = await client.embeddings.create(model="fake", input=LONG, extra_body={"truncate_prompt_tokens": -1})
        assert cut.usage.prompt_tokens == 512


async def test_documents_are_ranked_as_by_jina_and_cohere(api: Api) -> None:
    documents: list[Any] = ["a", "bb", {"text": "ccc"}]
    texts = ["a", "bb", "ccc"]
    scores = [score("q", each) for each in texts]
    best_first = sorted(range(3), key=lambda index: -scores[index])
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        answer = await post(api, path, query="q", documents=documents, request_id="mine")
        content = answer.json
        assert content["results"] == [
            {"index": index, "relevance_score": scores[index], "document": {"text": texts[index]}}
            for index in best_first
        ]
        num_tokens = sum(len(each) + 4 for each in texts)
        assert content["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert content["id"] == "rerank-mine"
    few = await post(api, "/v1/rerank", query="q", documents=documents, top_n=1, return_documents=False)
    assert few.json["results"] == [{"index": best_first[0], "relevance_score": scores[best_first[0]]}]


async def test_pairs_are_scored_as_by_vllm(api: Api) -> None:
    for fields, expected in (
        ({"text_1": "q", "text_2": "a"}, [score("q", "a")]),
        ({"text_1": "q", "text_2": ["a", "b"]}, [score("q", "a"), score("q", "b")]),
        ({"text_1": ["q", "r"], "text_2": ["a", "b"]}, [score("q", "a"), score("r", "b")]),
    ):
        content = (await post(api, "/v1/score", **fields)).json
        assert [(each["index"], each["object"], each["score"]) for each in content["data"]] == [
            (index, "score", value) for index, value in enumerate(expected)
        ]


WRONG: list[tuple[str, Json, str | None, str]] = [
    ("embeddings", {}, "input", "absent; it must be a string, an array of token ids"),
    ("embeddings", {"input": []}, "input", "an empty array; it must be"),
    ("embeddings", {"input": ""}, "input", "empty; it must be at least 1 character long"),
    ("embeddings", {"input": ["a", ""]}, "input[1]", "empty; it must be at least 1 character long"),
    ("embeddings", {"input": ["a"] * 2049}, "input", "2049 inputs; it must be at most 2048 inputs"),
    ("embeddings", {"input": [300]}, "input", "a list with token id 300; it must be ids from 0 to 258"),
    ("embeddings", {"input": [[1], [2**40]]}, "input[1]", "a list with token id 1099511627776; it must be ids"),
    ("embeddings", {"input": LONG}, "input", "is too long: it has 513 tokens"),
    ("embeddings", {"input": "a", "dimensions": 5}, "dimensions", "5; it must be 4 or 8 or 16"),
    ("embeddings", {"input": "a", "dimensions": -1}, "dimensions", "-1; it must be 4 or 8 or 16"),
    ("embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", ""),
    ("embeddings", {"input": "a", "prompt_name": "x"}, "prompt_name", "'x'; it must be 'document' or 'query'"),
    (
        "embeddings",
        {"input": "a", "truncate_prompt_tokens": 1},
        "truncate_prompt_tokens",
        "1; it must be from 3 to 512",
    ),
    ("embeddings", {"input": "a", "truncate_prompt_tokens": -9}, "truncate_prompt_tokens", "-9; it must be from 3"),
    ("embeddings", {"input": "a", "priority": 2**40}, "priority", "it must be 0: this server uses --policy fcfs"),
    ("embeddings", {"input": "a", "model": None}, "model", "absent; it must be the name of the served model, fake"),
    ("embeddings", {"inputs": "a"}, "inputs", "did you mean input?"),
    ("embeddings", {"input": "a", "messages": []}, "messages", "is not a field of this request"),
    ("rerank", {"documents": ["a"]}, "query", "absent; it must be set"),
    ("rerank", {"query": "", "documents": ["a"]}, "query", "empty; it must be at least 1 character long"),
    ("rerank", {"query": "q", "documents": []}, "documents", "empty; it must be from 1 to 2,048 of them"),
    ("rerank", {"query": "q", "documents": ["a"] * 2049}, "documents", "2049 long; it must be at most 2048 long"),
    (
        "rerank",
        {"query": "q", "documents": ["a", {"x": 1}]},
        "documents[1]",
        '{"x": 1}; it must be a string, or an object',
    ),
    ("rerank", {"query": "q", "documents": ["a", LONG]}, "documents[1]", "is too long: it has 515 tokens"),
    ("rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n", "0; it must be at least 1"),
    (
        "rerank",
        {"query": "q", "documents": ["a"], "max_tokens_per_doc": 5},
        "max_tokens_per_doc",
        "truncate_prompt_tokens",
    ),
    ("score", {"text_1": "q"}, "text_2", "absent; it must be set"),
    ("score", {"text_1": ["q", "r"], "text_2": ["a"] * 3}, "text_1", "2 long; it must be 1 query for all documents"),
    ("score", {"text_1": "q", "text_2": ["a", ""]}, "text_2[1]", "empty; it must be at least 1 character long"),
]


async def test_what_is_wrong_is_named(api: Api) -> None:
    for path, fields, param, words in WRONG:
        answer = await post(api, f"/v1/{path}", **fields)
        assert answer.status == 400, (fields, answer.text)
        assert answer.error["param"] == param, (fields, answer.error)
        assert words in answer.error["message"], (fields, answer.error)
    other = await post(api, "/v1/embeddings", model="gpt-5", input="a")
    assert (other.status, other.error["code"]) == (404, "model_not_found")
    assert not api.stack.engine.requests


async def test_models_say_what_they_can() -> None:
    async with running_api() as api:
        [entry] = (await api.get("/v1/models")).json["data"]
        assert (entry["tasks"], "embedding_size" in entry) == (["generate"], False)
        answer = await post(api, "/v1/embeddings", input="a")
        assert (answer.status, answer.error["param"]) == (400, "model")
        words = answer.error["message"]
        assert "must be one that can embed; this one answers Generate (/v1/chat/completions, /v1/completions)" in words
    async with running_api(EncoderWorker()) as api:
        [entry] = (await api.get("/v1/models")).json["data"]
        assert (entry["tasks"], entry["embedding_size"]) == (["embed", "score"], 16)
        for answer in (await api.chat(), await api.complete()):
            assert answer.status == 400
            assert "must be one that can generate; this one answers Embed (/v1/embeddings)" in answer.error["message"]
