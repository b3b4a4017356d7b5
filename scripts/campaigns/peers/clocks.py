"""Times of a call on a GPU without the gaps between launches."""

import statistics
import time

MAX_CALLS = 20  # of a graph
LONG = 1e-3  # seconds that a graph should last


def by_graph(torch, call, runs):
    """Seconds of a call in a CUDA graph of several, replayed between events. They are queued
    while the device sleeps. A list of calls: one after the other, each on data of its own."""
    steps = call if isinstance(call, list) else [call]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in steps * (3 if len(steps) == 1 else 1):
            step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        steps[0]()
        torch.cuda.synchronize()
        once = time.perf_counter() - start
    rounds = max(1, min(MAX_CALLS, int(LONG / max(once, 1e-6)) + 1) // len(steps))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for step in steps:
                step()
    count = rounds * len(steps)
    if once * count > 0.1:
        runs = max(3, runs // 5)
    return median_of(torch, graph.replay, runs, stream) / count


def by_queue(torch, call, runs):
    """Seconds of a call that cannot be captured: calls are queued behind a sleep of the device, so
    that the host is ahead of it."""
    steps = call if isinstance(call, list) else [call]
    for _ in range(3):
        for step in steps:
            step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for step in steps:
        step()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    whole = time.perf_counter() - start
    if whole > 0.1:
        runs = max(3, runs // 5)

    def all_steps():
        for step in steps:
            step()

    return median_of(torch, all_steps, runs, torch.cuda.current_stream(), host) / len(steps)


def median_of(torch, work, runs, stream, host=5e-5):
    """Median seconds between two events around work; the device sleeps twice `host` before."""
    cycles = int(2 * host * 2e9) + 20000
    times = []
    with torch.cuda.stream(stream):
        for i in range(-2, runs):
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(cycles)
            a.record()
            work()
            b.record()
            b.synchronize()
            if i >= 0:
                times.append(a.elapsed_time(b) * 1e-3)
    return statistics.median(times)


def seconds(torch, call, runs):
    """(seconds, which clock): by a graph, else by a filled queue, and why."""
    try:
        return by_graph(torch, call, runs), "graph"
    except Exception as e:  # what a kernel does during a capture is its own affair
        why = f"{type(e).__name__}: {' '.join(str(e).split())[:80]}"
    torch.cuda.synchronize()
    return by_queue(torch, call, runs), f"events, queue filled ahead ({why})"
