"""Links: who may open one, and what a stranger can do."""

import asyncio
import os
import socket

import pytest
import uvloop

from tripool.core import messages as m
from tripool.core.errors import ConfigError, WireError
from tripool.serve.links import Link, Listener, call, host_id, parse_address
from tripool.serve.wire import FROM_GATEWAY, FROM_INSTANCE, PROTOCOL_VERSION, Opening, encode

KEY = b"k" * 32


def opening(member: str, version: int = PROTOCOL_VERSION) -> Opening:
    return Opening(version, member, "decode", f"boot-of-{member}", host_id(), (), b"")


class Side:
    """One listener and what it heard."""

    def __init__(self, address: str, key: bytes = KEY, verdict: str = "", fds: list[int] | None = None) -> None:
        self.heard: list[tuple[str, object]] = []
        self.ended: list[str] = []
        self.links: list[Link] = []
        self.verdict = verdict
        self.listener = Listener(address, opening("gateway"), key, self.accept, lambda: fds or [])

    def accept(self, caller: Opening):
        if self.verdict:
            return self.verdict
        self.links.append(Link(caller, FROM_INSTANCE, lambda link, to, message: self.heard.append((to, message)),
                               lambda link, cause: self.ended.append(cause)))
        return self.links[-1]


async def dial(address: str, key: bytes = KEY, version: int = PROTOCOL_VERSION):
    heard: list[object] = []
    link, fds = await call(address, opening("decode-0", version), key,
                           lambda welcome: Link(welcome, FROM_GATEWAY, lambda link, to, message: heard.append(message),
                                                lambda link, cause: heard.append(cause)))
    return link, fds, heard


async def until(condition, deadline_s: float = 5.0):
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(params=["unix", "tcp"])
def address(request, tmp_path):
    return f"unix:{tmp_path}/x.sock" if request.param == "unix" else "tcp://127.0.0.1:0"


def run(coroutine):
    return uvloop.run(coroutine)


def test_messages_go_both_ways(address):
    async def talk():
        side = Side(address)
        side.listener.start()
        link, _, heard = await dial(side.listener.address)
        assert link.member == "gateway"
        link.send("gateway/health", m.Hello("decode-0", "decode", "b"))
        link.flush()
        await until(lambda: side.heard)
        side.links[0].send("decode-0", m.Abort(1, 2))
        side.links[0].flush()
        await until(lambda: heard)
        assert (side.heard, heard) == ([("gateway/health", m.Hello("decode-0", "decode", "b"))], [m.Abort(1, 2)])
        link.close("enough")
        await until(lambda: side.ended)
        await side.listener.stop()
    run(talk())


def test_a_wrong_key_is_found_out_by_both_sides(address):
    async def talk():
        side = Side(address)
        side.listener.start()
        with pytest.raises(WireError, match="does not know the cluster key"):
            await dial(side.listener.address, key=b"other")
        assert not side.links
        await side.listener.stop()
    run(talk())


def test_the_key_never_travels(tmp_path):
    async def talk():
        seen = bytearray()
        side = Side(f"unix:{tmp_path}/real.sock")
        side.listener.start()
        loop = asyncio.get_running_loop()

        async def relay(reader, writer):
            to_reader, to_writer = await asyncio.open_unix_connection(f"{tmp_path}/real.sock")

            async def pump(source, target):
                while data := await source.read(4096):
                    seen.extend(data)
                    target.write(data)
            await asyncio.gather(pump(reader, to_writer), pump(to_reader, writer))

        server = await asyncio.start_unix_server(relay, f"{tmp_path}/spy.sock")
        task = loop.create_task(dial(f"unix:{tmp_path}/spy.sock"))
        await until(lambda: side.links)
        task.cancel()
        assert KEY not in seen and len(seen) > 100
        server.close()
        await side.listener.stop()
    run(talk())


def test_a_caller_of_another_version_is_told_so(address):
    async def talk():
        side = Side(address)
        side.listener.start()
        with pytest.raises(WireError, match="speaks protocol 99"):
            await dial(side.listener.address, version=99)
        await side.listener.stop()
    run(talk())


def test_a_refusal_gives_its_reason(address):
    async def talk():
        side = Side(address, verdict="the name decode-0 is taken")
        side.listener.start()
        with pytest.raises(WireError, match="the name decode-0 is taken"):
            await dial(side.listener.address)
        await side.listener.stop()
    run(talk())


def test_descriptors_are_handed_over_on_one_host(tmp_path):
    async def talk():
        fd = os.memfd_create("gift")
        os.write(fd, b"inside")
        side = Side(f"unix:{tmp_path}/x.sock", fds=[fd])
        side.listener.start()
        _, fds, _ = await dial(side.listener.address)
        assert [os.pread(each, 10, 0) for each in fds] == [b"inside"]
        await side.listener.stop()
        os.close(fd)
        os.close(fds[0])
    run(talk())


def test_tcp_needs_a_key():
    with pytest.raises(ConfigError, match="cluster key"):
        Listener("tcp://127.0.0.1:0", opening("gateway"), b"", lambda caller: "no")


def test_a_message_that_is_not_allowed_ends_the_link(address):
    async def talk():
        side = Side(address)
        side.listener.start()
        link, _, _ = await dial(side.listener.address)
        link.send("gateway", m.Abort(1, 1))
        link.flush()
        await until(lambda: side.ended)
        assert "Abort is not taken" in side.ended[0] and not side.heard
        await side.listener.stop()
    run(talk())


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\x00" * 64, b""])
def test_noise_harms_nobody(address, noise):
    async def talk():
        side = Side(address)
        side.listener.start()
        kind, where, port = parse_address(side.listener.address)
        stranger = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
        stranger.connect(where if kind == "unix" else (where, port))
        stranger.sendall(noise)
        stranger.close()
        link, _, _ = await dial(side.listener.address)       # served on
        assert link.is_open
        await side.listener.stop()
    run(talk())


def test_a_taken_address_is_a_clear_error(tmp_path):
    async def talk():
        first = Side("tcp://127.0.0.1:0")
        first.listener.start()
        second = Side(first.listener.address)
        with pytest.raises(ConfigError, match="choose another address"):
            second.listener.start()
        await first.listener.stop()
    run(talk())


@pytest.mark.parametrize("text", ["", "tcp://", "tcp://host", "http://a:1", "tcp://a:99999", "/tmp/x"])
def test_what_is_no_address_is_said(text):
    with pytest.raises(ConfigError, match="is not an address"):
        parse_address(text)


def test_an_encoded_greeting_is_small():
    assert len(encode("", opening("decode-0"))) < 400
