"""A program as a subject (harness/library/command.h) that does what $BAD says, else what
harness/subject/example_program.py does. The folder of that file is $EXAMPLE. The file $NOTED gets
the number of a process that should not survive."""

import os
import signal
import sys
import time

sys.path.insert(0, os.environ["EXAMPLE"])
import example_program as example
import numpy as np

BAD = os.environ.get("BAD", "")
META = {
    "vk": {"state_layout": "vk"},
    "layout": {"state_layout": "diagonal"},
    "claims": {"base": "bf16", "claim": "tf32"},
    "agrees": {"base": "fp32", "claim": "fp32"},
    "first": {"base": "fp32", "claim": "fp32"},
}
calls = []


def spoil(results: example.Arrays, meta: example.Meta) -> example.Arrays:
    """Errors in the results themselves."""
    o = results["o"]
    if BAD == "leak" and len(o) > 9:  # a row that sees what comes after it
        o[2] += np.float32(1e-3) * o[9]
    elif BAD == "chunk" and meta.get("chunk") == "16":
        o[1] *= np.float32(1.25)
    elif BAD == "late" and len(o) > 5:
        o[5:] *= np.float32(1.25)
    elif BAD == "shape":
        results["o"] = o[:-1]
    elif BAD == "name":
        results["out"] = results.pop("o")
    elif BAD == "no-state" or (BAD == "forgets" and os.path.exists(os.environ["NOTED"])):
        del results["final_state"]
    elif BAD in ("gradient", "inner"):  # db: dbeta inside FLA's functions
        results["dq" if BAD == "gradient" else "db"] = o
    elif BAD == "alias":  # as FLA's own code and its batches have it
        results["o"] = o[None]
        results["ht"] = results.pop("final_state")
    elif BAD == "twice-named":
        results["ht"] = results["final_state"]
    elif BAD in ("vk", "vk-unsaid"):
        results["final_state"] = results["final_state"].swapaxes(2, 3)
    elif BAD == "no-o":
        del results["o"]
    return results


def write_wrong(out: str) -> bool:
    """Errors of OUT as a file; returns whether there was one."""
    if BAD == "no-file":
        return True
    if BAD == "garbage":
        with open(out, "wb") as f:
            f.write(b"no tensors at all")
    elif BAD == "pipe":
        os.mkfifo(out)
    elif BAD == "folder":
        os.mkdir(out)
    elif BAD == "link":
        os.symlink(os.environ["NOTED"] + ".elsewhere", out)
    else:
        return False
    return True


def fork_one() -> None:
    """A child in a session of its own, which holds the streams and would go on. Returns once the
    child is noted: its parent's end may be its own, on a busy machine before its first line."""
    noted, note = os.pipe()
    if os.fork():
        os.close(note)
        os.read(noted, 1)  # its end: the child has closed the pipe
        os.close(noted)
        return
    os.setsid()
    with open(os.environ["NOTED"], "a") as f:
        f.write(f"{os.getpid()}\n")
    os.close(note)
    time.sleep(300)
    os._exit(0)


def misbehave() -> None:
    """Errors that end or stop the process itself."""
    if BAD == "crash":
        print("about to crash", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    elif BAD == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif BAD == "raise":
        raise ValueError("no luck\x1b[2J")
    elif BAD == "exit":
        print("first line\nsecond line", file=sys.stderr, flush=True)
        os._exit(5)
    elif BAD == "exit0":
        os._exit(0)
    elif BAD == "hang":
        print("still busy", file=sys.stderr, flush=True)
        time.sleep(300)
    elif BAD == "child":
        fork_one()
    elif BAD == "linger":
        fork_one()
        time.sleep(300)
    elif BAD == "eat":
        np.ones(1 << 28)
    elif BAD == "talks":
        sys.stderr.write("x" * (1 << 20) + "\n")
    elif BAD == "unsupported":
        raise example.Unsupported("not on a Monday")


def call(path: str, out: str) -> None:
    misbehave()
    x, meta = example.read(path)
    if write_wrong(out):
        return
    results = example.forward(x, meta)
    if BAD == "unsteady":
        calls.append(path)
        results["o"] *= np.float32(1 + 2e-7 * (len(calls) % 2))
    elif BAD == "first":  # of this process
        calls.append(path)
        results["o"] *= np.float32(1 + (len(calls) == 1))
    elif BAD == "second":
        calls.append(path)
        results["o"] *= np.float32(1 + (len(calls) == 2))
    elif BAD == "stale":  # outputs are those of the first call with this shape
        calls.append(results["o"])
        results["o"] = calls[0] if calls[0].shape == results["o"].shape else results["o"]
    example.write(out, spoil(results, meta), META.get(BAD, {}))
    if BAD == "short":
        with open(out, "r+b") as f:
            f.truncate(os.path.getsize(out) - 7)
    if BAD == "forgets":
        open(os.environ["NOTED"], "w").close()


def serve() -> None:
    """Answers that are none."""
    for line in sys.stdin:
        if BAD == "chatty":
            print("loading the model", flush=True)
        elif BAD == "twice":
            call(*line.split())
            print("ok\nok", flush=True)
        elif BAD == "ahead":  # the answer to the next line, too
            call(*line.split())
            print("ok", flush=True)
            time.sleep(0.01)
            print("ok", flush=True)
        elif BAD == "endless":
            print("x" * 9000, end="", flush=True)
        elif BAD == "deaf":
            os.close(1)
            time.sleep(300)
        else:
            example.call = call
            sys.stdin = iter([line])
            example.serve()


def main() -> int:
    if len(sys.argv) < 3:
        if BAD == "mute":
            time.sleep(300)
        serve()
        return 0
    example.call = call
    return example.main()


if __name__ == "__main__":
    sys.exit(main())
