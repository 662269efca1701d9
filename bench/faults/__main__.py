"""The fault matrix: what clients see of engines' faults, with each router.

    python -m bench.faults [--routers warmroute,sglang] [--only hangs,dies] [--json FILE]

Three engines that compute nothing, a fresh fleet for each case, the routers' default options (but that all of them ask
engines in turn, so that the one at fault has its share). The exit status is 1 where warmroute doesn't keep a promise.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.faults.cases import CASES, Case, Seen
from bench.faults.fleet import ROUTERS, standing
from bench.gateway.site import WARMROUTE, SiteFailed
from bench.peers import PeerUnavailable


def main() -> int:
    """Run it; 2 where something stands in the way."""
    options = _options()
    routers = [name for name in ROUTERS if any(word in name for word in options.routers)]
    cases = [case for case in CASES if any(word in case.name for word in options.only)]
    try:
        seen = uvloop.run(_all(routers, cases))
    except (PeerUnavailable, SiteFailed, OSError) as error:
        print(f"bench.faults: {error}", file=sys.stderr)
        return 2
    print(table(seen, routers, cases))
    if options.json is not None:
        options.json.write_text(json.dumps([[*key, each.text, each.is_good] for key, each in seen.items()]))
    return 0 if all(each.is_good for (router, _), each in seen.items() if router == WARMROUTE) else 1


async def play(router: str, case: Case) -> Seen:
    """One case with one router. Raises `SiteFailed`, `PeerUnavailable`."""
    with tempfile.TemporaryDirectory(prefix="wr-bench-") as folder:
        async with standing(router, Path(folder)) as fleet:
            return await case.play(fleet)


async def _all(routers: Sequence[str], cases: Sequence[Case]) -> dict[tuple[str, str], Seen]:
    found = {}
    for case in cases:
        for router in routers:
            seen = found[router, case.name] = await play(router, case)
            print(f"{case.name}, {router}: {'good' if seen.is_good else 'BAD'}: {seen.text}", flush=True)
    return found


def table(seen: dict[tuple[str, str], Seen], routers: Sequence[str], cases: Sequence[Case]) -> str:
    """A row a case, a column a router; what is bad in bold."""
    rows = ["| fault | promise | " + " | ".join(routers) + " |", "|---" * (2 + len(routers)) + "|"]
    for case in cases:
        cells = [seen[router, case.name] for router in routers]
        said = [each.text if each.is_good else f"**{each.text}**" for each in cells]
        rows.append(f"| {case.name} | {case.promise} | " + " | ".join(said) + " |")
    return "\n".join(rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--routers", type=_words, default=[""], metavar="A,B", help=f"parts of names among: {', '.join(ROUTERS)}")
    add("--only", type=_words, default=[""], metavar="A,B", help="parts of cases' names")
    add("--json", type=Path, metavar="FILE", help="all that was seen")
    return parser.parse_args()


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


if __name__ == "__main__":
    sys.exit(main())
