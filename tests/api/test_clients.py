"""The real `openai` client, over a real socket, against every endpoint it has words for."""

import asyncio
import threading
import time

import openai
import pytest

from tests.api.builders import EOS, MODEL, WINDOW, application, ids, served, token
from tests.api.scripted import Script, ScriptedBackend

KEY = "sk-test"
HELLO = [{"role": "user", "content": "hello"}]
ANSWER = [*ids("I think so</think>The answer is 42. 🦊"), token(EOS)]


class Server:
    """A served application whose script can be changed."""

    def __init__(self, url, backend):
        self.url, self.backend = url, backend
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=20)
        self.root = openai.OpenAI(base_url=url, api_key="root", max_retries=0, timeout=20)

    def asynchronous(self):
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=20)


@pytest.fixture(scope="module")
def running():
    backend = ScriptedBackend(Script(ANSWER))
    with served(application(backend, api_keys=(KEY,), admin_keys=("root",), max_body_bytes=1 << 20)) as url:
        yield Server(url, backend)


@pytest.fixture
def server(running):
    running.backend.script = Script(ANSWER, num_cached=4)
    running.backend.streams.clear()
    return running


def test_a_chat(server):
    answer = server.client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, seed=3)
    message = answer.choices[0].message
    assert message.content == "The answer is 42. 🦊" and message.reasoning_content == message.reasoning == "I think so"
    assert answer.choices[0].finish_reason == "stop" and answer.id.startswith("chatcmpl-") and answer.model == MODEL
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens == len(ANSWER)
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(ids("I think so"))


def test_a_streamed_chat(server):
    chunks = list(server.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True,
                                                        stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant" and deltas[0].content == ""
    assert "".join(delta.content or "" for delta in deltas) == "The answer is 42. 🦊"
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "I think so"
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage.completion_tokens == len(ANSWER)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_the_streaming_helper_of_the_client_understands_the_stream(server):
    with server.client.chat.completions.stream(model=MODEL, messages=HELLO, logprobs=True) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "The answer is 42. 🦊"


@pytest.mark.parametrize("prompt", ["hello", ["hello", "world"], [5, 6, 7], [[5, 6], [7]]])
def test_a_text_completion_of_each_form_of_prompt(server, prompt):
    num_choices = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    answer = server.client.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=2, max_tokens=3)
    assert len(answer.choices) == num_choices and answer.object == "text_completion"
    assert all(choice.finish_reason == "length" for choice in answer.choices)
    assert answer.usage.completion_tokens == 3 * num_choices
    texts = {}
    for chunk in server.client.completions.create(model=MODEL, prompt=prompt, echo=True, max_tokens=3, stream=True):
        texts[chunk.choices[0].index] = texts.get(chunk.choices[0].index, "") + chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in answer.choices}


def test_the_asynchronous_client_with_several_streams_at_once(server):
    server.backend.script = Script(ANSWER, delay_s=0.002)

    async def one(client):
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def several():
        async with server.asynchronous() as client:
            return await asyncio.gather(*[one(client) for _ in range(8)])

    assert asyncio.run(several()) == ["The answer is 42. 🦊"] * 8


def test_the_models(server):
    assert [model.id for model in server.client.models.list()] == [MODEL]
    assert server.client.models.retrieve(MODEL).max_model_len == WINDOW
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("gpt")


def test_errors_are_the_exceptions_that_the_client_knows(server):
    create = server.client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as refused:
        create(model=MODEL, messages=HELLO, temperature=-1)
    assert refused.value.param == "temperature" and refused.value.request_id
    with pytest.raises(openai.BadRequestError) as refused:
        server.client.completions.create(model=MODEL, prompt=[1] * WINDOW)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        create(model="gpt", messages=HELLO)
    with pytest.raises(openai.AuthenticationError):
        server.client.with_options(api_key="wrong").chat.completions.create(model=MODEL, messages=HELLO)
    with pytest.raises(openai.NotFoundError):
        server.client.embeddings.create(model=MODEL, input="x")
    for status, kind in ((429, openai.RateLimitError), (503, openai.InternalServerError)):
        server.backend.script = Script(ANSWER, fail_after=0, status=status)
        with pytest.raises(kind):
            create(model=MODEL, messages=HELLO, stream=True)
    server.backend.script = Script(ANSWER, fail_after=3)
    with pytest.raises(openai.APIError, match="decode-0"):
        list(create(model=MODEL, messages=HELLO, stream=True))


def test_a_body_of_ten_megabytes_is_refused_and_the_next_request_is_served(server):
    with pytest.raises(openai.APIStatusError) as refused:
        server.client.completions.create(model=MODEL, prompt="a" * (10 << 20))
    assert refused.value.status_code == 413
    assert server.client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices


def test_a_client_that_closes_its_stream_frees_the_request(server):
    server.backend.script = Script(ANSWER * 3, delay_s=0.01)
    stream = server.client.chat.completions.create(model=MODEL, messages=HELLO, n=3, stream=True)
    next(iter(stream))
    stream.close()
    give_up = time.monotonic() + 10
    while not server.backend.all_closed():
        assert time.monotonic() < give_up, "the requests were not cancelled"
        time.sleep(0.01)


def test_a_client_that_gives_up_waiting_frees_the_request(server):
    server.backend.script = Script(ANSWER, hang_after=2)
    with pytest.raises(openai.APITimeoutError):
        server.client.with_options(timeout=0.3).chat.completions.create(model=MODEL, messages=HELLO)
    give_up = time.monotonic() + 10
    while not (server.backend.streams and server.backend.all_closed()):
        assert time.monotonic() < give_up, "the request was not cancelled"
        time.sleep(0.01)


def test_the_paths_that_the_client_has_no_words_for(server):
    tokens = server.client.with_options(base_url=server.url).post(
        "/tokenize", body={"prompt": "hello"}, cast_to=object
    )["tokens"]
    plain = server.client.with_options(base_url=server.url)
    assert plain.post("/detokenize", body={"tokens": tokens[1:]}, cast_to=object) == {"prompt": "hello"}
    for path in (
        "/health",
        "/live",
        "/ping",
        "/version",
        "/load",
        "/server_info",
        "/get_model_info",
        "/health_generate",
    ):
        assert isinstance(plain.get(path, cast_to=object), dict)
    assert "tripool:" in plain.get("/metrics", cast_to=str)
    assert server.root.post("/flush_cache", cast_to=object)["success"]
    assert server.root.post("/abort_requests", body={"abort_all": True}, cast_to=object) == {"aborted": []}


def test_many_clients_at_once(server):
    answers = []

    def ask():
        answers.append(server.client.chat.completions.create(model=MODEL, messages=HELLO).choices[0].message.content)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert answers == ["The answer is 42. 🦊"] * 12
