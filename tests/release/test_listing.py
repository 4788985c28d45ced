"""The commands that read a registry, called as users call them."""

import hashlib
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from flyte_ddp.config import Hyperparameters
from flyte_ddp.release.__main__ import release as commands
from flyte_ddp.release.promotion import apply_verdict, roll_back_champion, store_version
from flyte_ddp.release.registry import Registry
from flyte_ddp.release.verdict import Check, Verdict

ONE, TWO, BAD = (hashlib.sha256(name).hexdigest() for name in (b"one", b"two", b"bad"))
CHECKS = [
    Check("finite", passed=True, shown="0 samples", rule="none"),
    Check("accuracy", passed=True, shown="95.00\N{NO-BREAK SPACE}%"),
    Check("superior to the champion", passed=False, shown="p = 0.3", rule="p at most 0.0304", reason="chance"),
]
TIME = re.compile(r"20\d\d-\d\d-\d\d \d\d:\d\d")
everywhere = pytest.mark.parametrize("address", ["folder", "S3"], indirect=True)
in_a_folder = pytest.mark.parametrize("address", ["folder"], indirect=True)


def release(registry: Registry, folder: Path, name: str, decision: str, second: int, **values: object) -> None:
    """Store a version with these weights, and do what the verdict says."""
    folder.mkdir(exist_ok=True)
    digest = hashlib.sha256(name.encode()).hexdigest()
    (folder / "model.pt").write_text(name)
    sidecar = {
        "model": "small_cnn",
        "classes": ["a", "b"],
        "format": "flyte-ddp-model/1",
        "input": {"channels": 1, "height": 8, "width": 8, "mean": [0.5], "std": [0.5]},
        "hyperparameters": Hyperparameters(dataset="digits", epochs=3, seed=7).to_dict(),
        "metrics": {"test_accuracy": 0.95, "test_loss": 0.25, "epoch_accuracies": [0.95]},
        "digests": {"data": "d" * 64, "weights": digest},
        "versions": {"torch": "2.15.0"},
    }
    (folder / "model.json").write_text(json.dumps(sidecar))
    about = {"time": f"2026-01-02T03:04:{second:02}Z", "measure": "accuracy", "samples": 300, "test_digest": "e" * 64}
    verdict = Verdict(decision=decision, challenger=digest, best=digest, **about, **values)  # type: ignore[arg-type]
    version = store_version(registry, folder / "model.pt", folder / "model.json", verdict, {})
    apply_verdict(registry, version, verdict, by="me@here")


@pytest.fixture
def registry(address: str, tmp_path: Path) -> Registry:
    """Two promotions, a version that was kept back, and a rollback. Of another model nothing was promoted."""
    made, folder = Registry(address, "digits"), tmp_path / "made"
    release(made, folder, "one", "promote", 1, challenger_score=0.9, reason="there is no champion yet")
    better = {"champion": ONE, "challenger_score": 0.95, "champion_score": 0.9, "log_number": 1, "look": 2}
    release(made, folder, "two", "promote", 2, **better, alpha=0.0076, checks=CHECKS, reason="better " * 8)
    release(made, folder, "bad", "keep", 3, champion=TWO, challenger_score=0.5, reason="worse " * 12)
    roll_back_champion(made, "wrong on scanned forms", by="me@here")
    release(Registry(address, "pets"), folder, "bad", "keep", 4, challenger_score=0.5, reason="worse than a constant")
    return made


def call(*arguments: str) -> tuple[int, str]:
    ended = CliRunner().invoke(commands, arguments)
    return ended.exit_code, ended.output


def read(registry: Registry, *arguments: str) -> str:
    """What a command prints, with T for each time."""
    status, output = call(*arguments, "--registry", registry.address)
    assert status == 0, output
    return TIME.sub("T" * 16, output)


@everywhere
def test_all_models(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        read(registry, "list")
        == f"""\
registry {registry.address}

model   champion      score             since (UTC)       versions
digits  {ONE[:12]}  accuracy 90.00 %  TTTTTTTTTTTTTTTT  3
pets    none          -                 -                 1, none was promoted
"""
    )
    monkeypatch.setenv("FLYTE_DDP_REGISTRY", registry.address)
    status, output = call("list")
    assert (status, TIME.sub("T" * 16, output)) == (0, read(registry, "list"))


@everywhere
def test_who_promoted_what_when_and_why(registry: Registry) -> None:
    assert (
        read(registry, "history", "digits")
        == f"""\
digits in registry {registry.address}

entry  action    time (UTC)        champion      score             by whom and why
1      promote   TTTTTTTTTTTTTTTT  {ONE[:12]}  accuracy 90.00 %  me@here: there is no champion yet
2      promote   TTTTTTTTTTTTTTTT  {TWO[:12]}  accuracy 95.00 %  me@here: better better better
                                                                   better better better better
                                                                   better
3      rollback  TTTTTTTTTTTTTTTT  {ONE[:12]}  accuracy 90.00 %  me@here rolls back {TWO[:12]}:
                                                                   wrong on scanned forms

version       judged (UTC)      score             state
{ONE[:12]}  TTTTTTTTTTTTTTTT  accuracy 90.00 %  champion
{TWO[:12]}  TTTTTTTTTTTTTTTT  accuracy 95.00 %  rolled back by me@here in entry 3: wrong on
                                                  scanned forms
{BAD[:12]}  TTTTTTTTTTTTTTTT  accuracy 50.00 %  kept back: worse worse worse worse worse worse
                                                  worse worse worse worse worse worse
"""
    )
    nothing = read(registry, "history", "pets")
    assert "nothing was promoted yet" in nothing
    assert f"{BAD[:12]}  TTTTTTTTTTTTTTTT  accuracy 50.00 %  kept back: worse than a constant" in nothing


@everywhere
def test_a_version(registry: Registry) -> None:
    shown = read(registry, "show", "digits", TWO[:12])
    assert (
        shown.partition("\nfile ")[0]
        == f"""\
version     {TWO} of digits
state       rolled back by me@here in entry 3: wrong on scanned forms
log         entry 2, promote, TTTTTTTTTTTTTTTT UTC, me@here: better better better better better
            better better better
verdict     to be promoted: better better better better better better better better
judged      TTTTTTTTTTTTTTTT UTC, 300 samples, look 2 at the test split eeeeeeeeeeee, alpha 0.0076
score       accuracy 95.00 %; the champion at that time, {ONE[:12]}, had 90.00 %
measures    accuracy 95.00 %, loss 0.2500
trained on  digits, data dddddddddddd
with        epochs=3, seed=7
releases    torch 2.15.0
folder      {registry.address_of("versions", TWO)}

check                             value
finite                    passes  0 samples (must be: none)
accuracy                          95.00 %
superior to the champion  fails   p = 0.3 (must be: p at most 0.0304): chance
"""
    )
    assert re.findall(r"^model.pt +(\w+)$", shown, re.MULTILINE) == [TWO]
    assert read(registry, "show", "digits", f" {TWO.upper()} ") == shown
    champion = read(registry, "show", "digits")
    assert champion.startswith(f"version     {ONE} of digits\nstate       champion\n")
    assert champion.count("\nlog  ") == 2, "it was promoted, and is the champion again by the rollback"


@in_a_folder
def test_what_was_altered_is_named_and_the_rest_is_shown(registry: Registry, address: str) -> None:
    verdict = Path(registry.address_of("versions", TWO, "verdict.json"))
    verdict.write_text("{}")
    said = "verdict.json: is missing, damaged or was altered"
    assert said in call("show", "digits", TWO, "--registry", address)[1]
    history = read(registry, "history", "digits")
    assert re.search(rf"^2 +promote +T+  {TWO[:12]}  - +me@here: better", history, re.MULTILINE)
    assert f"{address}/digits/versions/{TWO}/verdict.json:\n" in history
    Path(registry.entry_address(2)).unlink()
    assert call("history", "digits", "--registry", address)[0] == 1
    assert re.search(rf"^digits  {ONE[:12]}  accuracy 90.00 %", read(registry, "list"), re.MULTILINE)
    Path(registry.entry_address(3)).write_text("{")
    assert re.search(r"^digits  - +- +- +/.*00000003.json$", read(registry, "list"), re.MULTILINE)


@in_a_folder
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "digit"), "unknown model 'digit': did you mean 'digits'? choose one of digits, pets"),
        (("history", "Pets"), "unknown model 'Pets': did you mean 'pets'?"),
        (("show", "pets"), "pets has no champion; promote a version first"),
        (("show", "digits", "1"), "version '1': must be the SHA-256 of a version's weights, or at least its first 12"),
        (("show", "pets", "0" * 12), f"version '000000000000': does not exist; pets has {BAD[:12]}"),
        (("history", "../x"), "model name '../x': must be letters, digits"),
    ],
)
def test_mistakes_are_sentences(registry: Registry, arguments: tuple[str, ...], said: str) -> None:
    status, output = call(*arguments, "--registry", registry.address)
    assert (status, output.count("\n")) == (1, 1)
    assert output.startswith("Error: ")
    assert said in output
