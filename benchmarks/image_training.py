"""ResNet50 on random crops of 224 pixels from shards, on CPU ranks: how long ranks wait for images.

Decoder threads and the ranks' own threads share the cores. The figure is the time that the run's report calls data:
waiting for the images of the next batch, also for the first one, and normalising them.
"""

from benchmarks import generated_images
from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import run_library
from flyte_ddp.datasets import fetch


def measure(options: Options) -> Result:
    """Some steps of training, several times."""
    steps, side = (2, 32) if options.quick else (12, 224)
    index = generated_images.write_shards(options.folder / "shards", 8, 20 if options.quick else 125)
    hp = {
        "dataset": f"shards:{index}",
        "model": "resnet50",
        "augment": "resized_crop",
        "image_size": side,
        "batch_size": 64,
        "num_ranks": 2,
        "max_steps": steps,
        "log_interval": 1,
    }
    result = Result(settings={key: value for key, value in hp.items() if key != "dataset"})
    data = fetch(str(hp["dataset"]), "", options.folder / "prepared", progress="off")

    def train(repeat: int) -> None:
        run = run_library(hp, data, options.folder / f"run-{repeat}")
        seconds = run.of("end")[0]["seconds"]
        result.add("data", seconds["data"] / (seconds["total"] - seconds["evaluation"]), "%")
        result.add("training", run.of("train")[-1]["samples_per_second"], "images/s")

    interleaved(options, result, {"ours": train}, options.number(5))
    waiting = result.median("data")
    result.targets.append(Target("share of training in which ranks wait for images", waiting, "%", at_most=0.01))
    return result
