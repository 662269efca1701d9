"""`python -m nodeagent.engines.vllm.package FOLDER`: the engine's side alone, under one import name.

Writes `FOLDER/warmroute_engine/`: what an engine's process imports, and nothing else, with imports renamed, so that
names as general as `directory` or `gateway` can't shadow anything in the engine's environment. It needs msgspec and
xxhash there.
"""

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

NAME = "warmroute_engine"
SHARED = {
    "directory": ("chunks", "costs", "errors", "hardware", "identity", "tiers"),
    "nodeagent": (
        "arena_map",
        "client",
        "engine_hello",
        "errors",
        "labels",
        "link",
        "messages",
        "old_arenas",
        "opened_chunk",
    ),
}
VLLM = (
    "chunk_transfers",
    "connector",
    "content_digest",
    "description",
    "launch_arguments",
    "loaded_files",
    "offloading_spec",
    "promises",
    "secondary_tier",
    "settings",
    "staging_file",
    "tokenizer_in_use",
    "weight_changes",
)
ENTRY = f'''"""What a launch line of vLLM names."""

from {NAME}.nodeagent.engines.vllm.connector import WarmrouteConnector

__all__ = ["WarmrouteConnector"]
'''
ROOT = Path(__file__).parents[3]
_IMPORT = re.compile(r"^(\s*(?:from|import) )(directory|nodeagent)\b", re.MULTILINE)


def build(folder: Path) -> Path:
    """Write the package anew below `folder` and return where it is. Raises `OSError`."""
    target = folder / NAME
    shutil.rmtree(target, ignore_errors=True)
    sources = [(ROOT / top, Path(top), names) for top, names in SHARED.items()]
    sources.append((Path(__file__).parent, Path("nodeagent/engines/vllm"), VLLM))
    for source, place, names in sources:
        for name in names:
            _write(target / place / f"{name}.py", renamed((source / f"{name}.py").read_text("utf-8")))
    for inner in [target, *(path for path in target.rglob("*") if path.is_dir())]:
        _write(inner / "__init__.py", f'"""Part of {NAME}: warmroute as an engine\'s process imports it."""\n')
    _write(target / "vllm.py", ENTRY)
    return target


def renamed(text: str) -> str:
    """A module's text with its imports of ours under the package's name."""
    return _IMPORT.sub(rf"\g<1>{NAME}.\g<2>", text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build into the folder named; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1:
        print("usage: python -m nodeagent.engines.vllm.package FOLDER", file=sys.stderr)
        return 2
    print(build(Path(given[0])))
    return 0


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


if __name__ == "__main__":
    sys.exit(main())
