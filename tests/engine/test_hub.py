"""Fetching a model by its hub id, against a stub of the hub on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.checkpoints import tiny_config, write_checkpoint
from tripool.core.errors import ConfigError
from tripool.engine.checkpoint import open_checkpoint
from tripool.engine.hub import model_folder

MODEL = "tiny/random-v3"
COMMIT, OLDER = "a" * 40, "b" * 40
WEIGHTS = "model-00001-of-00002.safetensors"


class StubHub:
    """A hub with one model: its newest commit, and an older one under the tag v1."""

    def __init__(self, folder: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.files |= {"pytorch_model.bin": b"a pickle", "modeling.py": b"code", "README.md": b"words",
                       "original/model.safetensors": b"a copy", "tokenizer.json": b"{}"}
        self.requests: list[tuple[str, str, str]] = []      # method, path, range
        self.cut_once: set[str] = set()                     # files whose first download breaks off half-way
        self.refuse: dict[str, tuple[int, str]] = {}        # repository: status and error code
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("?")[0]
        self.requests.append((handler.command, path, handler.headers.get("Range", "")))
        repository = "/".join(path.removeprefix("/api/models/").strip("/").split("/")[:2])
        if repository in self.refuse or repository != MODEL:
            status, code = self.refuse.get(repository, (404, "RepoNotFound"))
            self.reply(handler, status, b"", {"X-Error-Code": code, "X-Error-Message": code})
            return
        rest = path.partition(MODEL)[2].strip("/").split("/")
        if rest[0] == "revision":
            commit = {"main": COMMIT, "v1": OLDER, COMMIT: COMMIT, OLDER: OLDER}.get(rest[1])
            if commit is None:
                self.reply(handler, 404, b"", {"X-Error-Code": "RevisionNotFound"})
            else:
                self.reply(handler, 200, json.dumps({"id": MODEL, "sha": commit, "siblings": []}).encode())
        elif rest[0] == "tree":
            entries = [{"type": "file", "path": name, "size": len(content), "oid": self.tag(content)}
                       for name, content in self.files.items()]
            self.reply(handler, 200, json.dumps(entries).encode())
        else:
            self.send_file(handler, rest[1], "/".join(rest[2:]))

    def send_file(self, handler: BaseHTTPRequestHandler, commit: str, name: str) -> None:
        content = self.files[name]
        headers = {"ETag": f'"{self.tag(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        wanted = handler.headers.get("Range", "")
        start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        broken = handler.command == "GET" and name in self.cut_once
        self.cut_once -= {name} if broken else set()
        self.reply(handler, 206 if start else 200, content[start:], headers, cut=broken)

    @staticmethod
    def tag(content: bytes) -> str:
        return hashlib.sha256(content).hexdigest()

    @staticmethod
    def reply(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None,
              cut: bool = False) -> None:
        handler.send_response(status)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(body[:len(body) // 2] if cut else body)
        handler.close_connection = True

    def fetched(self) -> set[str]:
        return {path.partition("/resolve/")[2].partition("/")[2] for method, path, _ in self.requests
                if method == "GET" and "/resolve/" in path}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StubHub]:
    write_checkpoint(tmp_path / "published", tiny_config("v3"))
    stub = StubHub(tmp_path / "published")
    yield stub
    stub.server.shutdown()
    stub.server.server_close()


def fetch(hub: StubHub, tmp_path: Path, model: str = MODEL, revision: str | None = None, **kwargs: Any) -> Path:
    return model_folder(model, revision, endpoint=hub.endpoint, cache=tmp_path / "cache", token="unused", **kwargs)


def test_a_hub_id_becomes_a_folder_that_loads(hub, tmp_path):
    said: list[str] = []

    folder = fetch(hub, tmp_path, notify=said.append)

    assert open_checkpoint(folder).shape.num_layers == 3
    assert folder.name == COMMIT and COMMIT in said[-1]


def test_neither_pickles_nor_code_nor_copies_are_fetched(hub, tmp_path):
    folder = fetch(hub, tmp_path)

    unwanted = {"pytorch_model.bin", "modeling.py", "original/model.safetensors", "README.md"}
    assert hub.fetched() == hub.files.keys() - unwanted
    assert not unwanted & {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize(("revision", "commit"), [("v1", OLDER), (OLDER, OLDER), (COMMIT, COMMIT), (None, COMMIT)])
def test_a_revision_pins_the_commit(hub, tmp_path, revision, commit):
    assert fetch(hub, tmp_path, revision=revision).name == commit


def test_what_is_here_is_not_fetched_again(hub, tmp_path):
    fetch(hub, tmp_path)
    hub.requests.clear()

    fetch(hub, tmp_path)

    assert hub.fetched() == set()


def test_a_broken_download_goes_on_where_it_stopped(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)      # what the client keeps of a download that ends
    hub.cut_once = {WEIGHTS}

    folder = fetch(hub, tmp_path)

    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    ranges = [wanted for method, path, wanted in hub.requests if method == "GET" and path.endswith(WEIGHTS) and wanted]
    assert any(0 < int(wanted.removeprefix("bytes=").split("-")[0]) < len(hub.files[WEIGHTS]) for wanted in ranges)


def test_a_pinned_model_that_is_here_needs_no_hub(hub, tmp_path):
    folder = fetch(hub, tmp_path, revision=COMMIT)
    hub.server.shutdown()
    hub.server.server_close()

    assert fetch(hub, tmp_path, revision=COMMIT) == folder


def test_without_hub_and_without_files_the_message_says_so(hub, tmp_path):
    hub.server.shutdown()
    hub.server.server_close()

    with pytest.raises(ConfigError, match="is not here in full and the hub cannot be reached"):
        fetch(hub, tmp_path)


@pytest.mark.parametrize(("status", "code", "said"), [
    (404, "RepoNotFound", "the hub has no model someone/else"),
    (403, "GatedRepo", "asks for its terms to be accepted"),
])
def test_what_the_hub_refuses_is_said_in_a_sentence(hub, tmp_path, status, code, said):
    hub.refuse["someone/else"] = (status, code)

    with pytest.raises(ConfigError, match=said):
        fetch(hub, tmp_path, "someone/else")


def test_an_unknown_revision_is_named(hub, tmp_path):
    with pytest.raises(ConfigError, match="has no revision v9"):
        fetch(hub, tmp_path, revision="v9")


def test_a_folder_is_itself(tmp_path):
    assert model_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["no-such-folder", "./no/such/folder", "/no/such", "a/b/c", "a b/c", "../x"])
def test_a_name_that_is_neither_folder_nor_hub_id_is_refused_without_asking_anyone(name):
    with pytest.raises(ConfigError, match="there is no such folder"):
        model_folder(name, endpoint="http://127.0.0.1:1")


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")

    with pytest.raises(ConfigError, match="which is a file"):
        model_folder(str(tmp_path / "model.safetensors"))
