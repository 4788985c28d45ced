"""Describes models, versions and histories of a registry as lines of text for a terminal."""

import textwrap
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.text.formatting import format_count, format_measure, name_measure
from flyte_ddp.release.model_files import list_models
from flyte_ddp.release.promotion import read_stored_sidecar, read_verdict, require_champion
from flyte_ddp.release.promotion_log import READERS, ROLLBACK, Entry, replay_promotions
from flyte_ddp.release.registry import Registry
from flyte_ddp.release.verdict import KEPT, NO_COMPARISON, Check, Verdict

WIDTH = 100  # characters of a line
NARROWEST = 30  # least characters of the last column
DIGITS = 12  # digits of a SHA-256 that are shown
NONE = "-"
LOG_COLUMNS = ("entry", "action", "time (UTC)", "champion", "score", "by whom and why")


def describe_models(address: str) -> list[str]:
    """Return the lines of a table of all models with their champions.

    If a model cannot be read, its row has the error. Raises UserError if the registry has no models, or the models
    cannot be listed.
    """
    with ThreadPoolExecutor(READERS) as pool:
        rows = [*pool.map(partial(make_model_row, address), list_models(address))]
    return [f"registry {address}", "", *format_table(("model", "champion", "score", "since (UTC)", "versions"), rows)]


def make_model_row(address: str, name: str) -> tuple[str, ...]:
    """Return a model's row of the table: name, champion, score, time of the promotion, and number of versions.

    If the model cannot be read, the last cell is the error.
    """
    registry = Registry(address, name)
    try:
        versions, entry = len(registry.list_versions()), registry.read_champion()
        if entry is None:
            return name, "none", NONE, NONE, f"{versions}, none was promoted"
        verdict = read_verdict(registry, registry.read_version(entry.version, entry.manifest))
        return name, entry.version[:DIGITS], format_score(verdict), format_time(entry.time), f"{versions}"
    except UserError as error:
        return name, NONE, NONE, NONE, error.message


def describe_version(registry: Registry, version: str = "") -> list[str]:
    """Return verdict, checks, scores, hyperparameters and files of a version as lines.

    ``version`` is a version's name, or at least the first 12 digits. The default is the champion. Raises UserError if
    the version does not exist, or a file of the registry is missing or was altered.
    """
    name = registry.complete_version_name(version) if version else require_champion(registry).version
    history = registry.read_log()
    entries = [entry for entry in history if entry.version == name]
    found = registry.read_version(name, entries[-1].manifest if entries else "")
    verdict, sidecar = read_verdict(registry, found), read_stored_sidecar(registry, found)
    trained, measures, defaults = sidecar.hyperparameters, sidecar.metrics.test, Hyperparameters().to_dict()
    facts = [
        ("version", f"{name} of {registry.name}"),
        ("state", describe_state(name, history, verdict)),
        *(("log", describe_entry(entry, history)) for entry in entries),
        *list_verdict_facts(verdict),
        ("measures", ", ".join(f"{name_measure(key)} {format_measure(key, value)}" for key, value in measures.items())),
        ("trained on", f"{trained.get('dataset', NONE)}, data {(sidecar.digests.data or NONE)[:DIGITS]}"),
        ("with", ", ".join(f"{key}={value}" for key, value in trained.items() if value != defaults.get(key))),
        ("releases", ", ".join(f"{key} {value}" for key, value in sidecar.versions.items())),
        ("folder", registry.address_of(found.folder)),
    ]
    lines = [*format_table((), [fact for fact in facts if fact[1]])]
    if verdict is not None and verdict.checks:
        lines += ["", *format_table(("check", "", "value"), [make_check_row(check) for check in verdict.checks])]
    return [*lines, "", *format_table(("file", "SHA-256"), [*found.files.items()])]


def describe_history(registry: Registry) -> list[str]:
    """Return a model's log as lines, oldest entry first, and then all versions in the order of their judgements.

    Raises UserError if the model has no versions, or the log is damaged.
    """
    names, history = registry.list_versions(), registry.read_log()
    with ThreadPoolExecutor(READERS) as pool:
        log = [*pool.map(partial(make_log_row, registry, history), history)]
        stored = sorted(pool.map(partial(make_version_row, registry, history), names))
    return [
        f"{registry.name} in registry {registry.address}",
        "",
        *(format_table(LOG_COLUMNS, log) if log else ["nothing was promoted yet"]),
        "",
        *format_table(("version", "judged (UTC)", "score", "state"), [row for _, row in stored]),
    ]


def make_log_row(registry: Registry, history: list[Entry], entry: Entry) -> tuple[str, ...]:
    """Return the row of the log's entry. If the version's verdict cannot be read, the score is "-".

    ``history`` is the whole log.
    """
    verdict = None
    with suppress(UserError):
        verdict = read_verdict(registry, registry.read_version(entry.version, entry.manifest))
    shown = f"{entry.number}", entry.action, format_time(entry.time), entry.version[:DIGITS], format_score(verdict)
    return *shown, describe_author_and_reason(entry, history)


def make_version_row(registry: Registry, history: list[Entry], name: str) -> tuple[str, tuple[str, ...]]:
    """Return the time at which a version was judged, and the version's row. ``history`` is the whole log.

    If the version has no verdict, the time is "-". If a file cannot be read, the last cell is the error.
    """
    try:
        verdict = read_verdict(registry, registry.read_version(name))
    except UserError as error:
        return NONE, (name[:DIGITS], NONE, NONE, error.message)
    judged = verdict.time if verdict else NONE
    row = name[:DIGITS], format_time(judged), format_score(verdict), describe_state(name, history, verdict)
    return judged, row


def describe_state(name: str, history: list[Entry], verdict: Verdict | None) -> str:
    """Return a version's state as text, such as "champion" or "former champion (entry 3)".

    After a rollback, the text has author and reason. For a version that was never the champion, the text is the
    verdict's decision and outcome, or "never promoted" without a verdict.
    """
    _, taken_back = replay_promotions(history)
    if history and history[-1].version == name:
        return "champion"
    if back := taken_back.get(name):
        return f"rolled back by {back.by} in entry {back.number}: {back.reason}"
    if numbers := [entry.number for entry in history if entry.version == name]:
        return f"former champion (entry {numbers[-1]})"
    if verdict is None:
        return "never promoted"
    kept = {KEPT: "kept back", NO_COMPARISON: "no comparison"}.get(verdict.decision, "not promoted")
    return f"{kept}: {verdict.outcome}"


def describe_entry(entry: Entry, history: list[Entry]) -> str:
    why = describe_author_and_reason(entry, history)
    return f"entry {entry.number}, {entry.action}, {format_time(entry.time)} UTC, {why}"


def describe_author_and_reason(entry: Entry, history: list[Entry]) -> str:
    """Return author and reason of an entry as text. For a rollback, the text also names the version rolled back.

    ``history`` is the whole log.
    """
    undone = f" rolls back {history[entry.number - 2].version[:DIGITS]}" if entry.action == ROLLBACK else ""
    return f"{entry.by}{undone}: {entry.reason}"


def list_verdict_facts(verdict: Verdict | None) -> Iterable[tuple[str, str]]:
    """Yield the facts of a verdict as pairs of name and text, or nothing if the verdict is None."""
    if verdict is None:
        return
    yield "verdict", verdict.describe()
    look = f", look {verdict.look} at the test split {verdict.test_digest[:DIGITS]}" if verdict.look else ""
    level = f", alpha {verdict.alpha:.4g}" if verdict.alpha else ""
    yield "judged", f"{format_time(verdict.time)} UTC, {format_count(verdict.samples, 'sample')}{look}{level}"
    score = format_score(verdict)
    if verdict.champion and verdict.samples:
        champion = format_measure(verdict.measure, verdict.champion_score)
        score += f"; the champion at that time, {verdict.champion[:DIGITS]}, had {champion}"
    yield "score", score


def make_check_row(check: Check) -> tuple[str, str, str]:
    """Return the row of a Check: the name, the result, and the value with rule and reason.

    The result is "passes" or "fails", or "" for a passed Check without a rule.
    """
    result = ("passes" if check.passed else "fails") if check.rule or not check.passed else ""
    limit = f" (must be: {check.rule})" if check.rule else ""
    return check.name, result, f"{check.shown}{limit}{'' if check.passed else f': {check.reason}'}"


def format_score(verdict: Verdict | None) -> str:
    """Return a verdict's main measure of the challenger as text, or "-" if nothing was evaluated."""
    if verdict is None or not verdict.samples:
        return NONE
    return f"{name_measure(verdict.measure)} {format_measure(verdict.measure, verdict.challenger_score)}"


def format_time(time: str) -> str:
    """Return an ISO time up to the minute, with a blank instead of the T."""
    return time[:16].replace("T", " ")


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Yield the lines of a table with aligned columns, of up to WIDTH (100) characters.

    Wraps the last column, at NARROWEST (30) characters or more. An empty ``header`` is omitted. Long words are not
    broken, and may be longer than the line.
    """
    table = [row for row in (header, *rows) if row]
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in table), strict=True)]
    indent = " " * sum(width + 2 for width in widths)
    room = max(NARROWEST, WIDTH - len(indent))
    for row in table:
        start = "".join(f"{text:<{width}}  " for text, width in zip(row, widths, strict=False))
        lines = textwrap.wrap(row[-1], room, break_long_words=False, break_on_hyphens=False)
        for number, line in enumerate(lines or [""]):
            yield f"{start if number == 0 else indent}{line}".rstrip().replace("\N{NO-BREAK SPACE}", " ")
