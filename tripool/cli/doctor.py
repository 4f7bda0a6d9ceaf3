"""`tripool doctor`: what this machine has, what would be used of it, and whether a model fits.

Whether a model fits is reckoned, not tried: from the checkpoint's headers (no weight is read) or, where only a
`config.json` is there, from the shape alone. The sums are those that loading will need: weights in the numbers the
model is computed in (those that are packed once for the host, as its members map them), the block cache of every rank,
the memory through which ranks exchange rows, the pool, and what a Python process with PyTorch takes.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import huggingface_hub
import typer
from rich.table import Table

from tripool import __version__
from tripool.cli.flags import read_deployment, show_bytes, takes_flags
from tripool.cli.screen import out
from tripool.core.deployment import Deployment, InstanceConfig, ModelConfig
from tripool.core.errors import CheckpointError, ConfigError
from tripool.core.messages import ROLES
from tripool.core.placement import Placement, initial_placement, lie_side_by_side
from tripool.core.shape import ModelShape, model_shape
from tripool.engine.element_type import element_type, keeps_weights, rounds_rows, warnings_of
from tripool.engine.hub import HUB_ID
from tripool.engine.memory import SETTING, setting, share_in_large_pages
from tripool.engine.model.layout import check_mtp, weight_plan
from tripool.engine.model.stored import ITEM_BYTES, as_stored, held_bytes
from tripool.engine.ops.levels import explained, level_here
from tripool.engine.parallel.segment import exchange_geometry
from tripool.engine.quantisation import Quantisation, read_quantisation
from tripool.pool.arena import available_memory_bytes
from tripool.serve.budget import blocks_per_rank, threads_per_rank, usable_cores
from tripool.serve.models import expert_geometry, resolve_model

COMPUTED = ("float32", "bfloat16", "float16")
KERNEL_DTYPES = COMPUTED[:2]            # of rows that kernels for stored weights take
STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "fp8": "F8_E4M3", "compressed-tensors": "I8"}
PROCESS_BYTES = 256 << 20          # of a process with PyTorch before weights; 230 MB resident were measured with 2.13
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")
PACKAGES = ("torch", "transformers", "starlette", "uvicorn", "uvloop", "msgspec", "numpy", "safetensors", "tokenizers",
            "huggingface_hub")
TRIED_BYTES = 32 << 20             # to see whether memory comes in large pages
OPEN_FILES = 1024                  # the fewest that a busy server needs


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is."""

    system: str
    cpu: str
    features: list[str]
    operations: str                     # level at which compiled operations run, and why not a higher one
    cores: int
    memory_bytes: int
    free_bytes: int
    shared_memory_bytes: int | None     # of /dev/shm; the pools' own memory is not in it but counts as memory
    large_pages: str                    # when the kernel gives them: always, madvise or never
    large_page_share: float             # of memory that asked for them, when it was tried
    open_files: int
    accelerators: list[str]
    versions: dict[str, str]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """What is kept on disk so that a start need not pack weights."""

    folder: str                         # empty: none are kept
    kept_bytes: int
    free_bytes: int                     # of its disk


@dataclass(frozen=True, slots=True)
class Exchange:
    """Shared memory through which the ranks of one instance exchange rows."""

    ranks: int
    tokens: int                         # of a rank that one exchange takes; larger batches go in rounds
    dispatch_bytes: int                 # received by one rank; each buffer is there twice
    combine_bytes: int
    total_bytes: int                    # of all ranks, with flags

    @property
    def rank_bytes(self) -> int:
        return 2 * (self.dispatch_bytes + self.combine_bytes)


@dataclass(frozen=True, slots=True)
class Need:
    """Memory of the members of one role, each."""

    role: str
    count: int
    weight_bytes: int                   # of all its ranks, in memory of their own
    cache_bytes: int
    process_bytes: int
    exchange: Exchange | None = None    # None: nothing crosses ranks through shared memory

    @property
    def all_bytes(self) -> int:
        exchange_bytes = self.exchange.total_bytes if self.exchange else 0
        return self.count * (self.weight_bytes + self.cache_bytes + self.process_bytes + exchange_bytes)


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a model fits, and the sums."""

    model: str
    dtype: str
    params: int
    active_params: int
    stored_bytes: int | None            # in the folder; None if only its shape is known
    token_cache_bytes: int              # of one token in the cache
    max_model_len: int
    mapped_bytes: int                   # of packed weights, which are in memory once for all who map them
    needs: list[Need]
    free_bytes: int
    problems: list[str]
    notes: list[str]

    @property
    def needed_bytes(self) -> int:
        return self.mapped_bytes + sum(need.all_bytes for need in self.needs)


@takes_flags()
def doctor(
    given: dict[str, Any],
    config: Annotated[Path | None, typer.Option(help="A deployment in TOML; flags win over it.",
                                                show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for other programs.")] = False,
) -> None:
    """Say what this machine has and what would be used; with --model, whether that model fits and why not.

        tripool doctor
        tripool doctor --model ./DeepSeek-V2-Lite
        tripool doctor --model ./config.json --hybrid 1 --max-model-len 4096

    Takes the flags of `tripool serve`: what they ask for is what is reckoned. Ends with code 1 if it does not fit.
    """
    machine = examine()
    deployment = read_deployment(config, given, machine.cores)
    packed = packed_weights(deployment.model.packed_root)
    fit, unusable = None, None
    try:
        fit = reckon(deployment, machine.free_bytes)
    except (CheckpointError, ConfigError) as error:
        if not deployment.model.path and not (deployment.model.tokenizer or deployment.model.chat_template):
            unusable = f"the embedded model is not here: {error}"
        else:
            unusable = str(error)
    if as_json:
        fit_values = {**asdict(fit), "needed_bytes": fit.needed_bytes} if fit else None
        out.print(json.dumps({"machine": asdict(machine), "members": members(deployment, machine.cores),
                              "packed_weights": asdict(packed),
                              "fit": fit_values, "unusable": unusable}, indent=1), markup=False)
    else:
        show_machine(machine)
        show_members(deployment, machine.cores)
        show_packed(packed)
        if fit is not None:
            show_fit(fit)
        if unusable is not None:
            out.print(f"\n{unusable}", style="red", markup=False)
    if unusable is not None or (fit is not None and fit.problems):
        raise typer.Exit(1)


# ------------------------------------------------------------------------------- the machine


def examine() -> Machine:
    """Look at the machine."""
    cpu, flags = read_cpu(Path("/proc/cpuinfo"))
    soft_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    shared = Path("/dev/shm")
    notes = []
    if platform.system() != "Linux":
        notes.append("serving needs Linux; simulate, plan and the control plane run here")
    elif platform.machine() not in ("x86_64", "AMD64"):
        notes.append(f"serving is tested on x86-64; this is {platform.machine()}")
    if soft_files < OPEN_FILES:
        notes.append(f"only {soft_files} open files are allowed; raise it (ulimit -n {OPEN_FILES * 4})")
    level = level_here()
    if level < 1:
        notes.append("models are computed several times slower than with vector instructions: native operations are "
                     f"{explained(level)}")
    if not hasattr(os, "memfd_create"):
        notes.append("memfd_create is missing; instances cannot share cache memory")
    share = share_in_large_pages(TRIED_BYTES)
    if share < 0.5 and platform.system() == "Linux":
        notes.append(f"weights would be in small pages, which is slower; {remedy(setting())}")
    return Machine(
        f"{platform.system()} {platform.release()} {platform.machine()}", cpu,
        [name for name in CPU_FEATURES if name in flags], explained(level), usable_cores(),
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), available_memory_bytes(),
        shutil.disk_usage(shared).total if shared.exists() else None, setting(), share, soft_files,
        accelerators(Path("/dev")), {"tripool": __version__, "python": platform.python_version(), **versions()}, notes)


def remedy(large_pages: str) -> str:
    """What helps where memory does not come in large pages."""
    if large_pages in ("always", "madvise"):
        return "the kernel found no memory in one piece (more of it free, or a restart, helps)"
    return f"allow large ones (echo madvise > {SETTING})"


def read_cpu(path: Path) -> tuple[str, set[str]]:
    """The processor's name and features, as the kernel tells them."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    if not path.exists():
        return name, flags
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() == "flags":
            return name, set(value.split())
    return name, flags


def accelerators(devices: Path) -> list[str]:
    """Devices that the kernel shows. Whether PyTorch can use them is seen when it is told to."""
    found = [path.name for pattern in ("nvidia[0-9]*", "davinci[0-9]*") for path in sorted(devices.glob(pattern))]
    return found + (["kfd"] if (devices / "kfd").exists() else [])


def versions() -> dict[str, str]:
    """Installed packages that matter."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def packed_weights(root: Path | None) -> PackedWeights:
    """Look at the folder of packed weights, which may not be there yet."""
    if root is None:
        return PackedWeights("", 0, 0)
    kept = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    disk = next(each for each in (root.absolute(), *root.absolute().parents) if each.exists())
    return PackedWeights(str(root), kept, shutil.disk_usage(disk).free)


def members(deployment: Deployment, cores: int) -> list[dict[str, Any]]:
    """What would be started: role, count, ranks and threads."""
    rows: list[dict[str, Any]] = []
    for role in ROLES:
        config: InstanceConfig = getattr(deployment, role)
        if config.count:
            rows.append({"role": role, "count": config.count, "ranks": config.ranks,
                         "threads": threads_per_rank(deployment, config, cores)})
    if deployment.cache.count:
        rows.append({"role": "cache", "count": deployment.cache.count, "ranks": 1, "threads": 1})
    return rows


# ------------------------------------------------------------------------------- a model


def reckon(deployment: Deployment, free_bytes: int) -> Fit:
    """Whether a deployment's model fits into some memory.

    Raises:
        CheckpointError: the folder cannot be used; every problem is listed.
        ConfigError: there is no such model, or a setting is wrong.
    """
    found = read_model(deployment)
    shape = found.shape
    model = deployment.model
    stays = keeps_weights(found.quantisation.method)
    dtype = element_type(found.dtype, shape, model.dtype, deterministic=model.deterministic, device=model.device,
                         stays=stays)
    max_model_len = deployment.model.max_model_len or shape.max_position
    block_bytes = shape.block_elements(deployment.block_tokens) * ITEM_BYTES[dtype]
    problems = []
    if max_model_len > shape.max_position:
        problems.append(f"max_model_len is {max_model_len}, but the model knows {shape.max_position} positions")
    needs: list[Need] = []
    mapped: dict[bool, int] = {}
    for role in ROLES:
        config: InstanceConfig = getattr(deployment, role)
        if not config.count:
            continue
        try:
            blocks = blocks_per_rank(shape, deployment, config, block_bytes, max_model_len, free_bytes)
        except ConfigError as error:
            problems.append(f"{role}: {error}")
            blocks = -(-max_model_len // deployment.block_tokens) + 1
        exchange = placement = None
        try:
            if config.num_speculative_tokens:
                check_mtp(shape)
            if shape.num_routed_experts:
                placement = initial_placement(expert_geometry(shape, config), 1)
                exchange = exchange_of(shape, config, placement, dtype)
        except ConfigError as error:
            problems.append(f"{role}: {error}")
        if exchange is not None and exchange.total_bytes > free_bytes:
            problems.append(f"{role}: the exchange between ranks alone takes {show_bytes(exchange.total_bytes)} of "
                            f"shared memory, and {show_bytes(free_bytes)} are free; lower --exchange-tokens (now "
                            f"{exchange.tokens}) or --dp-size")
        weights = weights_of(found, config, placement, dtype, model)
        form = config.shared_expert_copies > 0              # in one file, with the routed experts, or not
        mapped[form] = max(mapped.get(form, 0), weights.mapped)
        needs.append(Need(role, config.count, weights.own, blocks * block_bytes * config.ranks,
                          PROCESS_BYTES * config.ranks, exchange))
    if deployment.cache.count:
        needs.append(Need("cache", deployment.cache.count, 0, deployment.cache.bytes, 0))
    rounding = ("rows are rounded to bfloat16 for products with weights of this type, which is faster here; "
                "--dtype float32 leaves them as they are" if dtype == "float32" and rounds_rows(
                    found.dtype, model.dtype, deterministic=model.deterministic, device=model.device) else "")
    token_bytes = shape.num_cached_layers * shape.entry_width * ITEM_BYTES[dtype]
    fit = Fit(found.name, dtype, shape.params(mtp=True), shape.params(active=True), found.stored_bytes, token_bytes,
              max_model_len, sum(mapped.values()), needs, free_bytes, problems,
              [*warnings_of(dtype, model.device), *([rounding] if rounding else [])])
    if fit.needed_bytes > free_bytes:
        is_kept = stays and found.dtype == "bfloat16" and level_here() >= 0
        problems.append(why_not(fit, deployment, is_widened=dtype == "float32" and not is_kept))
    return fit


def exchange_of(shape: ModelShape, config: InstanceConfig, placement: Placement, dtype: str) -> Exchange | None:
    """What an instance's ranks need to exchange rows through shared memory; None if they do not.

    Raises:
        ConfigError: ranks or tokens are more than an exchange takes.
    """
    if config.how_to_exchange != "direct":
        return None
    geometry = exchange_geometry(shape, config, placement, dtype)
    dispatch_bytes, combine_bytes = geometry.receive_bytes
    return Exchange(geometry.num_ranks, geometry.capacity, dispatch_bytes, combine_bytes, geometry.total_bytes)


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a model before it is loaded."""

    name: str
    shape: ModelShape
    dtype: str                          # to compute in, unless told otherwise
    quantisation: Quantisation
    stored_bytes: int | None
    dtypes: Mapping[str, str] = field(default_factory=dict)        # of all tensors, if they are known

    def dtype_of(self, tensor: str) -> str:
        """The element type in which a tensor is stored."""
        if self.dtypes:
            return self.dtypes[tensor]
        method = self.quantisation.method
        return STORED[method if method and self.quantisation.covers(tensor) else self.dtype]


def read_model(deployment: Deployment) -> Found:
    """Look at the model: at a checkpoint's headers, or only at a `config.json`, of a hub id too.

    Raises:
        CheckpointError: the folder cannot be used; every problem is listed.
        ConfigError: there is no such model.
    """
    model = deployment.model
    path = Path(model.path).expanduser()
    if model.path and path.is_file():
        return _read_config(path, f"{path} (no weights here)")
    if model.path and not path.is_dir() and HUB_ID.fullmatch(model.path):
        return _read_config(_fetch_config(model.path, model.revision), f"{model.path} (not fetched)")
    if model.path and (path / "config.json").is_file() and not any(path.glob("*.safetensors*")):
        return _read_config(path / "config.json", f"{path} (no weights here)")
    resolved, checkpoint = resolve_model(model)
    return Found(resolved.served_name, checkpoint.shape, checkpoint.dtype, checkpoint.quantisation,
                 checkpoint.stored_bytes, {name: stored.dtype for name, stored in checkpoint.tensors.items()})


def _read_config(file: Path, name: str) -> Found:
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file} as a model's config.json: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is not a model's config.json")
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    return Found(name, model_shape(config), dtype if dtype in COMPUTED else "bfloat16", read_quantisation(config), None)


def _fetch_config(hub_id: str, revision: str | None) -> Path:
    """The few bytes that say how large a model is; its weights stay where they are."""
    try:
        return Path(huggingface_hub.hf_hub_download(hub_id, "config.json", revision=revision))
    except Exception as error:        # the client's transport has errors of its own, which it does not name as its API
        raise ConfigError(f"{hub_id} is no folder here, and its config.json could not be fetched from the hub: "
                          f"{str(error).strip().partition(chr(10))[0]}") from error


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Where the weights of an instance are."""

    own: int                            # of all its ranks, in memory of their own
    mapped: int = 0                     # in files of packed weights; the same for every instance that maps them


def weights_of(found: Found, config: InstanceConfig, placement: Placement | None, dtype: str,
               model: ModelConfig) -> WeightBytes:
    """Each rank holds all but the routed experts, and those of its expert slots; without a placement, of an instance
    that cannot be, each expert is held once.

    What is packed is mapped by all. A rank has copies of experts that do not lie side by side, and with redundant
    experts it comes to have copies of all, because they move.
    """
    shape = found.shape
    plan, is_mapped = weight_plan(shape), False
    if not model.on_accelerator and dtype in KERNEL_DTYPES:
        floats = dtype == "float32" and level_here() >= 0
        plan = as_stored(plan, found, floats=floats, shared_in_slots=config.shared_expert_copies > 0)
        is_mapped = (model.packed_root is not None and model.load_format != "dummy" and level_here() >= 0
                     and (floats or any(spec.dtype == "int8" for spec in plan)))
    experts, shared, rest = 0, 0, 0
    for spec in plan:
        size = held_bytes(spec, dtype)
        if ".experts." in spec.name:
            experts += size
        elif ".shared." in spec.name and config.shared_expert_copies:
            shared += size                         # in slots, and not on every rank
        else:
            rest += size
    sizes = [experts // max(1, shape.num_routed_experts)] * shape.num_routed_experts + [shared]
    held = [placement.held_by(rank, 0) for rank in range(placement.num_ranks)] if placement else [range(len(sizes))]
    if not is_mapped:
        return WeightBytes(config.ranks * rest + sum(sizes[expert] for each in held for expert in each if expert >= 0))
    own, in_place = 0, set[int]()
    for each in held:
        if config.redundant_experts or not lie_side_by_side(each):
            own += sum(sizes[expert] for expert in each if expert >= 0)
        else:
            in_place.update(each)
    return WeightBytes(own, rest + sum(sizes[expert] for expert in in_place))


def why_not(fit: Fit, deployment: Deployment, *, is_widened: bool) -> str:
    """What is too large, and what to change. `is_widened`: weights take four bytes each."""
    weights = fit.mapped_bytes + sum(need.count * need.weight_bytes for need in fit.needs)
    if weights > fit.free_bytes:
        remedy = f"its weights alone take {show_bytes(weights)}"
        instances = sum(need.count for need in fit.needs if need.role != "cache")
        if instances > 1 and not fit.mapped_bytes and weights / instances < fit.free_bytes:
            remedy += f" in {instances} instances; --hybrid 1 needs them once"
        elif is_widened and weights / 2 < fit.free_bytes and not deployment.model.deterministic:
            remedy += "; --dtype bfloat16 halves them, for a slower engine"
        else:
            remedy += "; it needs a larger machine, or more of them"
    else:
        remedy = ("the weights fit; lower --max-model-len, --max-num-seqs, --kv-cache-memory-bytes or --pool-bytes, or "
                  "start fewer members")
    return f"{show_bytes(fit.needed_bytes)} are needed and {show_bytes(fit.free_bytes)} are free: {remedy}"


# ------------------------------------------------------------------------------- showing


def show_machine(machine: Machine) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("system", machine.system)
    table.add_row("processor", f"{machine.cpu}, {machine.cores} cores usable")
    table.add_row("features", " ".join(machine.features) or "none of interest")
    table.add_row("operations", machine.operations)
    table.add_row("memory", f"{show_bytes(machine.memory_bytes)}, {show_bytes(machine.free_bytes)} free")
    shared = "none" if machine.shared_memory_bytes is None else show_bytes(machine.shared_memory_bytes)
    table.add_row("shared memory", f"{shared} in /dev/shm (not used: cache memory is anonymous)")
    table.add_row("large pages", f"{machine.large_pages or 'unknown'}; {machine.large_page_share:.0%} of "
                                 f"{show_bytes(TRIED_BYTES)} came in them")
    table.add_row("open files", str(machine.open_files))
    table.add_row("accelerators", ", ".join(machine.accelerators) or "none; --device cpu")
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items()))
    out.print(table)
    for note in machine.notes:
        out.print(f"note: {note}", style="yellow", markup=False)


def show_members(deployment: Deployment, cores: int) -> None:
    words = []
    for each in members(deployment, cores):
        threads = "" if each["role"] == "cache" else f", {each['threads']} thread(s) per rank"
        ranks = f", {each['ranks']} ranks" if each["ranks"] > 1 else ""
        words.append(f"{each['count']} {each['role']}{ranks}{threads}")
    out.print(f"\nwould be started: {'; '.join(words)}")


def show_packed(packed: PackedWeights) -> None:
    if packed.folder:
        out.print(f"packed weights: {show_bytes(packed.kept_bytes)} in {packed.folder} (may be removed at any time), "
                  f"{show_bytes(packed.free_bytes)} free there", markup=False)
    else:
        out.print("packed weights: not kept, each start packs them")


def show_fit(fit: Fit) -> None:
    stored = "" if fit.stored_bytes is None else f", {show_bytes(fit.stored_bytes)} stored"
    out.print(f"\n{fit.model}: {show_count(fit.params)} parameters with MTP, {show_count(fit.active_params)} used per "
              f"token{stored}; computed in {fit.dtype}", markup=False)
    out.print(f"cache: {show_bytes(fit.token_cache_bytes)} per token, up to {fit.max_model_len} tokens per request")
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("role", "members", "weights", "cache", "process", "exchange", "in all"):
        table.add_column(column, justify="left" if column == "role" else "right")
    for need in fit.needs:
        table.add_row(need.role, str(need.count), show_bytes(need.weight_bytes), show_bytes(need.cache_bytes),
                      show_bytes(need.process_bytes), show_bytes(need.exchange.total_bytes) if need.exchange else "-",
                      show_bytes(need.all_bytes))
    if fit.mapped_bytes:
        table.add_row("mapped, once", "", show_bytes(fit.mapped_bytes), "", "", "", show_bytes(fit.mapped_bytes))
    table.add_row("all", "", "", "", "", "", show_bytes(fit.needed_bytes))
    out.print(table)
    for need in fit.needs:
        if need.exchange is not None:
            each = need.exchange
            out.print(f"exchange of {need.role}: {each.tokens} tokens of a rank at a time; buffers of each of "
                      f"{each.ranks} ranks: {show_bytes(each.dispatch_bytes)} for dispatch and "
                      f"{show_bytes(each.combine_bytes)} for combine, both twice, {show_bytes(each.rank_bytes)}; "
                      f"{show_bytes(each.total_bytes)} of shared memory in all")
    for note in fit.notes:
        out.print(f"note: {note}", style="yellow", markup=False)
    if fit.problems:
        for problem in fit.problems:
            out.print(f"does not fit: {problem}", style="red", markup=False)
    else:
        out.print(f"fits: {show_bytes(fit.needed_bytes)} of {show_bytes(fit.free_bytes)} free", style="green")


def show_count(count: int) -> str:
    """A number of parameters for people."""
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
