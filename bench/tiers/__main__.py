"""The NVMe tier, measured on this machine and this folder.

    python -m bench.tiers --throughput --folder /mnt/drive/bench [--mib 32] [--rounds 5] [--json]
    python -m bench.tiers --fio --folder /mnt/drive/bench [--mib 32] [--rounds 5] [--json]
    python -m bench.tiers --small --folder /mnt/drive/bench [--chunks 2000] [--rounds 5] [--json]
    python -m bench.tiers --start --files 1000000 --folder /mnt/drive/bench [--rate 2000] [--agent] [--json]
    python -m bench.tiers --index --files 1000000 [--json]
    python -m bench.tiers --all --folder /mnt/drive/bench

`--throughput` writes and reads chunks through the tier's store, and the same bytes by bare `pwritev` and `preadv`, in
turns, with one to eight threads. `--fio` does so beside `fio` at depths of one to eight; `--small` with files of
64 KiB. `--start` makes files of one header and one block, and times what an agent does at its start, with the memory
that each takes, as the process's resident set; `--agent` starts a real agent on them as well. `--index` is the index
alone, without files. Everything lies in a new folder below the given one, removed in the end.
"""

import argparse
import asyncio
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bench.tiers import beside_fio, index, start, throughput
from nodeagent.tiers.chunk_file import file_bytes

PARTS = ("throughput", "fio", "small", "start", "index")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part in (*PARTS, "all"):
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=2_000.0, help="files a second whose headers are read")
    parser.add_argument("--agent", action="store_true", help="with --start: a real agent's process, too")
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=2_000, help="how many small ones")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    wanted = [part for part in PARTS if options.all or getattr(options, part)]
    if not wanted:
        parser.error("say what to measure")
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="bench-tiers-"))
    try:
        result = {part: measure(part, folder, options) for part in wanted}
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result, indent=1)) if options.json else show(result)


def measure(part: str, folder: Path, options: argparse.Namespace) -> Any:
    if part == "throughput":
        return throughput.throughput(folder, options.mib << 20, options.rounds)
    if part == "fio":
        return beside_fio.large(folder / "large", options.mib << 20, options.rounds)
    if part == "small":
        return beside_fio.small(folder / "small", options.chunks, options.rounds)
    if part == "index":
        return index.index(options.files)
    files = folder / "files"
    start.check_room(folder, options.files)
    made_s = start.make_files(files, options.files)
    measured = {"made_s": made_s, "file_bytes": file_bytes(start.SMALL_BYTES)}
    measured |= asyncio.run(start.start(files, options.rate))
    if options.agent:
        measured |= {f"agent_{name}": value for name, value in start.agent_start(files, options.files).items()}
    return measured


def show(result: dict[str, Any]) -> None:
    for part in ("start", "index"):
        for name, value in result.get(part, {}).items():
            print(f"{name:24} {value:,.3f}")
    for row in result.get("throughput", ()):
        print(
            f"{row['what']:5} {row['threads']} threads: {row['gb_per_s']:.2f} GB/s, "
            f"bare {row['bare_gb_per_s']:.2f} GB/s, "
            f"ratio {row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
        )
    if "fio" in result:
        show_fio(result["fio"], lambda row: f"{row['what']:5} depth {row['depth']} beside {row['fio']:6}")
    if "small" in result:
        show_fio(
            result["small"],
            lambda row: (
                f"{row['what']:5} {row['chunks_per_s']:,.0f} chunks/s ({row['cpu_us_per_chunk']:.0f} us of CPU each), "
                f"fio {row['fio_files_per_s']:,.0f} files/s ({row['fio_cpu_us_per_file']:.0f} us)"
            ),
        )


def show_fio(measured: dict[str, Any], head: Any) -> None:
    how = "around" if measured["is_direct"] else "THROUGH"
    print(f"{measured['fio']}: {measured['files']} files of {measured['bytes']:,} bytes, ours {how} the page cache")
    for row in measured["rows"]:
        print(
            f"{head(row)}: {row['gb_per_s']:.2f} GB/s, fio {row['fio_gb_per_s']:.2f}, "
            f"ratio {row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f}); "
            f"CPU {row['cpu_s_per_gb']:.2f} s/GB, fio {row['fio_cpu_s_per_gb']:.2f}"
        )


if __name__ == "__main__":
    main()
