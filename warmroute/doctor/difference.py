"""Where two lists of token ids of one request part, and what that most likely comes from. Pure.

The ids say more than that they differ. Where both decode to the same text, the tokenizers differ; where the texts
differ, the templates, their arguments, or what stands in front: a beginning token that is there twice is one more
token at the front, and nothing else.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SHOWN_TOKENS = 6
BEFORE_TOKENS = 2
_DATE = re.compile(
    r"\d{4}-\d{2}-\d{2}|\d{1,2}:\d{2}|\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* \d|\d \w+ 20\d\d"
)
_TEMPLATE_MEND = (
    "start the engine without --chat-template, --chat-template-content-format, --default-chat-template-kwargs and "
    "the like: put the template that it is to use beside the model as chat_template.jinja, so that its agent serves "
    "that to the gateways; after a change of the file, restart the engine"
)
_TOKENIZER_MEND = (
    "give engine and gateway one tokenizer: the engine without --tokenizer, --tokenizer-mode or --tokenizer-revision, "
    "the tokenizer.json beside the model unchanged since its start, and the engine's version that its renderer "
    "is written for"
)


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs, the likely reason as `cause` (one short phrase, the same for the same reason), and the mend."""

    cause: str
    shows: str
    mend: str


Decode = Callable[[Sequence[int]], str]


def difference(ours: Sequence[int], theirs: Sequence[int], decode: Decode, has_template: bool) -> Difference:
    """Of two lists that differ. `has_template`: the request is a chat, whose text a template made."""
    place = _first_difference(ours, theirs)
    there, here = _shown(theirs, place, decode), _shown(ours, place, decode)
    shows = f"first at token {place}: the engine has {there}, the gateway {here}"
    if len(theirs) == len(ours) + 1 and tuple(theirs[1:]) == tuple(ours):
        return _extra_in_front(ours, theirs, decode, shows, has_template)
    if len(ours) == len(theirs) + 1 and tuple(ours[1:]) == tuple(theirs):
        return Difference(
            f"the engine leaves out the beginning token {_quoted(decode(ours[:1]))}",
            shows,
            "the engine's tokenizer files aren't those that its agent serves: add_bos_token in tokenizer_config.json, "
            "or the post-processor of tokenizer.json, was changed; restart the engine on the model's own files",
        )
    our_text, their_text = decode(ours), decode(theirs)
    if our_text == their_text:
        return Difference("one text, and two tokenizers", shows, _TOKENIZER_MEND)
    if not has_template:
        return Difference("two tokenizers", shows, _TOKENIZER_MEND)
    if _DATE.sub("", our_text) == _DATE.sub("", their_text):
        return Difference(
            "the template tells the date or the time",
            shows,
            "give engines and gateways one clock and one time zone (TZ=UTC for all), or pass the date as "
            "chat_template_kwargs",
        )
    return Difference("another chat template, or other arguments for it", shows, _TEMPLATE_MEND)


def _extra_in_front(
    ours: Sequence[int], theirs: Sequence[int], decode: Decode, shows: str, has_template: bool
) -> Difference:
    first = _quoted(decode(theirs[:1]))
    if ours and theirs[0] == ours[0]:
        return Difference(
            f"the engine puts the beginning token {first} in front twice",
            shows,
            "the template writes it, and the tokenizer adds it: take one away (in tokenizer_config.json "
            '"add_bos_token": false, or {{ bos_token }} out of the template), and send no "add_special_tokens": true '
            "with chats",
        )
    where = "with chats" if has_template else "with completions"
    return Difference(
        f"the engine puts {first} in front, which the gateway doesn't",
        shows,
        f"the engine adds special tokens {where} that its registered files don't ask for: restart it on the model's "
        "own tokenizer files, and see that its kind (renderer) is the right one",
    )


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = zip(ours, theirs, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))


def _shown(ids: Sequence[int], place: int, decode: Decode) -> str:
    if place >= len(ids):
        return f"nothing more after {len(ids)} tokens"
    some = ids[max(0, place - BEFORE_TOKENS) : place + SHOWN_TOKENS]
    return f"{ids[place]} in {_quoted(decode(some))}"


def _quoted(text: str) -> str:
    return repr(text)
