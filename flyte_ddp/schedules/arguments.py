"""Reject JSON and YAML on the command line that Flyte's commands would misread, and print the fields of the JSON."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Collection, Iterator
from itertools import chain, pairwise
from pathlib import Path

import click
import yaml

from flyte_ddp.core.checks.parsing import MisreadError
from flyte_ddp.core.errors import UserError
from flyte_ddp.schedules.yaml_files import describe_read_error, load_strictly

FILE_OPTIONS = ("--hp", "--policy", "--sweep", "--window", "--inputs-file")  # which may name files of JSON or YAML


def list_argument_pairs() -> Iterator[tuple[str, str]]:
    """Yield all pairs of neighbouring words of ``sys.argv``, where ``--option=value`` counts as two words."""
    split = (word.split("=", 1) if word.startswith("--") else [word] for word in sys.argv)
    return pairwise(chain.from_iterable(split))


def refuse_misread_arguments() -> None:
    """Raise UserError if Flyte's command would misread JSON or YAML of an option of FILE_OPTIONS in ``sys.argv``."""
    for option, word in list_argument_pairs():
        refuse_misread_input(option, word)


def refuse_unreadable_arguments() -> None:
    """Raise UserError if an option of FILE_OPTIONS in ``sys.argv`` is neither JSON nor a file that ``flyte`` parses.

    Reads and parses the files. Only files named .yaml or .yml may contain YAML.
    """
    for option, word in list_argument_pairs():
        if option not in FILE_OPTIONS:
            continue
        is_text = not word or word.lstrip().startswith("{")
        try:
            text = word if is_text else Path(word).read_text(encoding="utf-8")
            yaml.safe_load(text) if word.endswith(("yaml", "yml")) else json.loads(text)
        except (OSError, ValueError, yaml.YAMLError) as error:
            is_json_error = isinstance(error, json.JSONDecodeError)
            reason = f"is not JSON: {error}" if is_json_error else describe_read_error(error)
            shown = word or "''"
            raise UserError(f"{option} {shown}: {reason}; give a JSON object, or a .json, .yaml or .yml file") from None


def refuse_misread_input(option: str, word: str) -> None:
    """Raise UserError if Flyte's command would misread JSON or YAML of FILE_OPTIONS, such as an octal number.

    ``word`` is the value of ``option``: a text in braces, or the path of a file. Files that ``--inputs-file`` names are
    checked, too. Does nothing if the text cannot be read or parsed, because Flyte's command reports this error.
    """
    if option not in FILE_OPTIONS:
        return
    is_text = word.lstrip().startswith("{")
    try:
        values = load_strictly(word if is_text else Path(word).read_text(encoding="utf-8"))
    except MisreadError as error:
        raise UserError(f"{option if is_text else f'{option} {word}'}: {error.message}") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return
    if option == "--inputs-file" and isinstance(values, dict):
        for name, value in values.items():
            refuse_misread_input(f"--{name}", str(value))


def print_fields(options: Collection[str]) -> None:
    """Print, on stdout, the fields of each dataclass among a command's options, with their defaults and meanings.

    ``options`` are the names of the command's options, such as "hp". Other options are skipped.
    """
    from flyte_ddp.schedules.entries import FORMS

    for option, form in FORMS.values():
        if option in options:
            text = click.HelpFormatter(width=shutil.get_terminal_size().columns)
            fields = dataclasses.fields(form)  # type: ignore[arg-type]
            with text.section(f"Fields of the JSON of --{option}"):
                text.write_dl([(each.name, f"{each.metadata['doc']} [{json.dumps(each.default)}]") for each in fields])
            click.echo(text.getvalue())
