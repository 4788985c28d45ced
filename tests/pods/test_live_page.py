"""The console's page of a task while its ranks run: what is published when, and what its troubles cost."""

import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from processes import wait_until
from report_page import Page, records, write_run

from flyte_ddp.pods import live_page
from flyte_ddp.pods.live_page import publish_function_page, publish_page_while_running, publish_report_while_training
from flyte_ddp.pods.platforms import EXECUTION_ID, Platform

START = {"kind": "start", "function": "mine:train", "hyperparameters": {}, "num_ranks": 2, "num_nodes": 1}
START |= {"device": "cpu", "backend": "gloo", "resumed_after_step": 0, "time": 0.0}


class Console(Platform):
    """Keeps the pages that it is given, by title."""

    def __init__(self) -> None:
        self.pages: list[tuple[str, str]] = []

    def publish_page(self, title: str, html: str) -> None:
        self.pages.append((title, html))

    def last(self) -> Page:
        return Page(self.pages[-1][1])


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    """Return the console of a pod, which gets a page every 10 ms."""
    monkeypatch.setenv(EXECUTION_ID, "one")
    monkeypatch.setattr(live_page, "PAGE_SECONDS", 0.01)
    return Console()


def test_pages_are_published_while_the_block_runs_and_at_its_end(console: Console) -> None:
    asked: list[tuple[str, bool]] = []
    begun = threading.Event()

    def render(failure: str, is_last: bool) -> str:
        asked.append((failure, is_last))
        if not begun.is_set() or is_last:
            raise OSError("there is nothing yet, or no more")
        return "<p>so far</p>"

    with publish_page_while_running(console, render, title="My page", placeholder="<p>soon</p>"):
        wait_until(lambda: len(console.pages) > 1)
        begun.set()
        wait_until(lambda: console.pages[-1] == ("My page", "<p>so far</p>"))
    assert {*asked[:-1]} == {("", False)}
    assert asked[-1] == ("", True)
    assert console.pages[0] == ("My page", "<p>soon</p>")
    assert console.pages[-1] == ("My page", "<p>so far</p>"), "a page that cannot be rendered leaves the one before"


def test_a_console_that_does_not_answer_costs_nothing(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(console, "publish_page", lambda *_: 1 / 0)
    with publish_page_while_running(console, lambda _, is_last: str(asked.append(is_last))):
        wait_until(lambda: len(asked) > 1)
    assert asked[-1]


def fail_in(block: AbstractContextManager[None]) -> None:
    with pytest.raises(ValueError, match="too large"), block:
        raise ValueError("too large")


def test_training_publishes_its_report_and_at_last_the_finished_one(console: Console, tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    with publish_report_while_training(console, folder):
        wait_until(lambda: console.pages)
        assert console.pages[0] == ("Training report", live_page.PLACEHOLDER)
        work = write_run(folder / "unfinished", records()[:15])
        wait_until(lambda: "13.0 s" in console.pages[-1][1])
        (folder / "report.html").write_text("the finished report")
    assert console.pages[-1] == ("Training report", "the finished report")
    fail_in(publish_report_while_training(console, folder))
    assert console.last().texts("p", class_="banner") == ["This attempt has failed: too large"]
    assert console.last().texts("h1") == ["a run"]
    assert work.exists()


def test_a_function_publishes_what_it_records(console: Console, tmp_path: Path) -> None:
    def write(*lines: dict[str, object]) -> Callable[[], object]:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        shown = str(lines[-1].get("loss", "Finished"))
        return lambda: shown in console.pages[-1][1]

    with publish_function_page(console, tmp_path, "my task"):
        wait_until(lambda: console.pages)
        assert console.pages[0] == ("Run", live_page.FUNCTION_PLACEHOLDER)
        wait_until(write(START, {"kind": "record", "step": 1, "loss": 0.375}))
        write({"kind": "end", "step": 1, "seconds": 2.0})
    assert console.last().texts("h1") == ["my task"]
    assert console.last().tiles()["State"] == ("Finished", "step 1")
    fail_in(publish_function_page(console, tmp_path, "my task"))
    assert console.last().texts("p", class_="banner") == ["This attempt has failed: too large"]
