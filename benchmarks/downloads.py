"""Images a second from an S3 server on loopback, the first time, with 2 workers or threads.

Shards: ours with an empty cache, against all shards by one GET each, several at the same time, and decoding and
cropping what has come. A folder of images, of which each request takes 20 ms longer: ours against a DataLoader whose
workers ask for one image after another. Server, proxy and loader share the machine's cores.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks import generated_images
from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import ROOT, environment, run_command

sys.path.append(str(ROOT / "tests/helpers"))
from s3_server import s3_server

SHARDS, LATENCY = 24, 0.020


def measure(options: Options) -> Result:
    """Both comparisons, each side in turn."""
    per_shard, single = (20, 60) if options.quick else (500, 2400)
    bucket = options.folder / "served" / "bucket"
    generated_images.write_shards(bucket / "shards", SHARDS, per_shard)
    generated_images.write_folder(bucket / "images", single)
    tests = {
        "shards": generated_images.write_shards(options.folder / "test shards", 1, 10),
        "image_folder": generated_images.write_folder(options.folder / "test images", 10),
    }
    result = Result(
        settings={"shards": SHARDS, "images": SHARDS * per_shard, "single_images": single, "latency_ms": 1000 * LATENCY}
    )
    output = options.folder / "rate.json"
    order: dict[str, Any] = {"batch_size": 64, "epochs": 1, "output": str(output)}

    def side(name: str, dataset: str, images: int, endpoint: dict[str, str]) -> Callable[[int], None]:
        kind = dataset.partition(":")[0]
        request = order | {"side": name, "dataset": dataset, "images": images, "test_dataset": f"{kind}:{tests[kind]}"}

        def run(_: int) -> None:
            run_command([sys.executable, "-m", "benchmarks.loader_run", json.dumps(request)], environment(endpoint))
            result.add(name, json.loads(output.read_text())["rate"], "images/s")

        return run

    with s3_server(bucket.parent, "--dir-cache-time", "1h") as server, delayed(server.endpoint) as far:
        near = server.aws_environment()
        slow = near | {"AWS_ENDPOINT_URL": far}
        shards, folder = "shards:s3://bucket/shards/train.json", "image_folder:s3://bucket/images/"
        sides = {
            "ours, empty cache": side("ours, empty cache", shards, SHARDS * per_shard, near),
            "download and decode alone": side("download and decode alone", shards, SHARDS * per_shard, near),
            "ours from a folder": side("ours from a folder", folder, single, slow),
            "one GET at a time": side("one GET at a time", folder, single, slow),
        }
        interleaved(options, result, sides, options.number(5))
    share = result.ratio("ours, empty cache / download and decode", "ours, empty cache", "download and decode alone")
    result.targets.append(Target("shards the first time, share of download and decode alone", share, "%", 0.85))
    times = result.ratio("ours from a folder / one GET at a time", "ours from a folder", "one GET at a time")
    result.targets.append(Target("a folder with 20 ms a request against one GET at a time", times, "x", 10.0))
    return result


@contextmanager
def delayed(endpoint: str) -> Iterator[str]:
    """The address of a proxy before that one."""
    command = [sys.executable, "-m", "benchmarks.delay", endpoint.rpartition(":")[2], str(LATENCY)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()
