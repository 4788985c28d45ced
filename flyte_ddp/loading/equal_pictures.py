"""Warn if most pictures are equal after decoding: decoding may have lost what they show."""

from collections import Counter

from flyte_ddp.loading.split import Split
from flyte_ddp.order.sampling import Indices

PICTURES_COMPARED = 64  # samples that callers pass
LEAST = 8  # of fewer samples, most may be equal by chance
SHARE = 0.75  # of equal pictures, from which to warn


def describe_equal_pictures(split: Split, samples: Indices) -> str:
    """Return a warning if at least 3/4 of the first samples of ``split`` are equal pictures, else "".

    Loads these ``samples`` as an evaluation does. Fewer than 8 samples give no warning.
    """
    batch = split.gather(samples)
    pixels = [image.tobytes() for image in batch.images.cpu().numpy()]
    [(commonest, count)] = Counter(pixels).most_common(1)
    if len(pixels) < LEAST or count < SHARE * len(pixels):
        return ""
    names = batch.names or [f"sample {sample}" for sample in samples.tolist()]
    one, other = [name for name, content in zip(names, pixels, strict=True) if content == commonest][:2]
    return (
        f"warning: {count} of the first {len(pixels)} pictures are equal as the model gets them, such as {one} and "
        f"{other}: look at them; their differences may have been lost when they were stored, or in the conversion to "
        "8-bit RGB"
    )
