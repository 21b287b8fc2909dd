"""The built-in provider: every card is a quote, is understandable by itself, and is the same each time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aijobs.job_types
from aijobs.ai.output import read_answer
from aijobs.ai.prompts import Prompt
from aijobs.ai.provider import CallFailed, GenerateAnswer, GenerateRequest, Route
from aijobs.errors import JobError
from aijobs.job_types.flashcard_generation import Input, Output, check
from aijobs.learning.notes import notes_from_text
from aijobs.learning.rules import MODEL, NAME, LocalProvider
from aijobs.learning.rules.chinese import ChineseRules
from aijobs.learning.rules.provider import MAKERS
from tests.support.tokens import HandToken

SAMPLES = Path(aijobs.job_types.__file__).parent / "sample_notes"
SAMPLE_FILES = sorted(SAMPLES.glob("*.txt"))


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> LocalProvider:
    return LocalProvider(tmp_path_factory.mktemp("words"))


def content(text: str, lang: str | None = None, **options: Any) -> dict[str, Any]:
    notes = notes_from_text(text, "Notes", "n-1")
    notes["lang"] = lang or notes["lang"]
    return Input.model_validate({**notes, "options": {"max_cards": 50, **options}}).model_dump(mode="json")


def ask(provider: LocalProvider, notes: dict[str, Any], token: HandToken | None = None) -> GenerateAnswer:
    request = GenerateRequest("flashcard_generation", Route(NAME, MODEL), Prompt("rules", "work"), notes, {})
    return provider.generate(request, token or HandToken())


def cards(provider: LocalProvider, text: str, lang: str | None = None, **options: Any) -> list[dict[str, Any]]:
    answer = ask(provider, content(text, lang, **options))
    found: list[dict[str, Any]] = read_answer(answer.text, answer.finish_reason)["cards"]
    return found


def answer_or_code(provider: LocalProvider, notes: dict[str, Any]) -> GenerateAnswer | str:
    try:
        return ask(provider, notes)
    except JobError as error:
        return error.code


def sides(provider: LocalProvider, text: str, lang: str | None = None) -> list[tuple[str, str] | str]:
    return [(c["front"], c["back"]) if c["card_type"] == "basic" else c["text"] for c in cards(provider, text, lang)]


ASKED = [
    (
        "A catalyst is a substance that speeds up a reaction.",
        "What is a catalyst?",
        "A substance that speeds up a reaction.",
    ),
    ("In biology, a cell is the smallest unit of life.", "In biology, what is a cell?", "The smallest unit of life."),
    ("Enzymes are proteins that speed up reactions.", "What are enzymes?", "Proteins that speed up reactions."),
    (
        "Louis XVI was the king of France from 1774 to 1792.",
        "Who was Louis XVI?",
        "The king of France from 1774 to 1792.",
    ),
    ("The capital of France is Paris.", "What is the capital of France?", "Paris"),
    ("A stack of thylakoids is called a granum.", "What is a stack of thylakoids called?", "A granum"),
    (
        "Glycolysis takes place in the cytoplasm of the cell.",
        "Where does glycolysis take place?",
        "In the cytoplasm of the cell",
    ),
    (
        "In 1771 Joseph Priestley showed that mint restores air.",
        "In 1771, who showed that mint restores air?",
        "Joseph Priestley",
    ),
    (
        "There are three kinds of rock: igneous, sedimentary and metamorphic.",
        "What are the three kinds of rock?",
        "Igneous, sedimentary and metamorphic",
    ),
    ("Energy is kept in adenosine triphosphate (ATP) in cells.", "What does ATP stand for?", "Adenosine triphosphate"),
    (
        "Genes are stretches of DNA (deoxyribonucleic acid) in cells.",
        "What does DNA stand for?",
        "Deoxyribonucleic acid",
    ),
    (
        "- **Mitosis**: division of a nucleus into two equal nuclei",
        "What is mitosis?",
        "Division of a nucleus into two equal nuclei",
    ),
    ("* Guillotine — a machine with a heavy blade", "What is meant by “Guillotine”?", "A machine with a heavy blade"),
    (
        "Definition: An isotope is a form of an element with other neutrons.",
        "What is an isotope?",
        "A form of an element with other neutrons.",
    ),
    (
        "Osmosis is the movement of water\r\nacross a membrane from one\r\nside to the other.",
        "What is osmosis?",
        "The movement of water across a membrane from one side to the other.",
    ),
    ("光合作用是指植物利用光能制造有机物的过程。", "什么是光合作用？", "植物利用光能制造有机物的过程"),
    ("惯性：物体保持原来运动状态不变的性质", "什么是惯性？", "物体保持原来运动状态不变的性质"),
    ("- 加速度——表示速度变化快慢的物理量", "什么是加速度？", "表示速度变化快慢的物理量"),
    ("李白是唐代著名的浪漫主义诗人。", "李白是谁？", "唐代著名的浪漫主义诗人"),
    ("光合作用的场所是叶绿体。", "光合作用的场所是什么？", "叶绿体"),
    ("光反应在叶绿体的类囊体膜上进行。", "光反应在哪里进行？", "叶绿体的类囊体膜上"),
    ("光合作用分为光反应和碳反应两个阶段。", "光合作用分为哪两个阶段？", "光反应和碳反应"),
    ("我们把物质从液态变为气态的过程叫做汽化。", "人们把物质从液态变为气态的过程叫做什么？", "汽化"),
    ("DNA（脱氧核糖核酸）存在于细胞核中。", "DNA 的中文名称是什么？", "脱氧核糖核酸"),
]


@pytest.mark.parametrize(("text", "front", "back"), ASKED, ids=[case[1] for case in ASKED])
def test_plain_statement_becomes_a_question(provider: LocalProvider, text: str, front: str, back: str) -> None:
    assert (front, back) in sides(provider, text)


HIDDEN = [
    (
        "About 71% of the surface of the Earth is covered by water.",
        "About {{c1::71%}} of the surface of the Earth is covered by water.",
    ),
    (
        "Dr. Marat was murdered in his bath by Charlotte Corday.",
        "Dr. Marat was murdered in his bath by {{c1::Charlotte Corday}}.",
    ),
    (
        "However, light travels at about 300,000 km/s through empty space.",
        "Light travels at about {{c1::300,000 km/s}} through empty space.",
    ),
    ("秦始皇于公元前221年统一了六个诸侯国。", "秦始皇于{{c1::公元前221年}}统一了六个诸侯国。"),
]


@pytest.mark.parametrize(("text", "cloze"), HIDDEN)
def test_cloze_hides_the_important_part_of_a_sentence(provider: LocalProvider, text: str, cloze: str) -> None:
    assert cloze in sides(provider, text)


def test_defined_term_is_hidden_in_other_sentences(provider: LocalProvider) -> None:
    text = (
        "Osmosis is the flow of water across a membrane. Plant roots take up water from the soil by osmosis every day."
    )

    assert "Plant roots take up water from the soil by {{c1::osmosis}} every day." in sides(provider, text)


NOTHING = [
    "It is a process that plants use to make food.",
    "This is called osmosis. They are organisms that eat plants. What is it?",
    "You should remember this for the test! We think that it is important.",
    "Causes: debt, hunger, inequality",
    "Date: 12 March 2024",
    "See Figure 3 on page 12. Read chapter 4.",
    "hello world",
    "# Only a heading",
    "```\nx is a variable that holds 3 values.\n```",
    "它是一种气体。这叫做惯性。但是它是一种性质。",
    "注意：明天交作业，不要忘记带课本",
    "我们应该多读书。",
    "1234567890",
    "😀😀😀",
]


@pytest.mark.parametrize("text", NOTHING)
def test_notes_without_self_contained_statements_give_no_cards(provider: LocalProvider, text: str) -> None:
    with pytest.raises(JobError) as caught:
        cards(provider, text)

    assert caught.value.code == "VALIDATION_NOTHING_TO_EXTRACT"


def _broken(reader: Any, notes: Any, token: Any) -> dict[str, Any]:
    raise ValueError("a fault of the rules")


@pytest.mark.parametrize(
    ("makers", "token", "code"),
    [
        (MAKERS, HandToken(), "VALIDATION_NOTHING_TO_EXTRACT"),
        (MAKERS, HandToken(checks=0), "CANCELLED"),
        ({}, HandToken(), "INTERNAL_CONFIG"),
        ({"flashcard_generation": _broken}, HandToken(), "INTERNAL_ERROR"),
    ],
)
def test_built_in_provider_never_bills_a_failure(tmp_path: Path, makers: Any, token: HandToken, code: str) -> None:
    with pytest.raises(CallFailed) as caught:
        ask(LocalProvider(tmp_path, makers), content("hello world"), token)

    assert (caught.value.code, caught.value.facts.billed) == (code, "no")


def test_title_is_no_definition(provider: LocalProvider) -> None:
    text = "Osmosis: how water moves\n\nOsmosis is the movement of water across a membrane."

    assert sides(provider, text) == [("What is osmosis?", "The movement of water across a membrane.")]


def test_sentences_of_mixed_notes_give_questions_in_their_own_language(provider: LocalProvider) -> None:
    text = "惯性是物体保持运动状态不变的性质。Osmosis is the movement of water across a membrane. 力的单位是牛顿。"

    assert {front for front, _ in sides(provider, text)} == {"惯性是什么？", "What is osmosis?", "力的单位是什么？"}


def test_definitions_come_first_within_the_card_limit(provider: LocalProvider) -> None:
    text = SAMPLE_FILES[0].read_text("utf-8")

    found = cards(provider, text, max_cards=5)

    assert len(found) == 5
    assert {card["card_type"] for card in found} == {"basic"}
    assert {card["tags"][0] for card in found} == {"definition"}


@pytest.mark.parametrize("wanted", ["basic", "cloze"])
def test_only_requested_card_types_are_made(provider: LocalProvider, wanted: str) -> None:
    found = cards(provider, SAMPLE_FILES[0].read_text("utf-8"), card_types=[wanted])

    assert {card["card_type"] for card in found} == {wanted}


@pytest.mark.parametrize("path", SAMPLE_FILES, ids=lambda path: path.stem)
def test_shipped_notes_give_cards_that_all_pass_the_checks(provider: LocalProvider, path: Path) -> None:
    notes = content(path.read_text("utf-8"))

    answer = ask(provider, notes)
    output = Output.model_validate(read_answer(answer.text, answer.finish_reason)).model_dump(mode="json")
    checked = check(notes, output, "job-1")

    assert checked["dropped"] == []
    assert len(checked["cards"]) >= 30
    assert {card["card_type"] for card in checked["cards"]} == {"basic", "cloze"}
    texts = {segment["sid"]: segment["text"] for segment in notes["segments"]}
    for card in checked["cards"]:
        for evidence in card["evidence"]:
            assert texts[evidence["sid"]][evidence["start"] : evidence["end"]] == evidence["quote"]


@pytest.mark.parametrize("path", SAMPLE_FILES, ids=lambda path: path.stem)
def test_offsets_of_the_evidence_match_its_quotes(provider: LocalProvider, path: Path) -> None:
    text = path.read_text("utf-8")
    texts = {segment["sid"]: segment["text"] for segment in content(text)["segments"]}

    for card in cards(provider, text):
        for evidence in card["evidence"]:
            assert texts[evidence["sid"]][evidence["start"] : evidence["end"]] == evidence["quote"]


def test_same_notes_give_the_same_answer_in_any_thread(tmp_path: Path) -> None:
    provider = LocalProvider(tmp_path)
    notes = [content(path.read_text("utf-8")) for path in SAMPLE_FILES]
    barrier = threading.Barrier(4)
    answers: list[tuple[str, ...]] = []

    def work() -> None:
        barrier.wait()
        answers.append(tuple(ask(provider, each).text for each in notes))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(answers) == 4
    assert len(set(answers)) == 1


def test_token_counts_are_marked_as_estimated(provider: LocalProvider) -> None:
    answer = ask(provider, content("Osmosis is the movement of water across a membrane."))

    assert answer.estimated
    assert answer.prompt_tokens > 0
    assert answer.completion_tokens > 10
    assert (answer.provider, answer.model, answer.cached_tokens, answer.finish_reason) == (NAME, MODEL, 0, "stop")


@pytest.mark.parametrize("looks", range(6))
def test_cancel_ends_the_work_between_two_segments(provider: LocalProvider, looks: int) -> None:
    notes = content("Osmosis is the movement of water.\n\nA cell is the unit of life.\n\nIron is a metal that rusts.")

    with pytest.raises(JobError) as caught:
        ask(provider, notes, HandToken(looks))

    assert caught.value.code == "CANCELLED"


def test_job_type_without_rules_is_a_configuration_error(provider: LocalProvider) -> None:
    request = GenerateRequest("poem", Route(NAME, MODEL), Prompt("", ""), {}, {})

    with pytest.raises(JobError, match="INTERNAL_CONFIG"):
        provider.generate(request, HandToken())


def test_dictionary_is_loaded_by_the_first_chinese_text_and_cached_in_its_folder(tmp_path: Path) -> None:
    """In a process of its own, because the dictionary stays loaded as long as its process runs."""
    script = """
import sys
from pathlib import Path
from aijobs.learning.rules.chinese import ChineseRules
from aijobs.learning.rules.reader import NotesReader
from tests.support.tokens import HandToken
reader = NotesReader(ChineseRules(Path(sys.argv[1])))
reader.read({"lang": "en", "segments": [{"sid": "p1", "text": "Osmosis is the movement of water."}]}, HandToken())
assert "jieba" not in sys.modules, "loaded without Chinese text"
reader.read({"lang": "zh", "segments": [{"sid": "p1", "text": "惯性是物体的一种性质。"}]}, HandToken())
assert "jieba" in sys.modules
"""
    cache, temporary = tmp_path / "instance", tmp_path / "tmp"
    temporary.mkdir()
    root = Path(__file__).parents[3]
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(root)}

    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", script, str(cache)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in cache.iterdir()] == ["jieba.cache"]
    assert list(temporary.iterdir()) == []
    assert str(cache) != tempfile.gettempdir()


def test_broken_dictionary_cache_is_rebuilt(tmp_path: Path) -> None:
    tmp_path.joinpath("jieba.cache").write_bytes(b"not a dictionary")

    assert sides(LocalProvider(tmp_path), "惯性是物体保持运动状态不变的性质。")[0] == (
        "惯性是什么？",
        "物体保持运动状态不变的性质",
    )


HEAVY = {
    "tabs": "\t" * 59_999 + "x",
    "no full stop": "a word is the thing that " * 2400,
    "full stops": "." * 60_000,
    "open bold": "**a " * 15_000,
    "a term used everywhere": " ".join(
        f"Zerm{n}osis is a thing that is big. Plants use zerm{n}osis very often for living well." for n in range(680)
    ),
    "definitions": "".join(f"概念{n}是一种重要的东西。" for n in range(3800)),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", HEAVY.values(), ids=HEAVY)
def test_running_time_is_not_quadratic_for_notes_within_the_limit(provider: LocalProvider, text: str) -> None:
    """60,000 characters squared would take minutes; then the test's time limit fails it."""
    assert len(text) <= 60_000
    outcome = answer_or_code(provider, content(text))

    assert isinstance(outcome, GenerateAnswer) or outcome == "VALIDATION_NOTHING_TO_EXTRACT"


STORABLE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=80)
PIECES = [
    "Osmosis",
    " is ",
    "a ",
    "the movement",
    "(ATP)",
    "：",
    "—",
    "- ",
    "**",
    "# ",
    "\n",
    "\r\n",
    ". ",
    "。",
    "是",
    "光合作用",
    "叫做",
    "1789",
    "%",
    "It ",
    "{{",
    "}}",
    "<b>",
    "|",
    "`",
    "This",
    "what",
    "“",
    "?",
    "Joseph Priestley ",
    "discovered ",
]


@given(text=st.lists(st.sampled_from(PIECES), min_size=1, max_size=30).map("".join) | STORABLE)
def test_cards_from_any_notes_pass_the_checks(provider: LocalProvider, text: str) -> None:
    notes = {
        "lang": "en",
        "source": {"id": "n", "title": "t"},
        "segments": [{"sid": "p1", "text": text}],
        "options": {"max_cards": 50, "card_types": ["basic", "cloze"]},
    }
    answer = answer_or_code(provider, notes)
    if isinstance(answer, str):
        assert answer == "VALIDATION_NOTHING_TO_EXTRACT"
        return
    output = Output.model_validate(read_answer(answer.text, answer.finish_reason)).model_dump(mode="json")
    assert check(notes, output, "job")["dropped"] == []


def test_long_notes_report_progress(provider: LocalProvider) -> None:
    token = HandToken()
    ask(provider, content(" ".join(f"Term {n} is part {n} of the whole thing." for n in range(50)), "en"), token)
    assert token.shown == sorted(token.shown)
    assert token.shown[0] == 0
    assert token.shown[-1] > 50


def test_consumer_starts_without_importing_rules_and_unused_databases() -> None:
    """The imports would take a tenth of the start, and most sites never use them."""
    script = """
import sys
import aijobs.workers
rules = ["aijobs.learning.rules." + name for name in ("reader", "chinese", "english", "flashcards")]
late = [*rules, "sqlalchemy.dialects.postgresql", "sqlalchemy.dialects.sqlite"]
print([name for name in late if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip

    assert done.stdout == "[]\n"


def test_concurrent_first_jobs_share_one_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    class Slow(ChineseRules):
        def __init__(self, cache_dir: Path) -> None:
            made.append(cache_dir)
            time.sleep(0.05)
            super().__init__(cache_dir)

    monkeypatch.setattr("aijobs.learning.rules.chinese.ChineseRules", Slow)
    readers: list[object] = []
    provider = LocalProvider(tmp_path, {"flashcard_generation": lambda reader, *_: (readers.append(reader), {})[1]})
    threads = [threading.Thread(target=ask, args=(provider, content("One sentence."))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    assert (made, len(readers), len(set(map(id, readers)))) == ([tmp_path], 2, 1)
