"""How properties are searched: anew on every machine, and the same way each time in CI, where a verdict must repeat."""

import os

from hypothesis import settings

settings.register_profile("search", deadline=None)
settings.register_profile("repeat", deadline=None, derandomize=True)
settings.load_profile("repeat" if os.environ.get("CI") else "search")
