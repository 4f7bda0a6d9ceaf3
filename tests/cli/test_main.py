import logging
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.cli.fake_server import tripool
from tripool import __version__
from tripool.cli.serve import health_words, read_cluster_key
from tripool.core.errors import ConfigError
from tripool.serve.process import set_up_logs

COMMANDS = ("serve", "generate", "chat", "top", "experts", "bench serve", "doctor", "quantize", "replay", "reproduce",
            "calibrate", "demo")


def run_process(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "tripool.cli.main", *words], capture_output=True, text=True,
                          timeout=60, check=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    done = tripool(*command.split(), "--help")
    assert done.exit_code == 0
    assert "Usage" in done.stdout


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in ("replay", "demo")])
def test_help_teaches_by_example(command):
    assert f"tripool {command}" in tripool(*command.split(), "--help").stdout.replace("Usage: ", "")


def test_help_lists_all_commands():
    text = tripool("--help").stdout
    assert all(f" {command.split()[0]} " in text for command in COMMANDS)


def test_the_version_is_shown():
    assert tripool("--version").stdout.strip() == __version__


def test_a_mistake_is_one_message_and_code_two():
    done = run_process("serve", "--prefill", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "there is no decode instance; add --decode 1" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_verbose_shows_where_it_happened():
    done = run_process("--verbose", "serve", "--prefill", "1")
    assert "Traceback" in done.stderr
    assert "ConfigError" in done.stderr


def test_a_missing_model_is_named_before_anything_starts():
    done = tripool("serve", "/no/such/folder")
    assert isinstance(done.exception, ConfigError)
    assert "/no/such/folder" in str(done.exception)


def test_a_server_that_is_not_there_is_named_with_the_remedy():
    done = tripool("chat", "--url", "http://127.0.0.1:1")
    assert isinstance(done.exception, ConfigError)
    assert "no server answers at http://127.0.0.1:1" in str(done.exception)


def test_brackets_in_an_error_are_text():
    done = run_process("serve", "[red]absent[/red]")
    assert done.returncode == 2
    assert "[red]absent[/red]" in done.stderr


def test_unknown_options_are_refused():
    done = tripool("serve", "--prefil", "1")
    assert done.exit_code == 2
    assert "--prefil" in done.stderr


def test_the_deployment_can_be_shown_and_read_again(tmp_path):
    shown = tripool("serve", "--prefill", "2", "--decode", "1", "--port", "9", "--api-key", "k", "--show-config")
    assert shown.exit_code == 0, shown.output
    assert tomllib.loads(shown.stdout)["prefill"]["count"] == 2
    file = tmp_path / "d.toml"
    file.write_text(shown.stdout)
    again = tripool("serve", "--config", str(file), "--show-config")
    assert again.stdout == shown.stdout


@pytest.mark.parametrize(("words", "complaint"), [
    (("--role", "cook", "--join", "tcp://a:1"), "known are prefill, decode, hybrid"),
    (("--role", "decode"), "say with --join"),
    (("--join", "tcp://a:1"), "--join needs --role"),
    (("--role", "decode", "--join", "tcp://a:1", "--prefill", "2"), "leave out --prefill"),
    (("--hybrid", "1", "--accept-members", "tcp://0.0.0.0:7000"), "--cluster-key-file"),
    (("one", "--model", "two"), "two models are named"),
    (("--log-level", "loud"), "--log-level"),
    (("--log-format", "xml"), "--log-format"),
    (("--record", "/proc/here"), "--record is /proc/here, which cannot be made"),
])
def test_contradictions_are_refused(words, complaint):
    done = tripool("serve", *words)
    assert isinstance(done.exception, ConfigError)
    assert complaint in str(done.exception)


def key_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_cluster_key_is_a_digest_of_its_file(tmp_path):
    key = read_cluster_key(key_file(tmp_path, b"sixteen bytes and more"))
    assert len(bytes.fromhex(key)) == 32
    assert key == read_cluster_key(key_file(tmp_path, b"sixteen bytes and more\n"))
    assert key != read_cluster_key(key_file(tmp_path, b"sixteen bytes and less"))


@pytest.mark.parametrize(("content", "mode", "complaint"), [
    (b"sixteen bytes and more", 0o644, "chmod 600"), (b"short", 0o600, "at least 16")])
def test_a_weak_cluster_key_is_refused(tmp_path, content, mode, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read_cluster_key(key_file(tmp_path, content, mode))


def test_a_missing_cluster_key_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the cluster key"):
        read_cluster_key(tmp_path / "absent")


def test_a_health_page_is_put_into_words():
    assert health_words('{"status": "loading", "cause": "decode-0 is loading", "load_fraction": 0.5}') == (
        "decode-0 is loading", 0.5)
    assert health_words('{"status": "ready", "cause": "", "load_fraction": 1}') == ("ready", 1.0)
    assert health_words("the gateway does not answer yet") == ("the gateway does not answer yet", 0.0)


@pytest.mark.parametrize(("form", "shown"), [
    ("text", "I launcher hello you path=/a status=200\n"),
    ("json", '"message":"hello you","path":"/a","status":200}'),
])
def test_logs_are_lines_with_the_fields_of_what_is_logged(capsys, form, shown):
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        set_up_logs("launcher", "info", form)
        logging.getLogger("tripool.test").info("hello %s", "you", extra={"fields": {"path": "/a", "status": 200}})
        assert shown in capsys.readouterr().err
    finally:
        root.handlers[:] = before
        root.setLevel(level)
