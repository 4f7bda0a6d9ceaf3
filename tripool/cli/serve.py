"""`tripool serve`: start a deployment on this machine, or one member that joins another machine's deployment."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from tripool.cli.flags import read_deployment, show_deployment, takes_flags
from tripool.cli.screen import err, loading, out
from tripool.core.deployment import Deployment, InstanceConfig
from tripool.core.errors import ConfigError
from tripool.core.messages import ROLES
from tripool.serve.budget import threads_per_rank, usable_cores
from tripool.serve.launch import Fleet, LaunchOptions, launch
from tripool.serve.models import resolve
from tripool.serve.process import ProcessSpec, set_up_logs

SERVICE = "Service"
KEY_BYTES = 16             # the least a cluster key must have


class Stopped(BaseException):
    """Somebody asked this process to end."""


@takes_flags()
def serve(
    given: dict[str, Any],
    named: Annotated[str | None, typer.Argument(metavar="MODEL|FILE.toml", help="The same as --model, or as "
                                               "--config.",
                                                show_default=False)] = None,
    config: Annotated[Path | None, typer.Option(help="A deployment in TOML; flags win over it.",
                                                show_default=False, rich_help_panel=SERVICE)] = None,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print the deployment as TOML and end.",
                                              rich_help_panel=SERVICE)] = False,
    role: Annotated[str | None, typer.Option(help="Start one member of this role instead (prefill, decode, hybrid); "
                                             "needs --join.", show_default=False, rich_help_panel=SERVICE)] = None,
    join: Annotated[str | None, typer.Option(metavar="ADDRESS", help="The gateway to join: its tcp://HOST:PORT, or its "
                                             "unix:PATH on this machine.", show_default=False,
                                             rich_help_panel=SERVICE)] = None,
    name: Annotated[str | None, typer.Option(help="The joining member's name; the default is made of role and host.",
                                             show_default=False, rich_help_panel=SERVICE)] = None,
    cluster_key_file: Annotated[Path | None, typer.Option(help="A file with the secret that members of other machines "
                                                          "must know.", show_default=False,
                                                          rich_help_panel=SERVICE)] = None,
    restart: Annotated[bool, typer.Option("--restart/--no-restart", help="Start members again that died.",
                                          rich_help_panel=SERVICE)] = True,
    record: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Record every decision, to be replayed later.",
                                                show_default=False, rich_help_panel=SERVICE)] = None,
    metrics_port: Annotated[int, typer.Option(help="Port of the first instance's metrics; the next, and then the cache "
                                              "servers, take the following ones; 0 takes free ones.",
                                              rich_help_panel=SERVICE)] = 0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.", rich_help_panel=SERVICE)] = "warning",
    log_format: Annotated[str, typer.Option(help="text or json.", rich_help_panel=SERVICE)] = "text",
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API.

    Without anything it serves the embedded model: on 4 cores or more with a prefill, a decode and a cache process, on
    fewer with one hybrid instance.

        tripool serve                                       the embedded model on port 8000
        tripool serve --prefill 1 --decode 1 --cache 1      three pools
        tripool serve ./DeepSeek-V2-Lite                    a checkpoint
        tripool serve deployment.toml --port 9000           a file, and one thing changed

    Members may also be started one by one, on this or another machine:

        tripool serve --accept-members tcp://0.0.0.0:7000 --cluster-key-file key
        tripool serve --role decode --join tcp://gateway-host:7000 --cluster-key-file key

    Ctrl-C or SIGTERM ends it in order: running answers finish first. A second one ends it at once.
    """
    set_up_logs("launcher", log_level, log_format)
    if named is not None and named.endswith(".toml"):
        if config is not None:
            raise ConfigError(f"two deployments are named: {named} and --config {config}; leave one out")
        config, named = Path(named), None
    if named is not None:
        if given.get("model") not in (None, named):
            raise ConfigError(f"two models are named: {named} and --model {given['model']}; leave one out")
        given["model"] = named
    if role is not None:
        _prepare_role(given, role, join)
    elif join is not None:
        raise ConfigError("--join needs --role: which kind of member is to join? (prefill, decode or hybrid)")
    deployment = read_deployment(config, given, usable_cores())
    if show_config:
        out.print(show_deployment(deployment), markup=False, end="")
        return
    key = read_cluster_key(cluster_key_file) if cluster_key_file else ""
    if deployment.gateway.join and not key:
        raise ConfigError("--accept-members lets other machines in; give them and this one the same --cluster-key-file")
    options = LaunchOptions(restart=restart, record_dir=str(record or ""), log_level=log_level, log_format=log_format,
                            cluster_key=key, metrics_port=metrics_port)
    if record is not None:
        try:
            record.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--record is {record}, which cannot be made: {error.strerror}") from error
    if role is not None and join is not None:
        _run_member(deployment, role, join, name, options)
    else:
        _run_fleet(deployment, options)


def _run_fleet(deployment: Deployment, options: LaunchOptions) -> None:
    with ended_by_signals() as fleets, launch(deployment, options) as fleet:
        fleets.append(fleet)
        try:
            wait_ready(fleet)
            _greet(fleet)
            fleet.wait()
        except Stopped:
            err.print(f"ending; running answers have up to {deployment.shutdown_s:g} s")


def _run_member(deployment: Deployment, role: str, join: str, name: str | None, options: LaunchOptions) -> None:
    """Start one instance whose gateway is elsewhere. It dials; nothing here has to be reachable but its blocks."""
    member = name or f"{role}-{socket.gethostname().split('.')[0]}-{secrets.token_hex(2)}"
    deployment, _ = resolve(deployment)
    config: InstanceConfig = getattr(deployment, role)
    with ended_by_signals() as fleets, Fleet(deployment, "", restart=options.restart) as fleet:
        fleets.append(fleet)
        fleet.start(ProcessSpec(
            member, role, deployment, str(fleet.runtime_dir), join, {},
            threads_per_rank(deployment, config, usable_cores()), options.cluster_key,
            f"{options.record_dir}/{member}" if options.record_dir else "", options.log_level, options.log_format,
            options.metrics_port, os.getpid()))
        err.print(f"{member} joins {join}; Ctrl-C ends it")
        try:
            fleet.wait()
        except Stopped:
            err.print(f"{member} takes no more work and ends")


@contextmanager
def ended_by_signals() -> Iterator[list[Fleet]]:
    """The first SIGINT or SIGTERM raises `Stopped` in the main thread; the second ends the given fleets at once."""
    fleets: list[Fleet] = []
    told = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if told:
            for fleet in fleets:
                fleet.kill()
            raise SystemExit(128 + number)
        told = True
        raise Stopped

    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield fleets
    except Stopped:
        pass                # it came while processes were still being started; they are gone already
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def wait_ready(fleet: Fleet) -> None:
    """Show what a starting fleet does until it takes requests."""
    with loading("starting") as show:
        fleet.wait_ready(fleet.deployment.load_deadline_s, lambda text: show(*health_words(text)))


def health_words(text: str) -> tuple[str, float]:
    """What a health page says, for people, and how much of the weights is there."""
    try:
        page = json.loads(text)
        return str(page["cause"] or page["status"]), float(page["load_fraction"])
    except (ValueError, KeyError, TypeError):
        return text.strip() or "starting", 0.0


def _greet(fleet: Fleet) -> None:
    model = fleet.deployment.model.served_name or Path(fleet.deployment.model.path).name
    members = ", ".join(fleet.pids)
    err.print(f"[bold]{model}[/bold] is served at [bold]{fleet.url}/v1[/bold]  ({members})")
    url = "" if fleet.deployment.gateway.port == 8000 else f" --url {fleet.url}"
    err.print(f"  tripool chat{url}    talk to it      tripool top{url}    watch the pools      Ctrl-C    end")


def _prepare_role(given: dict[str, Any], role: str, join: str | None) -> None:
    if role not in ROLES:
        raise ConfigError(f"--role is {role!r}; known are {', '.join(ROLES)}")
    if not join:
        raise ConfigError("--role starts one member; say with --join which gateway it belongs to")
    if any(given.get(each) is not None for each in (*ROLES, "cache")):
        raise ConfigError("--role starts one member; leave out --prefill, --decode, --hybrid and --cache")
    given.update({"hybrid": 1} if role == "hybrid" else {"prefill": 1, "decode": 1})


def read_cluster_key(path: Path) -> str:
    """The secret of a cluster, as hex: a digest of the file, so that any text will do.

    Raises:
        ConfigError: unreadable, too short, or readable by others.
    """
    try:
        secret, mode = path.read_bytes().strip(), path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"cannot read the cluster key {path}: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{path} can be read by others; chmod 600 {path}")
    if len(secret) < KEY_BYTES:
        raise ConfigError(f"{path} holds {len(secret)} bytes; a cluster key needs at least {KEY_BYTES} "
                          f"(for example: head -c 32 /dev/urandom | base64 > {path})")
    return hashlib.blake2b(secret, digest_size=32, person=b"tripool-cluster").hexdigest()

