"""How properties are searched: anew on every machine, and the same way each time in CI, where a verdict must repeat."""

import os

import pytest
from hypothesis import settings

# The suite that every directory is held to is imported by the tests of each: its assertions explain themselves, too.
pytest.register_assert_rewrite("tests.directory.contract")

settings.register_profile("search", deadline=None)
settings.register_profile("repeat", deadline=None, derandomize=True)
settings.load_profile("repeat" if os.environ.get("CI") else "search")
