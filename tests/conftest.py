"""What every test shares: one arithmetic thread, quiet libraries, reproducible examples.

It is set before torch is loaded and is inherited by the processes that tests start. Torch itself is not imported
here, so that the tests of the control plane start at once.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.pop("COLUMNS", None)            # of whoever starts the tests; each says how wide its screen is

# On a shared machine an example may take any time, so time is no failure; on CI the examples are the same every time.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("house-ci", settings.get_profile("house"), derandomize=True, database=None, print_blob=True)
settings.load_profile("house-ci" if os.environ.get("CI") else "house")


@pytest.fixture(scope="session", autouse=True)
def weights_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where commands that tests run keep packed weights, also in processes of their own: not in the user's cache."""
    folder = tmp_path_factory.mktemp("weights-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIPOOL_WEIGHTS_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def gradual_underflow() -> Iterator[None]:
    """Engines flush the smallest numbers to zero in their thread; the next test computes as usual again."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parents[1]
