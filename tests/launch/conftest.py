"""What tests of launchers share."""

from pathlib import Path

import pytest
from cli import HELPERS
from faulty_runs import INTRODUCED
from launchers import dask_client, launch, no_current_client, ray_address  # noqa: F401 (fixtures)
from training_runs import train_in
from trials import Trial

from flyte_ddp.core.launch import spawn
from flyte_ddp.run import Result


@pytest.fixture
def trial(digits: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    return Trial(digits, tmp_path / "run", tmp_path / "marker", temporary, monkeypatch)


@pytest.fixture(scope="session")
def expected(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run of two spawned ranks that nothing disturbs."""
    folder = tmp_path_factory.mktemp("expected")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HELPERS)
        patch.setenv("TMPDIR", str(folder))
        return train_in(folder / "run", INTRODUCED, digits, launch=spawn.launch)
