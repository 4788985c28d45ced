#!/usr/bin/env bash
# torchcodec 0.17.0 and torchvision 0.29.2: a JPEG whose XMP data come before its EXIF data is not turned upright.
#
# Both apply the EXIF orientation, and look for it in the first APP1 segment alone. XMP data are in an APP1 segment, too.
# Where the segment with XMP comes first, the picture stays as it is stored, without a word. Pillow's exif_transpose turns
# both pictures. So a set of photos that some programs have edited has pictures in two orientations.
#
# Seen on 29 November 2026, Python 3.11, torch 2.15.0, Pillow 13.0.0; sizes are height x width of a stored 16 x 32:
#   EXIF, XMP: torchcodec 32 x 16, torchvision 32 x 16, Pillow 32 x 16
#   XMP, EXIF: torchcodec 16 x 32, torchvision 16 x 32, Pillow 32 x 16
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
"$folder/venv/bin/uv" pip install --quiet --python "$folder/venv/bin/python" \
    torch==2.15.0 torchvision==0.29.2 torchcodec==0.17.0 pillow==13.0.0 numpy==2.4.6
cat > "$folder/turn.py" <<'END'
import io
import struct

import torch
from PIL import Image, ImageOps
from torchcodec.decoders import decode_image
from torchvision.io import decode_jpeg


def app1(payload: bytes) -> bytes:
    return b"\xff\xe1" + struct.pack(">H", len(payload) + 2) + payload


orientation = Image.Exif()
orientation[0x0112] = 6
segments = {
    "EXIF": app1(b"Exif\0\0" + orientation.tobytes().removeprefix(b"Exif\0\0")),
    "XMP": app1(b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta xmlns:x='adobe:ns:meta/'/>"),
}
stored = io.BytesIO()
Image.new("RGB", (32, 16)).save(stored, "JPEG")
for order in (("EXIF", "XMP"), ("XMP", "EXIF")):
    content = stored.getvalue()[:2] + b"".join(segments[name] for name in order) + stored.getvalue()[2:]
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    width, height = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).size
    sizes = {
        "torchcodec": decode_image(data, mode="RGB").shape[1:],
        "torchvision": decode_jpeg(data, apply_exif_orientation=True).shape[1:],
        "Pillow": (height, width),
    }
    print(f"{', '.join(order)}:", ", ".join(f"{name} {size[0]} x {size[1]}" for name, size in sizes.items()))
END
"$folder/venv/bin/python" "$folder/turn.py" 2> /dev/null | tee "$folder/seen"
diff "$folder/seen" - <<'END'
EXIF, XMP: torchcodec 32 x 16, torchvision 32 x 16, Pillow 32 x 16
XMP, EXIF: torchcodec 16 x 32, torchvision 16 x 32, Pillow 32 x 16
END
