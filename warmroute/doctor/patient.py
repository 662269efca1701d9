"""An engine as the doctor knows it: from the fleet's table, or from the command line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from directory.members import EngineRegistration
from warmroute.doctor.reader import Reader, Unanswered

MODELS_PATH = "/v1/models"
CONTEXT_TOKENS_DEFAULT = 4096
"""Believed of an engine that doesn't say how long a prompt may be."""


@dataclass(frozen=True, slots=True)
class Patient:
    """An engine to be examined. `registration` and `agent_url` are there where it has an agent.

    `tokenizer_folder` and `kind` are what an operator said of one without; `api_key` is sent to it and nobody else.
    """

    name: str
    url: str
    registration: EngineRegistration | None = None
    agent_url: str | None = None
    tokenizer_folder: Path | None = None
    kind: str | None = None
    api_key: str | None = field(default=None, repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """What every question to it carries."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine serves: a model's id, the longest prompt, its kind (a renderer's name, or `None`), its version."""

    model: str
    context_tokens: int
    kind: str | None
    version: str | None


async def look_at_served(reader: Reader, patient: Patient) -> Served:
    """Ask the engine what it is. Raises `Unanswered` where it doesn't list its models."""
    answer = (await reader.get(f"{patient.url}{MODELS_PATH}")).table()
    models = [row for row in answer.get("data") or () if isinstance(row, Mapping) and isinstance(row.get("id"), str)]
    if not models:
        raise Unanswered(f"{patient.url}{MODELS_PATH} lists no model")
    registration = patient.registration
    of_ours = [row for row in models if registration is not None and row["id"] in registration.models]
    row = (of_ours or models)[0]
    context = row.get("max_model_len")
    if not isinstance(context, int) or context < 1:
        context = registration.context_tokens if registration is not None else CONTEXT_TOKENS_DEFAULT
    version = await _version(reader, patient)
    kind = registration.renderer if registration is not None else patient.kind
    return Served(row["id"], context, kind or await _kind(reader, patient, row, version), version)


async def _version(reader: Reader, patient: Patient) -> str | None:
    reply = await reader.get(f"{patient.url}/version")
    version = reply.value.get("version") if reply.is_ok and isinstance(reply.value, dict) else None
    return version if isinstance(version, str) else None


async def _kind(reader: Reader, patient: Patient, row: Mapping[str, object], version: str | None) -> str | None:
    """By what only one family has."""
    if row.get("owned_by") == "warmroute":
        return "reference"
    if row.get("owned_by") == "sglang" or (await reader.get(f"{patient.url}/get_model_info")).is_ok:
        return "sglang"
    return "vllm" if row.get("owned_by") == "vllm" or version is not None else None
