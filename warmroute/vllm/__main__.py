"""`python -m warmroute.vllm` installs vLLM and the model that `warmroute up` serves, and prints where they are."""

import sys

from warmroute.local_fleet import FleetError, find_model
from warmroute.vllm.installation import InstallationError, install


def main() -> int:
    """Zero when both are there."""
    try:
        installation = install(find_model(None), say=lambda line: print(line, file=sys.stderr, flush=True))
    except (FleetError, InstallationError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{installation.command}\n{installation.model}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
