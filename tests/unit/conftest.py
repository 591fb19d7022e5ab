"""Unit tests run the eager path, which needs no compiler, unless DECODELAB_PATH says otherwise or a test asks for "fast"."""

import os

import pytest


@pytest.fixture(autouse=True, scope="module")
def eager_by_default():
    """For these tests only: notebooks that run after them in the same process choose for themselves."""
    with pytest.MonkeyPatch.context() as patch:
        if "DECODELAB_PATH" not in os.environ:
            patch.setenv("DECODELAB_PATH", "eager")
        yield
