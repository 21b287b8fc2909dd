"""`aijobs demo`: make flashcards from the included notes, or from a file, over the real API."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from aijobs import logs
from aijobs.cli.failures import BAD_INPUT, Failure
from aijobs.cli.serving import Served, served
from aijobs.cli.terminal import Terminal, cells
from aijobs.cli.tokens import issue_user_token
from aijobs.cli.up import DEMO_USER, shown_path
from aijobs.clock import Stopwatch
from aijobs.jobs.status import FINAL, JobState
from aijobs.learning.notes import MAX_CHARACTERS, NotesError, notes_from_text
from aijobs.local.station import LOG_FOLDER, Stopped, StopRequests
from aijobs.settings import PACKAGE, Settings

SAMPLE_NOTES = PACKAGE / "job_types" / "sample_notes"
LONGEST_WAIT_S = 120.0
_LOOK_S = 0.1
_MOST_BYTES = 4 * MAX_CHARACTERS
_LONGEST_TITLE = 80
_GAP = re.compile(r"\{\{c\d+::([^{}]+?)(?:::[^{}:]+)?\}\}")
_LANGUAGES = {"en": "English", "zh": "中文"}


@dataclass
class Text:
    """One text of the demo, and its job."""

    name: str
    notes: dict[str, Any]
    job: dict[str, Any] = field(default_factory=dict)
    answer: dict[str, Any] = field(default_factory=dict)
    """The cards, and what made them."""

    @property
    def final(self) -> bool:
        return self.job.get("lifecycleStatus") in FINAL

    @property
    def succeeded(self) -> bool:
        return self.job.get("lifecycleStatus") == JobState.SUCCEEDED


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
def demo(file: Path | None) -> None:
    """Make flashcards from the notes that come with aijobs (English and Chinese), or from FILE (UTF-8 text).

    Starts what `aijobs up` starts, on a free port, and stops it afterwards. If `aijobs up` runs, uses that.
    """
    texts = [read_text_file(file)] if file else [read_text_file(path) for path in sorted(SAMPLE_NOTES.glob("*.txt"))]
    settings = Settings.load()
    logs.configure("ERROR")
    terminal = Terminal()
    watch = Stopwatch()
    with StopRequests().listening() as stop, served(settings, stop, terminal) as web:
        client = Client(web.url, issue_user_token(settings, DEMO_USER, 1))
        started_s = watch.seconds
        for text in texts:
            text.job = client.post("/api/learning/flashcards", text.notes)
        _wait(texts, client, terminal, stop, settings, web)
        for text in texts:
            if text.succeeded:
                text.answer = client.get(f"/api/learning/flashcards?jobId={text.job['jobId']}")
                _print_cards(terminal, text)
        took_s = watch.seconds - started_s
        terminal.progress("Stopping…")
    _print_end(terminal, settings, texts, web, watch.seconds, took_s)


# --- what goes in -------------------------------------------------------------------------------------------


def read_text_file(path: Path) -> Text:
    """Return the notes in a file. `Failure` (exit code 2) with one line if it can't be used."""
    try:
        if path.is_dir():
            raise Failure(f"{path} is a folder", BAD_INPUT)
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}", BAD_INPUT) from None
    if len(data) > _MOST_BYTES:
        raise Failure(f"{path} is too long: at most {MAX_CHARACTERS:,} characters are allowed", BAD_INPUT)
    if b"\x00" in data:
        raise Failure(f"{path} is no text file: it has NUL bytes in it", BAD_INPUT)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Failure(f"{path} is not UTF-8: byte {error.start} can't be read", BAD_INPUT) from None
    first_line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    try:
        title = first_line if len(first_line) <= _LONGEST_TITLE else path.stem
        return Text(path.name, notes_from_text(text, title, path.name))
    except NotesError as error:
        raise Failure(f"{path}: {error}", BAD_INPUT) from None


# --- what is asked of the API ---------------------------------------------------------------------------------


class Client:
    """A client of the user API, for one user."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON at `path`. `Failure` for any other answer."""
        return self._ask(path, None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON answer to `body`. `Failure` if it is refused."""
        return self._ask(path, json.dumps(body).encode())

    def _ask(self, path: str, body: bytes | None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, body, headers)  # noqa: S310 - our own address
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except urllib.error.HTTPError as refusal:
            raise Failure(f"the API answered {refusal.code}: {_told(refusal.read())}") from None
        except (OSError, ValueError) as error:
            raise Failure(f"the API at {self._url} does not answer ({type(error).__name__})") from None


def _told(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return f"{error['code']}: {error['message']} {json.dumps(error.get('details', {}))[:300]}"
    except (ValueError, KeyError, TypeError):
        return "and said nothing that can be read"


def _wait(
    texts: list[Text],
    client: Client,
    terminal: Terminal,
    stop: StopRequests,
    settings: Settings,
    web: Served,
) -> None:
    """Watch the jobs until all are final, and print changes."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    said = ""
    while not all(text.final for text in texts):
        if stop.wait(_LOOK_S):
            raise Stopped("stopped")
        if time.monotonic() > deadline:
            logs_folder = shown_path(settings.instance_path / LOG_FOLDER)
            raise Failure(f"the cards aren't there after {LONGEST_WAIT_S:g} s: see the logs in {logs_folder}")
        web.look_after()
        for text in texts:
            if not text.final:
                text.job = client.get(f"/api/ai/jobs/{text.job['jobId']}")
        state = "   ".join(f"{text.name}: {text.job['phase']} {text.job['progress']} %" for text in texts)
        if state != said:
            terminal.progress(state)
            said = state


# --- what comes out -----------------------------------------------------------------------------------------


def _print_cards(terminal: Terminal, text: Text) -> None:
    cards = text.answer["flashcards"]
    source = text.notes["source"]["title"]
    language = _LANGUAGES.get(text.notes["lang"], text.notes["lang"])
    terminal.say()
    head = f"{source}  ({language}, {_count(cards)}, {text.name})"
    terminal.paragraph(head, bold=True)
    terminal.say(terminal.style("─" * min(cells(head), terminal.width), dim=True))
    for number, card in enumerate(cards, 1):
        _print_card(terminal, number, card)


def _count(cards: list[dict[str, Any]]) -> str:
    return "1 card" if len(cards) == 1 else f"{len(cards)} cards"


def _print_card(terminal: Terminal, number: int, card: dict[str, Any]) -> None:
    first, rest = f"{number:>3}  ", " " * 5
    if card["cardType"] == "basic":
        terminal.paragraph(card["front"], indent=rest, first=first, bold=True)
        terminal.paragraph(card["back"], indent=rest, fg="green")
    else:
        terminal.paragraph(_GAP.sub("_____", card["text"]), indent=rest, first=first, bold=True)
        terminal.paragraph(", ".join(_GAP.findall(card["text"])), indent=rest, fg="green")
    for evidence in card["evidence"]:
        quote = f"“{evidence['quote']}” ({evidence['sid']})"
        terminal.paragraph(quote, indent=rest + "  ", first=rest + "> ", dim=True)
    terminal.say()


def _made_by(answers: Sequence[dict[str, Any]]) -> str:
    """Return what made the cards, from the API's answers."""
    if any(answer.get("madeBy") == "model" for answer in answers):
        return "Made by an AI model."
    return "Made by rules from the text, no AI model."


def _print_end(
    terminal: Terminal, settings: Settings, texts: list[Text], web: Served, whole_s: float, work_s: float
) -> None:
    terminal.say(f"Took {whole_s:.1f} s, {work_s:.1f} s of it from the request to the cards.")
    made = any(text.succeeded for text in texts)
    if made:
        terminal.say(_made_by([text.answer for text in texts]))
    where = settings.instance_path / "aijobs.db"
    ours = made and settings.database_url.endswith(str(where))
    if ours:
        terminal.say(f"The cards are kept in {shown_path(where)}.")
    terminal.say(f"See the jobs in the console: {web.console()}")
    for text in texts:
        path = f"jobs/{text.job['jobId']}"
        terminal.say(f"  {web.console(path) if web.stays else f'/console/{path}'}  {text.name}")
    failed = [text for text in texts if not text.succeeded]
    if failed:
        raise Failure("; ".join(_why(text) for text in failed))


def _why(text: Text) -> str:
    code, message = text.job.get("errorCode"), text.job.get("publicErrorMessage", "")
    return f"{text.name}: {text.job['lifecycleStatus']}{f', {code}' if code else ''}. {message}".strip()
