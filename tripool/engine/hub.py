"""A model by name: a folder on this machine, or a hub id whose files are fetched once and kept.

Only weights in safetensors, configurations and tokenizer files are fetched; pickled weights and code never are. An
interrupted download is taken up where it stopped. The hub's client decides where its cache is and how it reaches
the hub; this file decides what is asked for and says in one sentence what went wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import huggingface_hub  # whole: it loads its parts when they are used, and most models are folders

from tripool.core.errors import ConfigError

WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
UNWANTED = ("*/*",)           # copies in other formats lie in folders of their own
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def model_folder(model: str, revision: str | None = None, *, endpoint: str | None = None, cache: Path | None = None,
                 token: str | None = None, notify: Callable[[str], None] = lambda text: None) -> Path:
    """The folder of a model, downloaded first when `model` is a hub id.

    `revision` is a commit, tag or branch; without one the newest commit is taken and `notify` tells which.

    Raises:
        ConfigError: no such folder, model or revision, or the hub cannot be reached.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise ConfigError(f"model is {model}, which is a file; give the folder that holds config.json and the weights")
    if not HUB_ID.fullmatch(model):
        raise ConfigError(f"model is {model}; there is no such folder, and a hub id looks like owner/name")
    notify(f"fetching {model}{f' at {revision}' if revision else ''}")
    try:
        found = huggingface_hub.snapshot_download(
            model, revision=revision, endpoint=endpoint, cache_dir=cache, token=token,
            allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED))
    except huggingface_hub.errors.GatedRepoError as error:
        raise ConfigError(f"model {model} asks for its terms to be accepted: open its page on the hub, accept them, "
                          "and log in with `hf auth login`") from error
    except huggingface_hub.errors.RevisionNotFoundError as error:
        raise ConfigError(f"model {model} has no revision {revision}") from error
    except huggingface_hub.errors.RepositoryNotFoundError as error:
        raise ConfigError(f"the hub has no model {model}, or only for those who log in; "
                          "there is no folder of that name either") from error
    except (huggingface_hub.errors.LocalEntryNotFoundError, huggingface_hub.errors.IncompleteSnapshotError) as error:
        raise ConfigError(f"model {model} is not here in full and the hub cannot be reached; connect, or give a folder "
                          f"that holds it ({_first_line(error)})") from error
    except huggingface_hub.errors.HfHubHTTPError as error:
        raise ConfigError(f"the hub refused {model}: {_first_line(error)}") from error
    except OSError as error:
        raise ConfigError(f"model {model} could not be stored: {error}; the next start goes on from there") from error
    except Exception as error:        # the client's transport has errors of its own, which it does not name as its API
        raise ConfigError(f"model {model} could not be fetched in full: {_first_line(error)}; the next start goes on "
                          "from there") from error
    path = Path(found)
    if not revision:
        notify(f"{model} is at commit {path.name}; `--revision {path.name}` keeps it there")
    return path


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
