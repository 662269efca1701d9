"""The gateway's own way from a request to token ids, for any engine: its renderer and tokenizer, from its files."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import tokenizers

from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.encoder import Encoder, Encoding, build_renderer
from gateway.encoding.files import FileUnavailable, TokenizerFiles
from gateway.encoding.model_files import IDS_ONLY
from gateway.encoding.prompt_tokenizer import Shared, load_tokenizer
from gateway.openai_schema import parse_request
from warmroute.doctor.patient import Patient
from warmroute.doctor.probes import Probe

CACHE_BYTES_MAX = 8 * 2**20
ITS_AGENT = "see that the agent is reachable from gateways at the URL that it registers (listen.url)"
ITS_FOLDER = "see that the engine's model folder has tokenizer.json, tokenizer_config.json and chat_template.jinja"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")


class NoEncoding(Exception):
    """There are no files, or no encoder can be made of them; the message says why. `is_fault`: there should be.

    `mend` is what would help."""

    def __init__(self, says: str, is_fault: bool, mend: str = "") -> None:
        super().__init__(says)
        self.is_fault, self.mend = is_fault, mend


@dataclass(frozen=True, slots=True)
class OwnEncoding:
    """An encoder with the files that it is made of."""

    encoder: Encoder
    contents: Mapping[str, bytes]

    async def encode(self, probe: Probe, model: str, context_tokens: int) -> Encoding:
        """The gateway's ids of a request."""
        body = orjson.dumps({"model": model, **probe.fields})
        return await self.encoder.encode(parse_request(probe.endpoint, body), context_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens and all; ids that the tokenizer doesn't have are left out."""
        tokenizer = tokenizers.Tokenizer.from_str(self.contents["tokenizer.json"].decode())
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    @property
    def tells_time(self) -> bool:
        """Whether a template asks for the date."""
        return any(b"strftime_now" in content for name, content in self.contents.items() if name != "tokenizer.json")


class OwnEncodings:
    """Encoders by their files, each loaded once."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._files, self._pool, self._lock = files, EncodePool(), asyncio.Lock()
        self._made: dict[tuple[str, tuple[tuple[str, bytes], ...]], OwnEncoding] = {}

    async def of(self, patient: Patient, kind: str | None) -> OwnEncoding:
        """For an engine of this kind. Raises `NoEncoding`."""
        if kind is None:
            raise NoEncoding("its kind isn't known; give --kind vllm, sglang or reference", is_fault=False)
        async with self._lock:
            contents = await self._contents(patient)
            key = kind, tuple(sorted((name, hashlib.sha256(each).digest()) for name, each in contents.items()))
            if key not in self._made:
                self._made[key] = await self._make(kind, contents)
            return self._made[key]

    def close(self) -> None:
        """Let the threads go."""
        self._pool.close()

    async def _contents(self, patient: Patient) -> dict[str, bytes]:
        if patient.registration is not None and patient.agent_url is not None:
            try:
                names = patient.registration.tokenizer_files
                if patient.registration.renderer == IDS_ONLY:
                    raise NoEncoding("its tokenizer is code of its own (its log says which): texts aren't known", False)
                if not names:
                    says = "it registered no tokenizer files: its prompts are routed by session"
                    raise NoEncoding(says, is_fault=True, mend=ITS_FOLDER)
                return {name: await self._files.get(digest, [patient.agent_url]) for name, digest in names.items()}
            except FileUnavailable as error:
                says = f"its tokenizer files aren't to be had: {error}"
                raise NoEncoding(says, is_fault=True, mend=ITS_AGENT) from error
        if patient.tokenizer_folder is None:
            raise NoEncoding("there is no agent that serves its tokenizer files; give --tokenizer DIR", is_fault=False)
        contents = await asyncio.to_thread(_read_folder, patient.tokenizer_folder)
        if "tokenizer.json" not in contents:
            says = f"there is no tokenizer.json in {patient.tokenizer_folder}"
            raise NoEncoding(
                says, is_fault=True, mend="give --tokenizer the folder that the engine's model was loaded from"
            )
        return contents

    async def _make(self, kind: str, contents: Mapping[str, bytes]) -> OwnEncoding:
        try:
            renderer = build_renderer(kind, contents)
            shared = Shared.of(self._pool)
            tokenizer, chars = await load_tokenizer(contents["tokenizer.json"], shared, CACHE_BYTES_MAX)
        except (ValueError, KeyError) as error:
            raise NoEncoding(f"no gateway can encode for it: {error}", is_fault=True, mend=ITS_FOLDER) from error
        return OwnEncoding(Encoder(tokenizer, renderer, chars), contents)


def _read_folder(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
