"""
What the measuring scripts of this folder share. It needs nothing but Python, for each of them runs
in an environment of its own.
"""
import json
import statistics
import time


class Stopwatch:
    """The seconds between its clicks, and the seconds of CPU that this process used meanwhile."""

    def __init__(self):
        self.clicks = []  # (seconds of the clock, seconds of CPU in all threads)

    def click(self):
        self.clicks.append((time.perf_counter(), time.process_time()))

    def report(self, warm_up, seconds=None, **more):
        """
        Print one line of JSON: the seconds between clicks, but for the first `warm_up` of them, and
        what else is known. seconds: better known ones, instead of those between clicks.

        cpu_per_wall is the number of cores that were at work on average. Where it is far below the
        number of threads, something else was running, and the figures are worth nothing.
        """
        clicks = self.clicks[warm_up:]
        wall, cpu = (last - first for first, last in zip(clicks[0], clicks[-1], strict=True))
        times = [b[0] - a[0] for a, b in zip(clicks, clicks[1:], strict=False)]
        seconds = times if seconds is None else seconds[warm_up:]
        print(json.dumps(dict(
            seconds=[round(s, 4) for s in seconds], median=round(statistics.median(seconds), 4),
            cpu_per_wall=round(cpu / wall, 2), peak_mib=round(peak_mib()), **more)), flush=True)


def peak_mib():
    """The most memory that this process has held, in MiB. (getrusage would count its parent's.)"""
    with open("/proc/self/status", encoding="utf-8") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith("VmHWM"))
