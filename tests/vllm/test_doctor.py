"""`warmroute doctor` at real vLLM engines: one that is well, and one with another template and without a cache."""

from collections.abc import Iterator

import pytest

from tests.vllm.engines import model_folder, running_engines
from tests.warmroute.doctor_parts import Report, doctor

pytestmark = pytest.mark.timeout(900)
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
RENDERING = ("--enable-scale-out", *TOOLS)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Report]]:
    folder = tmp_path_factory.mktemp("v")
    template = folder / "other.jinja"
    own = (model_folder() / "chat_template.jinja").read_text()
    template.write_text(own.replace("<|im_start|>", "<|im_start|> "))
    assert template.read_text() != own
    flags = {"well": RENDERING, "odd": ("--chat-template", str(template), "--no-enable-prefix-caching", *TOOLS)}
    with running_engines(folder, dict.fromkeys(flags), flags_of=flags) as engines:
        yield {
            name: doctor("--engine", engine.url, "--tokenizer", str(model_folder())) for name, engine in engines.items()
        }


def test_an_engine_that_is_well_is_right(reports: dict[str, Report]) -> None:
    report = reports["well"]
    assert [each for each in report.findings if each["verdict"] == "wrong"] == []
    assert report.status == 0
    assert "21 requests compared" in report.words("ids", "right")
    assert "19 id for id" in report.words("ids", "right")
    assert "288 were cached the second time" in report.words("cache", "right")
    assert "prefix caching on, blocks of 32 tokens, sha256" in report.words("settings", "right")


def test_another_chat_template_is_found(reports: dict[str, Report]) -> None:
    found = reports["odd"].words("ids")
    assert "another chat template" in found
    assert "without --chat-template" in found
    assert "text" not in found.partition("(requests: ")[2].partition(")")[0].split(", ")


def test_a_prefix_cache_that_is_off_is_found(reports: dict[str, Report]) -> None:
    assert "prefix caching is off" in reports["odd"].words("settings")
    assert "without --no-enable-prefix-caching" in reports["odd"].words("settings")
    assert "none was cached" in reports["odd"].words("cache")
