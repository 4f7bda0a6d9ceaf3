import dataclasses

import pytest
import typer
from typer.testing import CliRunner

from tripool.cli.flags import (
    FLAGS,
    Size,
    parse_bytes,
    read_deployment,
    show_bytes,
    show_deployment,
    takes_flags,
)
from tripool.core.deployment import Deployment, InstanceConfig, parse_deployment
from tripool.core.errors import ConfigError

VALUES = {    # a legal value, different from the default, for flags whose kind does not suggest one
    "--dtype": "bfloat16", "--head-dtype": "int8", "--load-format": "dummy",
    "--reasoning-fields": "reasoning", "--exchange": "direct",
    "--exchange-rows": "int8", "--exchange-tokens": "37", "--redundant-experts": "1",
    "--shared-expert-copies": "1",
    "--sampling-defaults": "openai", "--prefill": "3", "--decode": "3", "--dp-size": "2",
    "--spare-load": "0.5",
}


def field_of(deployment: Deployment, path: str):
    for name in path.split("."):
        deployment = getattr(deployment, name)
    return deployment


def parsed(*words: str) -> dict:
    """What a command with all flags is given for some words."""
    seen = {}
    app = typer.Typer()

    @app.command()
    @takes_flags()
    def command(given: dict) -> None:
        seen.update(given)

    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return seen


def words_for(flag, name: str) -> tuple[str, ...]:
    """What a user types to set a flag to something other than its default."""
    if flag.kind is bool:
        default = field_of(Deployment(hybrid=InstanceConfig(count=1)), flag.fields[0])
        on, _, off = name.partition("/")
        return (off,) if default and off else (on.strip(),)
    suggestion = {int: "7", float: "7.5", str: "something", Size: "7MiB", list[str]: "secret"}[flag.kind]
    return name, VALUES.get(flag.names[0], suggestion)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.parameter)
def test_every_spelling_of_a_flag_lands_in_its_fields(flag):
    default = Deployment(hybrid=InstanceConfig(count=1))
    both = {"prefill": 1, "decode": 1} if flag.name in ("--prefill", "--decode", "--adaptive-roles") else {"hybrid": 1}
    for name in flag.names:
        words = words_for(flag, name)
        given = {key: value for key, value in parsed(*words).items() if value is not None}
        deployment = read_deployment(None, both | given, 2)
        for path in flag.fields:
            value = field_of(deployment, path)
            if flag.kind is not bool or words[0].startswith(("--no-", "--disable")):
                assert value != field_of(default, path), f"{words} did not reach {path}"
            else:
                assert value is True, f"{words} did not reach {path}"


def test_every_field_of_a_deployment_has_a_flag():
    def leaves(value, prefix=""):
        for field in dataclasses.fields(value):
            each = getattr(value, field.name)
            if dataclasses.is_dataclass(each):
                yield from leaves(each, f"{prefix}{field.name}.")
            else:
                yield prefix + field.name

    known = {path for flag in FLAGS for path in flag.fields}
    assert set(leaves(Deployment(hybrid=InstanceConfig(count=1)))) - known == set()


def test_the_command_line_wins_over_the_file(tmp_path):
    file = tmp_path / "deployment.toml"
    file.write_text("block_tokens = 32\n[gateway]\nport = 9000\nhost = '127.0.0.2'\n[hybrid]\ncount = 2\n")

    deployment = read_deployment(file, {"port": 9001}, num_cores=8)

    assert (deployment.gateway.port, deployment.gateway.host) == (9001, "127.0.0.2")
    assert (deployment.hybrid.count, deployment.prefill.count, deployment.block_tokens) == (2, 0, 32)


def test_an_environment_variable_stands_in_for_a_flag(monkeypatch):
    monkeypatch.setenv("TRIPOOL_MAX_NUM_SEQS", "5")
    assert parsed()["max_num_seqs"] == 5
    assert parsed("--max-num-seqs", "6")["max_num_seqs"] == 6


@pytest.mark.parametrize(("num_cores", "counts"), [(1, (0, 0, 0, 1)), (3, (0, 0, 0, 1)), (4, (1, 1, 1, 0))])
def test_without_counts_the_cores_decide(num_cores, counts):
    deployment = read_deployment(None, {}, num_cores)
    found = (deployment.prefill.count, deployment.decode.count, deployment.cache.count, deployment.hybrid.count)
    assert found == counts


def test_a_cache_may_be_added_to_the_default():
    assert read_deployment(None, {"cache": 2}, num_cores=2).cache.count == 2
    assert read_deployment(None, {"cache": 0}, num_cores=8).cache.count == 0


def test_packed_weights_are_kept_where_caches_are_unless_told_otherwise(tmp_path, monkeypatch):
    def root(given: dict, config=None):
        return read_deployment(config, given, 2).model.packed_root

    file = tmp_path / "deployment.toml"
    file.write_text("[model]\nweights_cache = '~/packed'\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert root({}) == tmp_path / ".cache/tripool/weights"
    assert root({}, file) == tmp_path / "packed"
    assert root({"weights_cache": "none"}, file) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert root({}) == tmp_path / "xdg/tripool/weights"
    monkeypatch.setenv("XDG_CACHE_HOME", "not absolute, so not valid")
    assert root({}) == tmp_path / ".cache/tripool/weights"
    assert parsed()["weights_cache"] != str(tmp_path / ".cache/tripool/weights")      # of tests: a folder of their own


def test_several_ranks_choose_the_direct_exchange():
    assert read_deployment(None, {"hybrid": 1, "dp_size": 2}, 2).hybrid.how_to_exchange == "direct"
    assert read_deployment(None, {"hybrid": 1}, 2).hybrid.how_to_exchange == "local"


@pytest.mark.parametrize(("text", "complaint"), [
    ("[gateway]\nprot = 1", "unknown key 'gateway.prot'"),
    ("[gateway]\nport = 'x'", "gateway.port must be int"),
    ("[gateway]\nport = 70000", "gateway.port is 70000"),
    ("[prefill]\ncount = 1", "no decode instance"),
    ("gateway = 3", "gateway must be a table"),
    ("hybrid = 3", "hybrid must be a table"),
    ("not toml", "not valid TOML"),
])
def test_a_wrong_file_is_refused_by_name(tmp_path, text, complaint):
    file = tmp_path / "deployment.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"deployment\.toml|must be a table") as caught:
        read_deployment(file, {}, 2)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(("file_text", "given", "complaint"), [
    ("", {"hybrid": 1, "num_speculative_tokens": 9}, "--num-speculative-tokens is 9; the most is 8"),
    ("", {"prefill": 1, "decode": 1, "num_speculative_tokens": -1}, "--num-speculative-tokens is -1; the least is 0"),
    ("[hybrid]\nnum_speculative_tokens = 9", {"hybrid": 1}, "hybrid.num_speculative_tokens is 9; the most is 8"),
    ("[hybrid]\ncount = 1\nnum_speculative_tokens = 2", {"num_speculative_tokens": 9},
     "--num-speculative-tokens is 9; the most is 8"),
    ("[decode]\nnum_speculative_tokens = 9", {"prefill": 1, "decode": 1}, "decode.num_speculative_tokens is 9"),
    ("[hybrid]\ncount = 1\nmax_num_batched_tokens = 3", {"num_speculative_tokens": 3},
     "hybrid.max_num_batched_tokens is 3, but with num_speculative_tokens 3"),
    ("", {"hybrid": 1, "max_num_batched_tokens": 3, "num_speculative_tokens": 3}, "--max-num-batched-tokens is 3, but"),
    ("", {"prefill": 1}, "--prefill is 1, but there is no decode instance"),
    ("", {"port": 70000}, "--port is 70000"),
    ("", {"port": "x"}, "--port must be int"),
    ("", {"hybrid": 1, "dp_size": 2, "device": "cuda"}, "--dp-size is 2 and model.device is cuda"),
])
def test_a_complaint_names_the_field_as_it_was_written(tmp_path, file_text, given, complaint):
    file = tmp_path / "deployment.toml"
    file.write_text(file_text)
    with pytest.raises(ConfigError) as caught:
        read_deployment(file, given, 2)
    assert str(caught.value).startswith(complaint if complaint.startswith("--") else f"{file}: {complaint}")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.toml: No such file"):
        read_deployment(tmp_path / "absent.toml", {}, 2)


def test_a_shown_deployment_reads_back_the_same():
    given = {"api_key": ["a", "b"], "prefill": 2, "decode": 1, "enable_deterministic_inference": True}
    deployment = read_deployment(None, given, 2)
    assert deployment.model.deterministic
    assert parse_deployment(show_deployment(deployment)) == deployment


@pytest.mark.parametrize(("text", "size"), [
    ("0", 0), ("1000", 1000), ("512MiB", 512 << 20), ("4GiB", 4 << 30), ("4 gb", 4_000_000_000), ("1.5k", 1500),
    ("2T", 2_000_000_000_000), ("7B", 7),
])
def test_sizes_are_read_with_units(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "many", "-1", "1XB", "1GiBB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="not a size"):
        parse_bytes(text)


def test_sizes_are_shown_for_people():
    assert [show_bytes(size) for size in (0, 1023, 1024, 512 << 20, 3 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "512.0 MiB", "3.0 TiB"]
