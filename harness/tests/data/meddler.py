"""A proxy between a rank, which connects to LISTEN, and the first rank at PORT. It changes one
message:

- meddler.py LISTEN PORT DIRECTION KIND BYTES NEW_BYTES NEW_FIELD: the message has this kind and
  length, and goes `up` to the first rank or `down` from it. It gets a new length and a new first
  integer (- : unchanged); length 0 removes its bytes.
- meddler.py LISTEN PORT hello AT: changes byte AT of the first rank's first message.
- meddler.py LISTEN PORT order BACK VALUE: changes the integer that begins BACK bytes before the end
  of the first job."""

import select
import socket
import struct
import sys
import time

listen, port, direction, kind, *more = sys.argv[1:]
count, new_count, field = more if len(more) == 3 else ("0", "-", "-")
head = struct.pack("<QQ", int(kind), int(count))
GREETING = 120 + 104 + 4 + 4  # the first rank's hello, proof and two words (meet.h)


def edited(data: bytes, passed: int, source: socket.socket) -> bytes | None:
    """data with the message changed; None: it is not in it. passed: the number of bytes before."""
    if direction == "hello":
        return data[: int(kind)] + bytes([data[int(kind)] ^ 1]) + data[int(kind) + 1 :]
    if direction == "order":
        at = data.find(struct.pack("<Q", 1), max(0, GREETING - passed))
        n = struct.unpack_from("<Q", data, at + 8)[0] if 0 <= at <= len(data) - 16 else 0
        if not 64 < n < 1 << 16:
            return None
        end = at + 16 + n
        while len(data) < end:
            data += source.recv(end - len(data))
        at = end - int(kind)
        return data[:at] + struct.pack("<i", int(more[0])) + data[at + 4 :]
    at = data.find(head)
    if at < 0:
        return None
    end = at + len(head) + int(count)
    while len(data) < end:
        data += source.recv(end - len(data))
    body = data[at + len(head) : end]
    if field != "-":
        body = struct.pack("<i", int(field)) + body[4:]
    n = int(count if new_count == "-" else new_count)
    return data[:at] + struct.pack("<QQ", int(kind), n) + (body if n else b"") + data[end:]


with socket.create_server(("127.0.0.1", int(listen))) as server:
    server.settimeout(20)
    rank = server.accept()[0]
for _ in range(200):
    try:
        first = socket.create_connection(("127.0.0.1", int(port)))
        break
    except OSError:
        time.sleep(0.05)
ways = {rank: (first, "up"), first: (rank, "down")}
passed = {rank: 0, first: 0}
done = False
try:
    while True:
        for source in select.select(list(ways), [], [], 30)[0]:
            to, way = ways[source]
            data = source.recv(1 << 16)
            if not data:
                sys.exit(0)
            mine = way == ("up" if direction == "up" else "down")
            changed = edited(data, passed[source], source) if mine and not done else None
            passed[source] += len(data)
            done = done or changed is not None
            to.sendall(data if changed is None else changed)
except OSError:
    pass
