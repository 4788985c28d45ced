"""What a pod's process prints when it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from s3_server import s3_server

POD = """
import sys, threading
from flytekit import FlyteContextManager
from flytekitplugins.ddp.flyte import report_user_errors

access = FlyteContextManager.current_context().file_access
access.get_data("s3://bucket/inputs", sys.argv[1])
with report_user_errors():
    page = threading.Thread(target=access.put_data, args=(sys.argv[1], "s3://bucket/page"))  # as the live page's
    page.start()
    page.join()
access.put_data(sys.argv[1], "s3://bucket/outputs")
"""


@pytest.mark.slow
@pytest.mark.canary
def test_a_pod_that_succeeds_ends_without_errors_of_open_connections(tmp_path: Path) -> None:
    (tmp_path / "served/bucket").mkdir(parents=True)
    (tmp_path / "served/bucket/inputs").write_text("content")
    with s3_server(tmp_path / "served") as server:
        pod = {**os.environ, **server.flyte_environment(), "FLYTE_INTERNAL_EXECUTION_ID": "f1a2b3c4"}
        command = [sys.executable, "-c", POD, str(tmp_path / "local")]
        ended = subprocess.run(command, env=pod, capture_output=True, text=True, timeout=120, check=True)
    assert (tmp_path / "served/bucket/outputs").read_text() == "content"
    assert "Unclosed" not in ended.stderr + ended.stdout
