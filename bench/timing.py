"""How a call is timed: in a CUDA graph over cold inputs, as one eager call, and on the host.

All of a row's candidates take turns, shot by shot, so that what the machine does meanwhile touches each alike.

- *Graph*: some calls over different inputs are captured in one CUDA graph and replayed between two events. Before each
  replay a buffer several times the size of L2 is read, and the outputs of the calls are memory of their own: every call
  finds its inputs and outputs in device memory, none in L2. While that buffer is read, the host queues the replay.
- *Eager*: two events around each of a few calls in a row, inputs rotated, nothing captured or flushed: what a loop of
  eager calls sees. Where the GPU is the faster one, this is the host's time.
- *Host*: a clock around 100 calls, the queue empty before them: what a call costs the thread that makes it.

On a CPU there is one clock around one call.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, Protocol, TypeVar

import torch
from jit_kernels.bench.record import Estimate, agree

from jit_kernels.messages import first_line

Call = Callable[[], Any]
Shot = Callable[[], Callable[[], float]]  # takes one sample; what it returns gives its microseconds, once finished
Key = TypeVar("Key", bound=Hashable)

MOST_BLOCKS = 8  # after that many without agreement a figure is called unstable
HOST_CALLS, EAGER_CALLS = 100, 5
GRAPH_MICROSECONDS = 3000  # about how long a graph runs
GRAPH_CALLS = (4, 128)  # fewest and most calls in one
FLUSHED = 8  # times the size of L2 that is read to flush it: long enough for the host to queue what comes next


class Timer(Protocol):
    kind: Literal["cuda", "cpu"]
    block: int  # shots a candidate takes between two looks at whether it is stable

    def running(self) -> Any: ...  # a context around everything that is prepared and timed
    def synchronize(self) -> None: ...
    def eager(self, calls: Sequence[Call]) -> Shot: ...
    def queued(self, call: Call) -> Shot: ...
    def graph(self, calls: Sequence[Call]) -> tuple[Shot, list[Any]]: ...
    def host(self, calls: Sequence[Call]) -> Shot: ...
    def peak_bytes(self, call: Call) -> int | None: ...


class NoGraphError(Exception):
    """A call can't be captured in a CUDA graph, or there are none here."""


class CudaTimer:
    """Times on one GPU, on a stream of its own."""

    kind: Literal["cuda"] = "cuda"
    block = 10

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self._others = torch.ones(FLUSHED * l2 // 4, device=device)
        self._sum = torch.empty((), device=device)

    @contextmanager
    def running(self) -> Iterator[None]:
        # One stream for preparation and capture: autograd runs a backward on the stream of its forward.
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream), torch.no_grad():
            yield
            self.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def flush(self) -> None:
        """Puts other data into L2: read, not written, so that nothing is left to be written back."""
        torch.sum(self._others, dim=0, out=self._sum)

    def eager(self, calls: Sequence[Call]) -> Shot:
        turns = _forever(calls)

        def shot() -> Callable[[], float]:
            some = [next(turns) for _ in range(EAGER_CALLS)]
            self.synchronize()
            samples = [self._between_events(call, 1) for call in some]
            return lambda: statistics.median(sample() for sample in samples)

        return shot

    def queued(self, call: Call) -> Shot:
        """The device's time for one call that it finds queued: nothing of the host's is in it."""

        def shot() -> Callable[[], float]:
            self.flush()
            return self._between_events(call, 1)

        return shot

    def graph(self, calls: Sequence[Call]) -> tuple[Shot, list[Any]]:
        """One graph of these calls in their order, and what they return: memory that a replay writes again.

        Raises:
            NoGraphError: a call does what a capture forbids.
        """
        graph = torch.cuda.CUDAGraph()
        self.synchronize()
        collecting = gc.isenabled()
        gc.disable()  # a collection in the middle could free what a capture may not touch
        try:
            graph.capture_begin()
            try:
                outputs = [call() for call in calls]
            except BaseException:
                with suppress(RuntimeError):  # what broke the capture says more
                    graph.capture_end()
                raise
            graph.capture_end()
        except Exception as error:
            with suppress(RuntimeError):  # reports the failed capture once more: here, not in the next candidate
                self.synchronize()
            raise NoGraphError(first_line(error)) from error
        finally:
            if collecting:
                gc.enable()

        def shot() -> Callable[[], float]:
            self.flush()
            return self._between_events(graph.replay, len(calls))

        return shot, outputs

    def host(self, calls: Sequence[Call]) -> Shot:
        turns = _forever(calls)

        def shot() -> Callable[[], float]:
            some = [next(turns) for _ in range(HOST_CALLS)]
            self.synchronize()
            began = time.perf_counter()
            for call in some:
                call()
            took = time.perf_counter() - began
            return lambda: took * 1e6 / HOST_CALLS

        return shot

    def peak_bytes(self, call: Call) -> int | None:
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        return torch.cuda.max_memory_allocated(self.device) - before

    def _between_events(self, call: Call, times: int) -> Callable[[], float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        return lambda: start.elapsed_time(end) * 1e3 / times


class CpuTimer:
    """A clock around calls on a CPU. Its figures speak of that CPU alone."""

    kind: Literal["cpu"] = "cpu"
    block = 3

    @contextmanager
    def running(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    def synchronize(self) -> None:
        pass

    def eager(self, calls: Sequence[Call]) -> Shot:
        turns = _forever(calls)

        def shot() -> Callable[[], float]:
            call = next(turns)
            began = time.perf_counter()
            call()
            took = time.perf_counter() - began
            return lambda: took * 1e6

        return shot

    def queued(self, call: Call) -> Shot:
        return self.eager([call])

    def graph(self, calls: Sequence[Call]) -> tuple[Shot, list[Any]]:
        raise NoGraphError("there are no CUDA graphs on a CPU")

    def host(self, calls: Sequence[Call]) -> Shot:
        return self.eager(calls)

    def peak_bytes(self, call: Call) -> int | None:
        return None


def timer_of(device: torch.device) -> CudaTimer | CpuTimer:
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()


def interleave(shots: Mapping[Key, Shot], timer: Timer) -> dict[Key, Estimate]:
    """Lets the candidates take turns in blocks, each until its last three blocks agree or `MOST_BLOCKS` are taken."""
    blocks: dict[Key, list[list[float]]] = {key: [] for key in shots}
    for shot in shots.values():
        shot()  # warms up; not counted
    going = dict(shots)
    while going:
        waiting: dict[Key, list[Callable[[], float]]] = {key: [] for key in going}
        for _ in range(timer.block):
            for key, shot in going.items():
                waiting[key].append(shot())
        timer.synchronize()
        for key, samples in waiting.items():
            blocks[key].append([sample() for sample in samples])
        going = {key: shot for key, shot in going.items() if not _done(blocks[key])}
    return {key: Estimate.of(taken) for key, taken in blocks.items()}


def _done(blocks: Sequence[Sequence[float]]) -> bool:
    return agree(blocks) or len(blocks) >= MOST_BLOCKS


def quick_estimate(call: Call, timer: Timer) -> float:
    """Microseconds of one call, roughly, with as little of the host's time in it as can be had."""
    shot = timer.queued(call)
    samples = [shot() for _ in range(4)]
    timer.synchronize()
    return min(sample() for sample in samples[1:])


def graph_calls(microseconds: float) -> int:
    """How many calls of about that length a graph holds."""
    fewest, most = GRAPH_CALLS
    return max(fewest, min(most, round(GRAPH_MICROSECONDS / max(microseconds, 1e-3))))


def in_turn(calls: Sequence[Call], count: int) -> list[Call]:
    """``count`` of them, starting over where they run out."""
    turns = _forever(calls)
    return [next(turns) for _ in range(count)]


def _forever(calls: Sequence[Call]) -> Iterator[Call]:
    while True:
        yield from calls
