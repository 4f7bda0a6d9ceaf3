import asyncio

import pytest

from tests.cli.fake_server import Script, chat, fake_server
from tripool.cli.client import Client, Connection, Server, parse_server
from tripool.core.errors import ConfigError, RequestError


class Wire:
    """Stands where a transport stands."""

    def __init__(self):
        self.sent, self.closed = b"", False

    def write(self, data):
        self.sent += data

    def is_closing(self):
        return self.closed

    def abort(self):
        self.closed = True


def received(*pieces: bytes, events: list | None = None):
    """What a connection makes of bytes that arrive in these pieces."""

    async def body():
        connection, wire = Connection(), Wire()
        connection._transport = wire
        take = None if events is None else lambda data, now: events.append(data)
        asking = asyncio.ensure_future(connection.ask(b"GET / HTTP/1.1\r\n\r\n", take))
        await asyncio.sleep(0)
        for piece in pieces:
            connection.data_received(piece)
        if not asking.done():
            connection.connection_lost(None)
        return await asking, wire.closed

    return asyncio.run(body())


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


STREAM = (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
          + chunked(b"data: one\n\n", b": a comment\ndata: two\n", b"\n", b"data: three\n\ndata: [DONE]\n\n"))


def test_a_stream_is_the_same_however_its_bytes_are_cut():
    for size in (1, 2, 7, 50, len(STREAM)):
        events: list[bytes] = []
        pieces = [STREAM[at:at + size] for at in range(0, len(STREAM), size)]
        answer, closed = received(*pieces, events=events)
        assert events == [b"one", b"two", b"three", b"[DONE]"], size
        assert (answer.status, closed) == (200, False)


def test_bodies_end_by_their_length_their_last_chunk_or_the_connection():
    head = b"HTTP/1.1 200 OK\r\n"
    assert received(head + b"Content-Length: 5\r\n\r\nhel", b"lo")[0].body == b"hello"
    assert received(head + b"Content-Length: 0\r\n\r\n")[0].body == b""
    assert received(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(b"hel", b"lo"))[0].body == b"hello"
    assert received(head + b"Transfer-Encoding: chunked\r\n\r\n2;x=y\r\nho\r\n0\r\n\r\n")[0].body == b"ho"
    assert received(head + b"\r\nhel", b"lo")[0].body == b"hello"


@pytest.mark.parametrize("piece", [
    b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
])
def test_what_is_no_whole_answer_is_an_error(piece):
    with pytest.raises(ConnectionError):
        received(piece)


def test_connections_are_kept_and_replaced_when_the_server_closed_them():
    async def body():
        async with fake_server(lambda path, body: Script(body={"path": path})) as (server, seen):
            async with Client(server) as client:
                assert (await client.get("/a"))["path"] == "/a"
                assert (await client.get("/b"))["path"] == "/b"
                assert seen.connections == 1
                client._idle[0].close()
                await asyncio.sleep(0)
                assert (await client.post("/c", {"x": 1}))["path"] == "/c"
                assert seen.connections == 2
            return seen

    assert asyncio.run(body()).requests == [("/a", None), ("/b", None), ("/c", {"x": 1})]


def test_a_refusal_carries_the_servers_own_words():
    async def body():
        refusal = Script(status=401, body={"error": {"message": "wrong key", "type": "auth", "param": None}})
        async with fake_server(lambda path, body: refusal) as (server, _), Client(server) as client:
            await client.get("/v1/models")

    with pytest.raises(RequestError, match="401: wrong key"):
        asyncio.run(body())


def test_an_answer_that_takes_too_long_is_given_up_and_its_connection_closed():
    async def body():
        slow = Script([(0.0, chat({"content": "a"})), (5.0, "[DONE]")])
        async with fake_server(lambda path, body: slow) as (server, _), Client(server) as client:
            events = []
            with pytest.raises(TimeoutError):
                await client.ask("POST", "/x", {}, take_event=lambda data, now: events.append(data), timeout_s=0.2)
            assert len(events) == 1
            assert client._idle == []

    asyncio.run(body())


def test_no_server_is_said_with_a_remedy():
    async def body():
        async with Client(Server(port=1)) as client:
            await client.get("/health")

    with pytest.raises(ConfigError, match=r"no server answers at http://127.0.0.1:1 .*tripool serve"):
        asyncio.run(body())


@pytest.mark.parametrize(("url", "shown"), [
    ("http://127.0.0.1:8000", "http://127.0.0.1:8000"), ("http://host:9/v1/", "http://host:9"),
    ("localhost:8001", "http://localhost:8001"), ("https://host/api/v1", "https://host:443/api"),
    ("http://[::1]:8000", "http://[::1]:8000"), ("host", "http://host:8000"), ("http://host", "http://host:80"),
])
def test_addresses_are_read(url, shown):
    assert parse_server(url).url == shown


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "http://host:99999"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="not an address"):
        parse_server(url)


def test_the_key_is_sent_as_a_bearer_token():
    head = parse_server("http://host:9", "secret").encode("POST", "/v1/x", b"{}").decode()
    assert "Authorization: Bearer secret\r\n" in head
    assert head.startswith("POST /v1/x HTTP/1.1\r\n")
    assert head.endswith("Content-Length: 2\r\n\r\n{}")
