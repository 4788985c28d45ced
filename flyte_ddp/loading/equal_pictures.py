"""A warning where most pictures are one and the same: what they show may not be in what is decoded."""

from collections import Counter

from flyte_ddp.loading.split import Split
from flyte_ddp.order.sampling import Indices

LOOKED_AT = 64
LEAST = 8  # of fewer, chance may make most equal
SHARE = 0.75


def describe_equal_pictures(split: Split, samples: Indices) -> str:
    """Return a warning if at least three quarters of these samples, the first ones, are equal pictures, else "".

    Reads and decodes the pictures, and compares them as evaluations see them. Fewer than 8 give no warning.
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
        f"{other}: look at them; what tells them apart may have been lost when they were stored, or is not in their "
        "8 bits of red, green and blue"
    )
