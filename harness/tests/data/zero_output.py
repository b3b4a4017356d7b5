"""zero_output.py IN OUT: a wrong output for the inputs in IN, o = 0 of v's shape. Needs Python
alone, as the interpreter of the report need not have safetensors."""

import json
import math
import struct
import sys

with open(sys.argv[1], "rb") as f:
    header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
shape = header["v"]["shape"]
size = 4 * math.prod(shape)
text = json.dumps({"o": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
with open(sys.argv[2], "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text + bytes(size))
