"""Refuses prompts that can't fit into the context of any engine of their model, before they are tokenized."""

from collections.abc import Iterable

from gateway.errors import ContextTooLong
from gateway.fleet import EngineView
from gateway.openai_schema import InferenceRequest
from gateway.prompts import EncodedPrompt

TRUNCATING_KINDS = frozenset({"sglang"})
"""Engines that may have been started to cut such prompts instead of refusing them (`--allow-auto-truncate`)."""
PROMPT_FIELDS = ("messages", "input", "prompt")


def refuse_too_long(
    prompt: EncodedPrompt, request: InferenceRequest, ready: Iterable[EngineView], all_engines: Iterable[EngineView]
) -> None:
    """Raises `ContextTooLong` if the prompt is too long for those that are ready, by every encoding, and any other of
    `all_engines` that serves the model, ready or not, is known to have no more room and to refuse it as well.
    """
    if any(encoding.reason != "too_long" for encoding in (prompt.best, *prompt.by_files.values())):
        return
    limit = max(view.context_tokens for view in ready)
    others = [view for view in all_engines if request.model in view.models]
    if any(_may_take(view, limit) for view in others):
        return
    raise ContextTooLong(
        f"This model's maximum context length is {limit} tokens; the prompt can't fit into them and must be shorter",
        next((name for name in PROMPT_FIELDS if name in request.fields), None),
    )


def _may_take(view: EngineView, limit: int) -> bool:
    if view.registration is None or view.registration.renderer in TRUNCATING_KINDS:
        return True
    return view.registration.context_tokens > limit
