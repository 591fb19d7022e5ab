"""Real servers on loopback, measured by `decodelab serve-check` and by their own histograms. Never part of `course.py test`.

    bash tests/peers/setup.sh FOLDER                               once, with the course's environment: 6 minutes, 4 GB
    DECODELAB_PEERS=FOLDER python -m pytest tests/peers -q -s      about 8 minutes, with nothing else running
    DECODELAB_PEERS_RECORD=1 ...                                   the same, and data/runs is written again

FOLDER then holds vllm/ and dynamo/, an environment each, and smollm2/, the lab model as they read it.
"""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collected only where the command names this folder or a file in it."""
    asked = [Path(str(argument).partition("::")[0]).resolve() for argument in config.invocation_params.args]
    return None if any(HERE in (path, *path.parents) for path in asked) else True


@pytest.fixture(scope="session")
def peers() -> Path:
    """The folder with the servers' environments."""
    if not (folder := os.environ.get("DECODELAB_PEERS")):
        pytest.skip("DECODELAB_PEERS names no folder: see tests/peers/conftest.py")
    return Path(folder)
