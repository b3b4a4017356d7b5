"""zero_output.py IN OUT: a wrong output for the inputs in IN, o = 0 of v's shape."""

import json
import struct
import sys

import numpy as np

import deltaproof

with open(sys.argv[1], "rb") as f:
    header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
deltaproof.save(sys.argv[2], {"o": np.zeros(header["v"]["shape"], np.float32)})
