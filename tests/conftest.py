"""How properties are searched: anew on every machine, and the same way each time in CI, where a verdict must repeat."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, settings

# The suite that every directory is held to is imported by the tests of each: its assertions explain themselves, too.
pytest.register_assert_rewrite("tests.directory.contract")

# What is slow on a busy machine is no fault of a property.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeat", settings.get_profile("search"), derandomize=True)
settings.load_profile("repeat" if os.environ.get("CI") else "search")


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Garbage may be collected while a text is read to the depth where nothing can be called any more.

    A finalizer that fails there, such as an event loop's of an earlier test, is no fault of the test that read it.
    """
    said = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, RecursionError):
            said(unraisable)

    sys.unraisablehook = hook


CERTIFICATE_END = "-----END CERTIFICATE-----\n"


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clients of HTTP trust one authority: each of hundreds would read the world's 120, which takes 0.1 s."""
    path = tmp_path_factory.mktemp("authority") / "one.pem"
    path.write_text(Path(certifi.where()).read_text().partition(CERTIFICATE_END)[0] + CERTIFICATE_END)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(certifi, "where", lambda: str(path))
        yield
