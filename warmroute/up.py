"""`warmroute up`: runs the local fleet, and the demo if asked, until Ctrl-C."""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import replace

from directory.redis_schema import KEY_PREFIX
from warmroute.demo import DemoFailed, as_json, as_report, play
from warmroute.directory_tables import terminal_chars
from warmroute.local_fleet import (
    KEY_PREFIX_VARIABLE,
    MODEL,
    NVME_GB,
    FleetError,
    FleetOptions,
    LocalFleet,
    check_options,
    find_model,
    local_fleet,
)
from warmroute.run_folder import FolderUnavailable
from warmroute.vllm.installation import InstallationError, install


def run(options: argparse.Namespace) -> int:
    """Run until Ctrl-C or SIGTERM, or to the demo's end. Trouble is one sentence on stderr, and 2."""
    try:
        fleet_options = _fleet_options(options)
        if fleet_options.engine_kind == "vllm":
            # Before the event loop, so that Ctrl-C ends an installation at once.
            check_options(fleet_options)
            fleet_options = replace(fleet_options, vllm=install(find_model(options.model), _say))
        return asyncio.run(_run(fleet_options, options))
    except (FleetError, FolderUnavailable, InstallationError, DemoFailed) as error:
        print(f"warmroute up: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _fleet_options(options: argparse.Namespace) -> FleetOptions:
    if (options.exit or options.json) and not options.demo:
        raise FleetError("--exit and --json are for the demo: add --demo")
    is_vllm = options.engine_kind == "vllm"
    if options.engine and (options.demo or options.no_cache or options.model or options.nvme or is_vllm):
        raise FleetError(
            "--demo, --no-cache, --model, --nvme and --engine-kind are for engines that are started here: "
            "leave out --engine, or them"
        )
    if is_vllm and options.no_cache:
        raise FleetError("--no-cache is for the reference engines: leave out --engine-kind vllm, or it")
    if options.nvme_gb is not None and options.nvme is None:
        raise FleetError("--nvme-gb needs --nvme, the folder")
    return FleetOptions(
        engines=options.engines,
        engine_kind=options.engine_kind,
        engine_urls=tuple(url.rstrip("/") for url in options.engine or ()),
        port=options.port,
        redis_url=options.redis,
        key_prefix=options.key_prefix or os.environ.get(KEY_PREFIX_VARIABLE) or KEY_PREFIX,
        model_path=options.model,
        use_cache=not options.no_cache,
        dram_gb=options.dram_gb,
        nvme=options.nvme.resolve() if options.nvme is not None else None,
        nvme_gb=options.nvme_gb if options.nvme_gb is not None else NVME_GB,
        nvme_write=options.nvme_write,
        logs=options.logs,
    )


async def _run(fleet_options: FleetOptions, options: argparse.Namespace) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    running = asyncio.create_task(_serve(fleet_options, options))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        _say("stopping ...")
        running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    stopping.cancel()
    return 0


async def _serve(fleet_options: FleetOptions, options: argparse.Namespace) -> None:
    """Serve until cancelled, or to the demo's end."""
    async with local_fleet(fleet_options, _say) as fleet:
        if options.demo:
            rows = await play(fleet, _say)
            print(as_json(rows) if options.json else "\n" + as_report(rows, terminal_chars()), flush=True)
        if options.exit:
            return
        print(_how_to_send(fleet), flush=True)
        await asyncio.Event().wait()


def _how_to_send(fleet: LocalFleet) -> str:
    at_a_glance = f"""
The fleet at a glance: {fleet.admin_url}/fleet    metrics: {fleet.admin_url}/metrics    Ctrl-C ends it all."""
    if fleet.options.engine_urls:
        return f"\nYour engines are reached at {fleet.url}/v1, with any OpenAI client.{at_a_glance}"
    question = '[{"role":"user","content":"What is the capital of France?"}]'
    body = f'{{"model":"{MODEL}","messages":{question},"max_tokens":32,"temperature":0}}'
    return f"""
The fleet is running. Send it a request:

  curl {fleet.url}/v1/chat/completions -H 'content-type: application/json' -H 'x-warmroute-explain: 1' -i \\
    -d '{body}'
{at_a_glance}"""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
