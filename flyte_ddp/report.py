"""A run folder to one HTML page that needs nothing else: also what the Flyte console shows as the task's deck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from flyte_ddp import figures
from flyte_ddp.figures import Series
from flyte_ddp.files import replacing
from flyte_ddp.markup import (
    card,
    cards,
    counted,
    data,
    duration,
    moment,
    number,
    page,
    percent,
    section,
    settings,
    table,
    text,
)
from flyte_ddp.run_records import Mistake, Record, Run, read_run

PARTS = {
    "data": ("Data", "#8fb4f0"),
    "forward_backward": ("Forward and backward", "#2457c5"),
    "communication": ("Communication", "#d9660f"),
    "evaluation": ("Evaluation", "#1b8a5a"),
    "other": ("Other", "#a3adba"),
}
LAST_RECORD = "ddp-last-record"  # a class of HTML; deploy/launch.py looks for it
LISTED = 8  # rows in the lists of confusions and of hard classes


def write_report(run_folder: Path, name: str = "") -> Path:
    """Writes ``report.html`` into a run folder and returns its path.

    Args:
        name: of the run; empty: that of the folder.

    Raises:
        UserError: not a run folder, a damaged file in it, or a folder that cannot be written to.

    """
    page = render(run_folder, name)
    path = run_folder / "report.html"
    with replacing(path) as file:
        file.write(page.encode("ascii"))
    return path


def render(run_folder: Path, name: str = "", failure: str = "") -> str:
    """The report as an HTML page; its styles touch nothing outside it, so it can stand inside another page.

    Args:
        run_folder: of a run that may still go on.
        name: of the run; empty: that of the folder.
        failure: why it has failed.

    Raises:
        UserError: not a run folder, or a damaged file in it.

    """
    run = replace(read_run(run_folder, name), failure=failure)
    sections = (headline, notes, curves, confusion, mistakes, time_spent, attempts, hyperparameters, provenance)
    last = data(LAST_RECORD, last_record(run))
    return page(f"{run.name}: training report", *(make(run) for make in sections), last)


def headline(run: Run) -> str:
    """The result and the circumstances, in large type."""
    start, end = run.start, run.end
    hp = start.get("hyperparameters", {})
    kept = kept_evaluation(run)
    accuracy = end.get("test_accuracy", kept.get("test_accuracy"))
    loss = end.get("test_loss", kept.get("test_loss"))
    sizes = {part: start.get(f"{part}_samples", 0) for part in ("training", "validation", "test")}
    right = "" if accuracy is None else f"{accuracy * sizes['test']:,.0f} of {sizes['test']:,} right"
    rate = end.get("samples_per_second", run.train[-1]["samples_per_second"] if run.train else None)
    device = "CPU" if start.get("device") == "cpu" else start.get("device", "")
    links = [start.get(key, "none").replace("_", " ") for key in ("backend", "strategy")]
    nodes, threads = start.get("num_nodes"), start.get("threads_per_rank")
    ranks = [counted(nodes, "node"), *(link for link in links if link != "none"), counted(threads, "thread", " each")]
    validation = f"validation loss {kept['validation_loss']:.4f}" if "validation_loss" in kept else ""
    tiles = (
        ("Test accuracy", percent(accuracy), right),
        ("Test loss", number(loss), validation),
        ("Duration", duration(total_seconds(run)), f"{run.steps:,} of {start.get('steps', 0):,} steps"),
        ("Samples per second", number(rate, ",.0f"), "in training, over all ranks"),
        ("Model", hp.get("model", ""), f"{start.get('parameters', 0):,} parameters"),
        ("Data set", hp.get("dataset", ""), ", ".join(f"{size:,} {part}" for part, size in sizes.items() if size)),
        ("Ranks", f"{start.get('num_ranks', 1)} on {device}", ", ".join(filter(None, ranks))),
        ("Precision", start.get("precision", ""), "channels last" if start.get("channels_last") else ""),
    )
    cells = "\n".join(
        f'<div class="tile"><span>{text(label)}</span><strong>{text(value)}</strong><span>{text(detail)}</span></div>'
        for label, value, detail in tiles
    )
    weights = f" Weights kept: after epoch {kept['epoch']}." if end and "epoch" in kept else ""
    return (
        f"<h1>{text(run.name)}</h1>\n<p>Started {moment(start.get('time'))}.{weights}</p>\n{banner(run)}"
        f'<div class="tiles">\n{cells}\n</div>'
    )


def banner(run: Run) -> str:
    """What a reader must know before the figures: the run has not finished, or stopped early."""
    if run.failure:
        return f'<p class="banner">This attempt has failed: {text(run.failure)}</p>\n'
    if not run.end:
        return '<p class="banner">This run has not finished: the figures are those so far.</p>\n'
    if run.end.get("stopped"):
        return f'<p class="banner">Stopped early: {text(run.end["stopped"])}</p>\n'
    return ""


def kept_evaluation(run: Run) -> Record:
    """The evaluation of the weights that the run returned: the last one, unless the sidecar names another epoch."""
    epoch = run.sidecar.get("metrics", {}).get("kept_epoch")
    chosen = [record for record in run.evaluations if epoch in (None, record["epoch"])] or run.evaluations
    return chosen[-1] if chosen else {}


def total_seconds(run: Run) -> float | None:
    """Duration of the run; of one that has not finished, up to its last record."""
    if "seconds" in run.end:
        return float(run.end["seconds"]["total"])
    last = max((record.get("time", 0.0) for record in (*run.train, *run.evaluations)), default=None)
    return None if last is None else max(0.0, last - run.start.get("time", last))


def last_record(run: Run) -> Record:
    """Of the end, or of the last step so far; of an evaluation after it, where there was one. Empty before any."""
    return run.end or max((*run.evaluations, *run.train), key=lambda record: int(record["step"]), default={})


def notes(run: Run) -> str:
    """What the run itself wants its reader to know."""
    lines = run.end.get("notes") or []
    return section("Notes", "<ul>" + "".join(f"<li>{text(line)}</li>" for line in lines) + "</ul>") if lines else ""


def curves(run: Run) -> str:
    """Losses, accuracies, learning rate and speed over the run."""
    train, evaluations = run.train, run.evaluations
    loss = (
        series("training", train, "step", "loss", figures.BLUE),
        series("validation", evaluations, "step", "validation_loss", figures.GREEN),
        series("test", evaluations, "step", "test_loss", figures.ORANGE),
    )
    accuracy = (
        series("validation", evaluations, "epoch", "validation_accuracy", figures.GREEN),
        series("test", evaluations, "epoch", "test_accuracy", figures.ORANGE),
    )
    rate = (series("", train, "step", "learning_rate", figures.BLUE),)
    speed = (series("", train, "step", "samples_per_second", figures.BLUE),)
    charts = (
        ("Loss", loss, "optimiser step", "cross-entropy (nats)", "log"),
        ("Accuracy", accuracy, "epoch", "samples guessed right (%)", "linear"),
        ("Learning rate", rate, "optimiser step", "learning rate", "from 0"),
        ("Training speed", speed, "optimiser step", "samples per second, all ranks", "from 0"),
    )
    drawn = []
    for title, candidates, x_label, y_label, scale in charts:
        if lines := [line for line in candidates if line.x]:
            x_from = 0 if x_label == "optimiser step" else None
            chart = figures.line_chart(lines, x_label=x_label, y_label=y_label, scale=scale, x_from=x_from)
            drawn.append(f"<figure><h3>{title}</h3>{chart}</figure>")
    body = "\n".join(drawn)
    return section("Course of the run", f'<div class="pair">\n{body}\n</div>') if drawn else ""


def series(label: str, records: list[Record], x: str, y: str, color: str) -> Series:
    """One line out of the records that have its value; accuracies in percent."""
    found = [record for record in records if y in record]
    scale = 100 if y.endswith("accuracy") else 1
    return Series(label, [record[x] for record in found], [scale * record[y] for record in found], color)


def confusion(run: Run) -> str:
    """Which classes were taken for which, as a picture and as the lists of the largest."""
    matrix = run.confusion
    if matrix is None or not matrix.sum():
        return ""
    names, totals = run.classes, matrix.sum(axis=1)
    wrong = matrix * ~np.eye(len(matrix), dtype=bool)
    pairs = [divmod(int(k), len(matrix)) for k in np.argsort(-wrong, axis=None, kind="stable")[:LISTED]]
    recall = np.diag(matrix) / np.maximum(1, totals)
    hardest = [int(k) for k in np.argsort(np.where(totals, recall, 2.0), kind="stable")[:LISTED] if totals[k]]
    largest = [
        (names[t], names[g], f"{wrong[t, g]:,}", percent(wrong[t, g] / totals[t])) for t, g in pairs if wrong[t, g]
    ]
    lowest = [(names[k], percent(recall[k]), f"{totals[k]:,}") for k in hardest]
    picture = figures.confusion_heatmap(matrix, names)
    lists = f"<div><h3>Hardest classes</h3>{table(('Class', 'Right', 'Samples'), lowest, numeric=(1, 2))}</div>"
    if largest:
        header = ("Truth", "Guess", "Samples", "Of the class")
        lists = f"<div><h3>Most frequent mistakes</h3>{table(header, largest, numeric=(2, 3))}</div>\n{lists}"
    if len(names) <= figures.NAMED_CLASSES:
        both = f'<figure class="square">{picture}</figure>\n<div class="lists">{lists}</div>'
        body = f'<div class="pair wide-left">{both}</div>'
    else:
        body = f'<figure class="square large">{picture}</figure>\n<div class="pair">{lists}</div>'
    return section(
        "Confusion matrix",
        "<p>Test samples by class. Blue: right. Orange: mistakes, the darker the larger their share of the class, "
        f"on a scale of their own.</p>\n{body}",
    )


def mistakes(run: Run) -> str:
    """The test images that the model was most wrong about."""
    if run.confusion is None:
        return ""
    if not run.mistakes:
        return section("Worst mistakes", "<p>None: every test sample was guessed right.</p>")
    return section(
        "Worst mistakes",
        "<p>The test samples of the largest loss; the score is the probability that the model gave to its guess.</p>"
        + cards(mistake(found, run.classes) for found in run.mistakes),
    )


def mistake(found: Mistake, classes: Sequence[str]) -> str:
    """One picture with its guess and truth."""
    return card(found.image, found.name, guess=classes[found.guess], truth=classes[found.truth], score=found.score)


def time_spent(run: Run) -> str:
    """How the time of rank 0 divides, as one bar."""
    seconds = {key: max(0.0, value) for key, value in run.end.get("seconds", {}).items() if key in PARTS}
    total = sum(seconds.values())
    if not total:
        return ""
    shares = {key: seconds[key] / total for key in PARTS if key in seconds}
    bar = "".join(
        f'<div style="width:{100 * share:.2f}%;background:{PARTS[key][1]}" title="{PARTS[key][0]}"></div>'
        for key, share in shares.items()
    )
    parts = "".join(
        f'<div><span><i style="background:{PARTS[key][1]}"></i>{PARTS[key][0]}</span>'
        f"<strong>{duration(seconds[key])}</strong> ({percent(share)})</div>"
        for key, share in shares.items()
    )
    return section(
        "Where the time went",
        "<p>Time of rank 0. Communication is what computation did not hide; other is start-up of the ranks' data "
        "and model, the optimiser, and writing results.</p>"
        f'<div class="bar">{bar}</div><div class="parts">{parts}</div>',
    )


def hyperparameters(run: Run) -> str:
    """Every hyperparameter: those that are not the default, and the others folded away."""
    return settings(run.start.get("hyperparameters", {}))


def attempts(run: Run) -> str:
    """Where each attempt began, if there was more than one."""
    if len(run.starts) < 2:
        return ""
    rows = [
        (
            moment(start.get("time")),
            f"{start.get('resumed_after_step', 0):,}",
            start.get("num_ranks", 1),
            start.get("num_nodes", 1),
        )
        for start in run.starts
    ]
    return section("Attempts", table(("Started", "After step", "Ranks", "Nodes"), rows, numeric=(1, 2, 3)))


def provenance(run: Run) -> str:
    """What it takes to tell this model from another."""
    digests, versions = run.sidecar.get("digests", {}), run.sidecar.get("versions", {})
    if not digests and not versions:
        return ""
    left = table(("Digest", "SHA-256"), [(name, value) for name, value in digests.items()], kind="code")
    right = table(("Package", "Version"), [(name, value) for name, value in versions.items()], kind="code")
    return section("Digests and versions", f'<div class="pair wide-left"><div>{left}</div><div>{right}</div></div>')
