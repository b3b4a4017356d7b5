"""strangers.py PORT SILENT SLOW JUNK: opens so many connections to a first process that waits for
its ranks. SILENT ones send nothing, SLOW ones a byte a second, JUNK ones meaningless bytes. Prints
`there` when all are open, and runs until it is killed."""

import contextlib
import random
import socket
import sys
import time

port, silent, slow, junk = map(int, sys.argv[1:])


def connect() -> socket.socket:
    for _ in range(200):
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            time.sleep(0.05)
    sys.exit("nobody listens")


quiet = [connect() for _ in range(silent)]
drops = [connect() for _ in range(slow)]
for i in range(junk):
    with contextlib.suppress(OSError):
        connect().sendall(random.Random(i).randbytes(4096))
print("there", flush=True)
while True:
    for s in drops:
        with contextlib.suppress(OSError):
            s.send(b"d")
    time.sleep(1)
