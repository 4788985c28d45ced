"""The short version of ``make chaos``: faults at random moments."""

from pathlib import Path

import pytest

from benchmarks import chaos
from benchmarks.measuring import Options

FAULTS = 3  # of the kinds, the first ones


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_retry_ends_in_the_same_model(tmp_path: Path) -> None:
    result = chaos.measure(Options(repeats=FAULTS, quick=True, folder=tmp_path, output=tmp_path / "results"))
    figures = {target.what: target.value for target in result.targets}
    assert figures["faults"] == FAULTS
    assert figures["final models equal to the undisturbed one's"] == 1.0
    assert figures["processes left behind"] == 0
    assert figures["longest time from a fault to the end"] < 15
    assert "**no**" not in (tmp_path / "results/chaos.md").read_text()
