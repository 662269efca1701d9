"""What is shipped into an engine's image stands alone."""

import subprocess
import sys
from pathlib import Path

from nodeagent.engines.vllm.package import build, main, renamed


def test_imports_are_renamed_and_nothing_else_is() -> None:
    text = "from directory.tiers import Tier\nimport nodeagent.client\n# directory\nfrom directory_x import y\n"
    assert renamed(text) == (
        "from warmroute_engine.directory.tiers import Tier\nimport warmroute_engine.nodeagent.client\n"
        "# directory\nfrom directory_x import y\n"
    )


def test_the_package_imports_alone_and_only_itself(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 0
    assert main([]) == 2
    code = (
        "import sys, warmroute_engine.nodeagent.engines.vllm.chunk_transfers as t;"
        "import warmroute_engine.nodeagent.engines.vllm.description;"
        "tops = {name.split('.')[0] for name in sys.modules};"
        "ours = sorted(tops & {'directory', 'nodeagent', 'gateway', 'warmroute'});"
        "print(t.__file__, ours, sorted({'numpy', 'fastapi', 'redis', 'zmq', 'httpx'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.endswith("[] []\n"), done
    assert str(tmp_path / "warmroute_engine") in done.stdout


def test_building_again_leaves_nothing_of_before(tmp_path: Path) -> None:
    stale = build(tmp_path) / "stale.py"
    stale.write_text("")
    build(tmp_path)
    assert not stale.exists()
