"""Clients that people already have, unchanged, against a running server with the real model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.conftest import SampleRun
from tests.serve import Server, running_server

pytestmark = pytest.mark.slow
TEXTS = ["a small boat", "number theory", "", "the quick brown fox " * 30, "数学"]
KEY = "clients-secret-key"


@pytest.fixture(scope="module")
def server(sample_run: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The sample job's output, asked with a key; one server for all clients."""
    folder, done = sample_run
    assert done.returncode == 0, done.stderr
    environ = {"EMBED_CORPUS_SERVE_API_KEYS": f'{{"clients": "{KEY}"}}'}
    # In the folder of the run: its model was given as a relative path.
    with running_server(folder, "out/sample", environ=environ) as running:
        yield running


@pytest.fixture(scope="module")
def expected(model_dir: str) -> Any:
    """(5, 384) what sentence-transformers gives for TEXTS."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(model_dir, device="cpu").encode(TEXTS, normalize_embeddings=True)


@pytest.fixture
def hub_client_may_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests keep Hugging Face's package off the network, and its client with it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def same(found: Any, expected: Any) -> bool:
    found = np.asarray(found, dtype=np.float32)
    return found.shape == expected.shape and bool((np.einsum("ij,ij->i", found, expected) > 0.9999).all())


def test_hugging_faces_inference_client(server: Server, expected: Any, hub_client_may_connect: None) -> None:
    from huggingface_hub import InferenceClient

    client = InferenceClient(model=server.url, token=KEY)
    assert same(client.feature_extraction(TEXTS), expected)
    one = client.feature_extraction(TEXTS[0], normalize=True, truncate=True, truncation_direction="right")
    assert same(np.reshape(one, (1, -1)), expected[:1])
    client = InferenceClient(token=KEY)
    named = client.feature_extraction(TEXTS[1], model=f"{server.url}/embed", prompt_name="query")
    assert same(np.reshape(named, (1, -1)), expected[1:2])


def test_hugging_faces_client_hears_of_errors(server: Server, hub_client_may_connect: None) -> None:
    from huggingface_hub import InferenceClient
    from huggingface_hub.errors import HfHubHTTPError

    with pytest.raises(HfHubHTTPError, match="401"):
        InferenceClient(model=server.url, token="wrong-key-1").feature_extraction("a")
    with pytest.raises(HfHubHTTPError, match="413"):
        InferenceClient(model=server.url, token=KEY).feature_extraction(["a"] * 33)


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_openais_client(server: Server, expected: Any, encoding: Any) -> None:
    import openai

    # Without an encoding it asks for base64 on its own and decodes it.
    options = {} if encoding is None else {"encoding_format": encoding}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        answer = client.embeddings.create(model="whatever", input=TEXTS, **options)
    rows = [row.embedding for row in answer.data]
    if encoding == "base64":
        import base64

        rows = [np.frombuffer(base64.b64decode(row), dtype=np.float32) for row in rows]
    assert same(rows, expected)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > len(TEXTS)


def test_openais_client_cuts_dimensions_and_hears_of_errors(server: Server, expected: Any) -> None:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        cut = client.embeddings.create(model="m", input=TEXTS[:1], dimensions=64, encoding_format="float")
        head = expected[:1, :64] / np.linalg.norm(expected[:1, :64])
        assert same([cut.data[0].embedding], head)
        with pytest.raises(openai.BadRequestError, match="cannot be empty"):
            client.embeddings.create(model="m", input=[])
        with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
            client.embeddings.create(model="m", input=[[101, 102]])
        long = {"input": "word " * 5_000, "extra_body": {"truncate": False}}
        with pytest.raises(openai.APIStatusError, match="the limit is 256"):
            client.embeddings.create(model="m", **long)
        assert [model.id for model in client.models.list()] == [cut.model]
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.embeddings.create(model="m", input="a")


def test_langchains_endpoint_embeddings(server: Server, expected: Any, hub_client_may_connect: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        from langchain_huggingface import HuggingFaceEndpointEmbeddings

        embeddings = HuggingFaceEndpointEmbeddings(model=server.url, huggingfacehub_api_token=KEY)
    assert same(embeddings.embed_documents(TEXTS), expected)
    assert same([embeddings.embed_query(TEXTS[1])], expected[1:2])


def test_served_vectors_are_those_of_the_batch(server: Server, sample_run: SampleRun) -> None:
    table = pq.read_table(sample_run[0] / "out/sample/embeddings").slice(100, 32)
    stored = table["embedding"].combine_chunks().flatten().to_numpy().reshape(len(table), -1)
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"inputs": table["text"].to_pylist(), "prompt_name": "document"}
    answer = httpx.post(f"{server.url}/embed", json=body, headers=headers, timeout=60)
    assert same(answer.json(), stored)


def test_a_long_text_is_the_same_as_a_string_and_in_a_list(server: Server) -> None:
    text, headers = "word " * 5_000, {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        for path, name in (("/embed", "inputs"), ("/v1/embeddings", "input")):
            cut = [client.post(path, json={name: body, "truncate": True}) for body in (text, [text])]
            assert [answer.status_code for answer in cut] == [200, 200]
            first, second = (a.json() if path == "/embed" else a.json()["data"][0]["embedding"] for a in cut)
            assert np.allclose(first, second, atol=1e-6)
            for body in (text, [text]):
                assert client.post(path, json={name: body, "truncate": False}).status_code == 413


def test_a_query_finds_what_the_command_finds(server: Server, sample_run: SampleRun) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"query": "a small boat", "k": 3, "columns": ["word"]}
    hits = httpx.post(f"{server.url}/search", json=body, headers=headers, timeout=60).json()["results"][0]
    assert [hit["word"] for hit in hits] == ["square-rigger", "fore-and-after", "wherry"]
    assert hits[0]["score"] == pytest.approx(0.5737, abs=1e-3)
