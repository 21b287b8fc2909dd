"""The `aijobs` command. Each subcommand is a module here; this one handles their errors.

Exit code 0 only on success, 2 for bad arguments or files, 1 for everything else. An expected error is one line.
"""

from __future__ import annotations

import io
import sys

import click
from sqlalchemy.exc import DBAPIError

from aijobs.cli import (
    check,
    credentials,
    database,
    demo,
    demo_data,
    dev_llm,
    jobs,
    operators,
    outbox,
    providers,
    tokens,
    up,
)
from aijobs.cli.failures import Failure
from aijobs.errors import AijobsError, ApiError, BrokerUnavailable, describe


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="aijobs", message="aijobs %(version)s")
def cli() -> None:
    """A durable engine for AI jobs: run it, inspect it, act on it.

    Settings come from the environment (AIJOBS_…). Without any, all files are in instance/ of the checkout, or in
    var/aijobs-instance/ of the virtual environment for an installed wheel; AIJOBS_INSTANCE_PATH names another folder.
    """


for _command in (
    up.up,
    demo.demo,
    database.db,
    operators.create_operator,
    operators.operator_token,
    operators.operator,
    tokens.token,
    jobs.job,
    jobs.cancel,
    jobs.retry,
    outbox.outbox,
    check.check,
    check.prune,
    credentials.credentials,
    providers.providers,
    demo_data.demo_data,
    dev_llm.dev_llm,
):
    cli.add_command(_command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # A terminal without Chinese gets question marks instead of a traceback.
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code. Expected errors are printed in one line, others are raised."""
    try:
        # A command's return value is for tests; `ctx.exit(n)` arrives here as its code.
        result = cli.main(arguments, prog_name="aijobs", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "aijobs"
        return _fail(f"{_one_line(error.format_message())} (see {where} --help)", 2)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _fail("stopped", 1)
    except BrokenPipeError:
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115 - so that the interpreter's own flush meets no pipe
        return 1
    except Failure as error:
        return _fail(str(error), error.exit_code)
    except ApiError as error:
        return _fail(_describe_refusal(error), 1)
    except BrokerUnavailable as error:
        return _fail(f"the broker at AIJOBS_REDIS_URL can't be used: {_lower(str(error))}", 1)
    except AijobsError as error:
        return _fail(str(error), 1)
    except DBAPIError as error:
        return _fail(f"the database says: {error.orig}", 1)
    return result if isinstance(result, int) else 0


def _describe_refusal(error: ApiError) -> str:
    text = f"{error.code}: {describe(error.code).message()}"
    details = error.details or {}
    if "fields" in details:
        return f"{text} " + "; ".join(f"{f['field']}: {f['message']}" for f in details["fields"])
    if details:
        return f"{text} ({', '.join(f'{name}: {value}' for name, value in details.items())})"
    return text


def _one_line(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _fail(text: str, code: int) -> int:
    click.echo(f"aijobs: {_one_line(text)}", err=True)
    return code
