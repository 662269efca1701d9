"""`python -m tests.directory_servers.installation` installs Debian's Redis for `make test-directory`, once.

`apt-get` needs root. The packages' services aren't started: the tests start servers of their own, and a machine that
runs a Redis already keeps it as it is. Nothing is installed where the commands are there.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("redis-server", "redis-sentinel", "redis-tools")
COMMANDS = ("redis-server", "redis-sentinel", "redis-cli")
STEP_TIMEOUT_S = 240.0
TRIES_MAX = 2
"""Registries are remote: one repetition, with fresh lists, forgives a hiccup."""
SERVICE_POLICY = Path("/usr/sbin/policy-rc.d")
"""What Debian asks before a package's service is started; 101 forbids it. Containers mostly have one that does."""


class InstallationError(Exception):
    """What is missing, in one sentence for the user."""


def redis_server_binary() -> Path:
    """Where Debian's server is. Raises `InstallationError` where it isn't."""
    found = shutil.which("redis-server")
    if found is None:
        raise InstallationError("redis-server is missing; `make test-directory` installs it")
    return Path(found)


def install() -> None:
    """Make sure that the commands are there. Raises `InstallationError`."""
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if not missing:
        return
    wanted = f"{', '.join(missing)} missing (Debian's packages {', '.join(PACKAGES)})"
    if shutil.which("apt-get") is None:
        raise InstallationError(f"{wanted}, and there is no apt-get here to install them with.")
    if os.geteuid() != 0:
        raise InstallationError(f"{wanted}, and only root may install them: sudo apt-get install {' '.join(PACKAGES)}")
    with _services_stay_down():
        for tries_left in reversed(range(TRIES_MAX)):
            trouble = _apt("install", "-y", "-q", "--no-install-recommends", *PACKAGES)
            if not trouble:
                return
            if not tries_left:
                raise InstallationError(f"{wanted}, and apt-get can't install them: {trouble}")
            print(f"failed, trying once more with fresh lists ({trouble})", file=sys.stderr, flush=True)
            _apt("update", "-q")


def _apt(*words: str) -> str:
    """Nothing, or the last line that tells why it failed."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            ["apt-get", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            timeout=STEP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {STEP_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return ""
    lines = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()
    return lines[-1].strip()


@contextlib.contextmanager
def _services_stay_down() -> Iterator[None]:
    """Forbid the packages to start their services, where nobody has said yet what packages may do."""
    try:
        with SERVICE_POLICY.open("x") as policy:
            policy.write("#!/bin/sh\nexit 101\n")
    except FileExistsError:
        yield
        return
    try:
        SERVICE_POLICY.chmod(0o755)
        yield
    finally:
        SERVICE_POLICY.unlink(missing_ok=True)


def main() -> int:
    """Zero when the commands are there."""
    try:
        install()
    except (InstallationError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
