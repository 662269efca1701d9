"""`tests/vectors/renders.json` is what the installed vLLM renders.

`python -m tests.vllm.test_render_vectors` writes it anew.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.gateway.rendered import RENDERS, VECTORS
from tests.render_matrix import CHATS, SPECIAL_TOKENS, TEMPLATES
from tests.vllm.engines import python_of_vllm
from warmroute.vllm.installation import launch_environment

BOUND_S = 300.0


def rendered_by_vllm() -> dict[str, dict[str, str | None]]:
    tokens = {name: token["content"] if isinstance(token, dict) else token for name, token in SPECIAL_TOKENS.items()}
    tokens = {name: token for name, token in tokens.items() if token is not None}
    job = {"templates": {name: [source, tokens] for name, source in TEMPLATES.items()}, "chats": CHATS}
    done = subprocess.run(
        [python_of_vllm(), str(Path(__file__).with_name("render_vectors.py"))],
        input=json.dumps(job),
        env=launch_environment(os.environ),
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_the_vectors_are_what_vllm_renders() -> None:
    assert rendered_by_vllm() == RENDERS["vllm"]


if __name__ == "__main__":
    renders = {**RENDERS, "vllm": rendered_by_vllm()}
    (VECTORS / "renders.json").write_text(json.dumps(renders, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    sys.exit(0)
