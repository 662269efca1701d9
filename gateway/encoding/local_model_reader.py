"""Reads a model's folder in a process of its own: `python -m gateway.encoding.local_model_reader FOLDER KIND`.

Nothing is fetched from anywhere, and no code of the model's is run. The answer is pickled: both sides are this program.
"""

import os
import pickle
import sys
from pathlib import Path

from gateway.encoding.child_process import REFUSED, ask, end_with_parent
from gateway.encoding.local_model import LocalModel, read_local_model

TIMEOUT_S = 300.0


async def read_apart(folder: Path, kind: str, python: str = sys.executable) -> LocalModel:
    """See `read_local_model`. Raises `ValueError`, and says why."""
    model = pickle.loads(await ask("gateway.encoding.local_model_reader", (str(folder), kind), b"", TIMEOUT_S, python))
    assert isinstance(model, LocalModel)
    return model


def main() -> int:
    """Zero when the answer was written."""
    end_with_parent()
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    output, sys.stdout = sys.stdout, sys.stderr  # libraries print
    try:
        model = read_local_model(Path(sys.argv[1]), sys.argv[2])
    except Exception as error:  # noqa: BLE001 - the edge of the process, which tells: transformers raises anything
        reason = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        output.write(reason[:2000])
        return REFUSED
    output.buffer.write(pickle.dumps(model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
