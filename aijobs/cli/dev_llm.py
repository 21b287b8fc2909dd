"""`aijobs dev-llm`: a fake provider to play with, until Ctrl-C."""

from __future__ import annotations

import json
import shlex
import threading
import tomllib
from collections.abc import Sequence
from pathlib import Path

import click

from aijobs.cli.failures import BAD_INPUT, Failure
from aijobs.cli.opening import json_option, load_settings, write_json
from aijobs.cli.serving import START_COMMAND
from aijobs.cli.terminal import Terminal
from aijobs.cli.up import shown_path
from aijobs.local.station import StopRequests
from aijobs.machine import write_private
from aijobs.testing.fakellm import MODEL, Call, FakeLlm, faults

PORT = 8089
PROVIDER = "devllm"
PROVIDERS_FILE = "dev-llm.toml"
READY = "Ctrl-C stops it."
_LOOK_S = 60.0


@click.command("dev-llm")
@click.option("--port", default=PORT, show_default=True, type=click.IntRange(0, 65535), help="0 takes any free one.")
@click.option("--delay-ms", default=0, type=click.IntRange(0, 60_000), help="A pause before each piece of a stream.")
@click.option("--list", "as_list", is_flag=True, help="Name the ways in which it can misbehave, and start nothing.")
@json_option
def dev_llm(port: int, delay_ms: int, as_list: bool, as_json: bool) -> None:
    """Run a fake AI provider on this machine until Ctrl-C: no account, no cost, and every fault of real ones.

    Makes flashcards by rules from the notes that it receives. Prints how to have aijobs use it, and a line for each
    call.
    """
    if as_json and not as_list:
        raise Failure("--json goes with --list", BAD_INPUT)
    if as_list:
        _print_list(as_json)
        return
    settings = load_settings()
    terminal = Terminal()
    writing = threading.Lock()

    def tell(call: Call) -> None:
        with writing:
            terminal.say(line_of(call))

    llm = FakeLlm(port=port, delta_s=delay_ms / 1000, cache_dir=settings.instance_path, on_end=tell)
    with StopRequests().listening() as stop:
        try:
            llm.start()
        except OSError as error:
            raise Failure(f"port {port} can't be listened on: {error.strerror} (--port takes another)") from None
        try:
            path = settings.instance_path / PROVIDERS_FILE
            write_private(path, providers_file(llm.url, _default_route(path)))
            with writing:
                _welcome(terminal, llm.url, path)
            while not stop.wait(_LOOK_S):
                continue
        finally:
            llm.stop()
    terminal.say("Stopped.")


def _default_route(path: Path) -> list[str]:
    """Return the route of the last start's file, which may have been edited; without one, the good model."""
    try:
        route = tomllib.loads(path.read_text("utf-8"))["routes"]["default"]
    except (OSError, ValueError, KeyError, TypeError):
        return [f"{PROVIDER}/{MODEL}"]
    return (
        route if isinstance(route, list) and all(isinstance(step, str) for step in route) else [f"{PROVIDER}/{MODEL}"]
    )


def providers_file(url: str, route: Sequence[str] = (f"{PROVIDER}/{MODEL}",)) -> str:
    """Return a providers file for calls to `url` on this route. Its models are the good one, and one for each fault."""
    models = [MODEL, *(faults.MODEL_PREFIX + name for name in faults.FAULTS)]
    listed = "".join(f"  {json.dumps(model)},\n" for model in models)
    return (
        f"# Written by `aijobs dev-llm` at each start, which keeps the route.\n\n"
        f"[provider.{PROVIDER}]\n"
        f'base_url = "{url}"\n'
        f'key = "none"\n'
        f'json_mode = "json_object"\n'
        f"models = [\n{listed}]\n\n"
        f"# To see how aijobs takes a fault, name its model here, as in {PROVIDER}/{faults.MODEL_PREFIX}429.\n"
        f"[routes]\n"
        f"default = {json.dumps(list(route))}\n"
    )


def line_of(call: Call) -> str:
    """Return the result of a call in one line, without key and content."""
    parts = [f"#{call.number}", call.model or call.request.path, "stream" if call.stream else "whole"]
    parts.append(str(call.status) if call.status is not None else "no answer")
    if call.usage:
        parts.append(f"{call.usage.get('prompt_tokens')} + {call.usage.get('completion_tokens')} tokens")
    if call.step != "answer" and not call.model.endswith(call.step):
        parts.append(f"({call.step})")
    if call.left_after_s is not None:
        parts.append(f"the client left after {call.left_after_s:.1f} s")
    return "  ".join(part if part.isprintable() else ascii(part) for part in parts)


def _welcome(terminal: Terminal, url: str, path: Path) -> None:
    terminal.say(f"A pretend AI provider is up at {terminal.style(url, bold=True)}.")
    terminal.say()
    terminal.say(f"  Have aijobs use it, in another terminal (end `{START_COMMAND}` first, if it runs):")
    terminal.say()
    terminal.say(f"export AIJOBS_PROVIDERS={shlex.quote(str(path))}")
    terminal.say(START_COMMAND)
    terminal.say()
    terminal.say(f"  Its models are {MODEL}, which answers well, and one for each fault: `aijobs dev-llm --list`,")
    terminal.say(f"  or GET {url}/. Which one is used, {shown_path(path)} says in its last line.")
    terminal.say()
    terminal.say(READY)


def _print_list(as_json: bool) -> None:
    if as_json:
        write_json(
            [
                {"name": fault.name, "description": fault.description, "params": list(fault.params)}
                for fault in faults.FAULTS.values()
            ]
        )
    else:
        click.echo(faults.as_text(), nl=False)
