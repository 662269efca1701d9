"""The routers that warmroute is measured beside: installed with pip, at fixed versions, each in its own environment.

python -m bench.peers        installs them, below $XDG_CACHE_HOME/warmroute/peers or ~/.cache/warmroute/peers
"""

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

INSTALL_TIMEOUT_S = 600.0
_COMPLETE = "complete"


class PeerUnavailable(Exception):
    """A peer can't be installed; the message says what pip said."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A package and the version that figures are published for."""

    package: str
    version: str

    @property
    def folder(self) -> Path:
        """Its environment. Interpreters differ in what they can share, so the version is in the name."""
        python = f"py{sys.version_info.major}{sys.version_info.minor}"
        return peers_folder() / f"{self.package}-{self.version}-{python}"

    def installed(self) -> Path:
        """The environment's `bin`, after installing it where it isn't there. Raises `PeerUnavailable`."""
        folder = self.folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / _COMPLETE).exists():
                self._install(folder)
        return folder / "bin"

    def _install(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"{self.package}=={self.version}"]
        try:
            done = subprocess.run(pip, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise PeerUnavailable(f"{self.package}: pip didn't end in {INSTALL_TIMEOUT_S:g} s") from None
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["nothing"]
            raise PeerUnavailable(f"{self.package} {self.version} can't be installed; pip says: {said[-1]}")
        (folder / _COMPLETE).touch()


SGLANG_ROUTER = Peer("sglang-router", "0.3.2")
VLLM_ROUTER = Peer("vllm-router", "0.1.17")
PEERS = (SGLANG_ROUTER, VLLM_ROUTER)


def peers_folder() -> Path:
    """Where the environments lie: `$XDG_CACHE_HOME/warmroute/peers`, or below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "warmroute" / "peers"


def main() -> int:
    """Install all; 2 where one can't be."""
    try:
        for peer in PEERS:
            print(f"{peer.package} {peer.version}: {peer.installed()}", flush=True)
    except PeerUnavailable as error:
        print(f"bench.peers: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
