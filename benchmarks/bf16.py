"""Measure whether bf16 trains the two small CNNs faster than fp32 on this CPU, for its row in flyte_ddp/machine.py.

Forward and backward pass on one thread, batches of 128 grey images of 28 pixels, channels-last, both in one process, in
turn. The target: where ``precision=auto`` chooses bf16 it is not slower. Elsewhere the ratio is only reported.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.measuring import Options, Result, Target
from benchmarks.running import run_python
from flyte_ddp.launch.supervise.rank import keep_freed_memory
from flyte_ddp.machine import BF16_INSTRUCTIONS, Bf16, read_cpu
from flyte_ddp.models import zoo
from flyte_ddp.models.images import InputSpec

BATCH, SIDE, CLASSES = 128, 28, 10
MODELS = ("tutorial", "small_cnn")
PRECISIONS = ("fp32", "bf16")


def measure(options: Options) -> Result:
    """Measures both models in a process of their own, and prints what is known of this CPU beside what was found."""
    steps, blocks = (2, 1) if options.quick else (20, options.number(25))
    output = options.folder / "bf16.json"
    run_python("benchmarks.bf16", json.dumps({"steps": steps, "blocks": blocks, "output": str(output)}))
    cpu = read_cpu()
    instructions = ", ".join(flag for flag in BF16_INSTRUCTIONS if flag in cpu.flags) or "no bf16 instructions"
    known = cpu.bf16_support()
    print(f"    {cpu.vendor} family {cpu.family} model {cpu.model}, {instructions}: known as {known.name.lower()}")
    result = Result(settings={"cpu": str(cpu), "batch_size": BATCH, "threads": 1, "steps_per_measurement": steps})
    for model, found in json.loads(output.read_text()).items():
        for precision, rates in found.items():
            for rate in rates:
                result.add(f"{model}: {precision}", rate, "samples/s")
        ratio = result.ratio(f"{model}: bf16 / fp32", f"{model}: bf16", f"{model}: fp32")
        bound = 1.0 if known is Bf16.FASTER else None
        result.targets.append(Target(f"{model}: rate in bf16, of that in fp32", ratio, "x", at_least=bound))
    return result


def rates(steps: int, blocks: int) -> dict[str, dict[str, list[float]]]:
    """Samples/s of each block of steps, by model and precision."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()
    spec = InputSpec(channels=1, height=SIDE, width=SIDE, mean=(0.5,), std=(0.5,))
    images = torch.randn(BATCH, 1, SIDE, SIDE).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (BATCH,))
    found: dict[str, dict[str, list[float]]] = {}
    for name in MODELS:
        model = zoo.build_model(name, CLASSES, spec).to(memory_format=torch.channels_last)
        found[name] = {precision: [] for precision in PRECISIONS}
        for block in range(blocks + 1):
            for precision in PRECISIONS:
                begin = time.perf_counter()
                for _ in range(steps):
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                        logits = model(images)
                    functional.cross_entropy(logits.float(), labels).backward()  # type: ignore[no-untyped-call]
                    model.zero_grad(set_to_none=True)
                if block:  # the first is for warming up
                    found[name][precision].append(steps * BATCH / (time.perf_counter() - begin))
    return found


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    Path(order["output"]).write_text(json.dumps(rates(order["steps"], order["blocks"])))
