"""What the CPU is, by its own description, and whether training in bf16 pays on it."""

from dataclasses import replace
from pathlib import Path

import pytest
from training_runs import train_in

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.machine import resources
from flyte_ddp.core.machine.resources import Bf16, Cpu, read_cpu
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.core.training import train as training
from flyte_ddp.plans import resolve

HP = Hyperparameters(num_ranks=1, backend="gloo")
# /proc/cpuinfo as it was on real machines, of which lines and flags that nobody asks for are left out.
AMD = """\
processor	: 0
vendor_id	: AuthenticAMD
cpu family	: 25
model		: 17
model name	: AMD EPYC
flags		: fpu vme de pse sse4_2 avx f16c avx2 avx512f avx512dq avx512vl avx512_bf16 avx512_vnni rdpid fsrm

processor	: 1
cpu family	: 25
"""
SAPPHIRE_RAPIDS = """\
vendor_id	: GenuineIntel
cpu family	: 6
model		: 143
model name	: Intel(R) Xeon(R) Platinum 8488C
flags		: fpu vme avx f16c avx2 avx512f avx_vnni avx512_bf16 avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8
vmx flags	: vnmi invvpid ept_x_only ept_ad
"""
ARM = """\
processor	: 0
BogoMIPS	: 38.40
Features	: fp asimd evtstrm aes asimddp sve sve2 svebf16 i8mm bf16 dgh bti
CPU implementer	: 0x41
CPU architecture: 8
CPU part	: 0xd81
"""
# Emerald Rapids, whose AMX a hypervisor hides.
EMERALD_RAPIDS = SAPPHIRE_RAPIDS.replace("143", "207").replace("amx_bf16 ", "").replace("amx_tile amx_int8", "")


@pytest.mark.parametrize(
    ("text", "description", "worth"),
    [
        (AMD, "AuthenticAMD family 25 model 17 with avx512_bf16", Bf16.FASTER),
        (AMD.replace("avx512_bf16 ", ""), "AuthenticAMD family 25 model 17 with avx512_vnni", Bf16.NONE),
        (SAPPHIRE_RAPIDS, "GenuineIntel family 6 model 143 with amx_bf16", Bf16.FASTER),
        (EMERALD_RAPIDS, "GenuineIntel family 6 model 207 with avx512_bf16", Bf16.SLOWER),
        (SAPPHIRE_RAPIDS.replace("Genuine", "Unheard"), "UnheardIntel family 6 model 143 with amx_bf16", Bf16.SLOWER),
        (ARM, "0x41 family 8 model 0xd81 with sve", Bf16.NONE),
    ],
)
def test_bf16_is_taken_where_it_was_found_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, description: str, worth: Bf16
) -> None:
    """By auto; where there are instructions for it, who asks for it gets it."""
    (tmp_path / "cpuinfo").write_text(text)
    cpu = read_cpu(tmp_path / "cpuinfo")
    assert (str(cpu), cpu.look_up_bf16_speed()) == (description, worth)
    monkeypatch.setattr(resources, "read_cpu", lambda: cpu)
    for model in ("small_cnn", "resnet18"):
        found = resolve.detect_hardware(replace(HP, model=model))
        assert found.precision == ("bf16" if worth is Bf16.FASTER and model != "resnet18" else "fp32")
    if worth is Bf16.NONE:
        with pytest.raises(UserError, match="precision='bf16': this CPU does not support bf16"):
            resolve.detect_hardware(replace(HP, precision="bf16"))
    else:
        assert resolve.detect_hardware(replace(HP, precision="bf16")).precision == "bf16"


def test_a_cpu_that_nothing_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    cpu = read_cpu(tmp_path / "none")
    assert cpu == Cpu("", "", "", frozenset())
    assert (str(cpu), cpu.look_up_bf16_speed()) == ("arm64", Bf16.NONE)


@pytest.mark.parametrize("worth", [Bf16.SLOWER, Bf16.FASTER])
def test_ranks_take_bf16_only_where_all_of_them_gain(digits: Path, tmp_path, monkeypatch, worth: Bf16) -> None:
    """By what the ranks exchange once they have joined."""
    monkeypatch.setattr(training, "gather_objects", lambda _: [Bf16.FASTER, worth, Bf16.FASTER])
    [start, *_] = read_records(train_in(tmp_path / "run", replace(HP, max_steps=1), digits).metrics)
    assert start["precision"] == ("bf16" if worth is Bf16.FASTER else "fp32")
