"""How fast the simulator is. One command: `python benchmarks/simulator.py`.

Worker-steps per second (minibatches that workers compute, cancelled ones included) of each policy on 64 equal workers,
in the quick way and, where there is none or links take time, in the event loop; and 10,000 workers for 1,000 updates of
K-batch-async, with the memory that takes.
"""

import json
import subprocess
import sys
import time
from typing import Any

from paceline.config.distributions import Exponential
from paceline.simulate.cluster import SimulatedCluster
from paceline.simulate.predict import simulate
from paceline.topologies import Link

WORKERS = 64
QUICK = {"sync": 1, "k-sync:k=48": 1, "k-batch-sync:k=64": 1, "async": 64, "k-batch-async:k=32": 2, "ssp:s=4": 64}
"""Policies, and how many updates to make for every update of sync."""
LOOP = ("k-async:k=32", "groups:size=8", "adaptive:of=k-batch-async,start=8")
BIG = """
import json, time
from paceline.simulate.cluster import SimulatedCluster
from paceline.config.distributions import Exponential
from paceline.simulate.predict import simulate

start = time.perf_counter()
cluster = SimulatedCluster(workers=10_000, compute=Exponential(1.0, 1.0))
told, _ = simulate("k-batch-async:k=K", cluster, updates=1000)
seconds = time.perf_counter() - start
memory = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
print(json.dumps([seconds, memory, told.seconds_per_update]))
"""


def steps(told: Any) -> int:
    """Minibatches that the workers computed."""
    return int(sum(told.staleness.histogram.values()) + told.cancelled + told.dropped)


def main() -> None:
    quiet = SimulatedCluster(workers=WORKERS, compute=Exponential(1.0, 1.0))
    wired = SimulatedCluster(workers=WORKERS, compute=Exponential(1.0, 1.0), size=1e6, link=Link(1e-4, 1e9))
    for spec, more in QUICK.items():
        updates = 40_000 * more
        start = time.perf_counter()
        told, _ = simulate(spec, quiet, updates=updates)
        print(f"{spec:34} {steps(told) / (time.perf_counter() - start):12,.0f} worker-steps per second", flush=True)
    for spec, cluster, words in [(spec, quiet, "") for spec in LOOP] + [("async", wired, ", with links")]:
        start = time.perf_counter()
        told, _ = simulate(spec, cluster, updates=3000 if spec != "async" else 100_000)
        rate = steps(told) / (time.perf_counter() - start)
        print(f"{spec + words:34} {rate:12,.0f} worker-steps per second, in the event loop", flush=True)
    for k in (100, 1000, 10_000):
        done = subprocess.run([sys.executable, "-c", BIG.replace("=K", f"={k}")], check=True, stdout=subprocess.PIPE)
        seconds, memory, each = json.loads(done.stdout)
        print(
            f"10,000 workers, 1,000 updates of k-batch-async:k={k}: {seconds:.1f} s, {memory:.0f} MB; "
            f"{each:.4g} s per update, by formula {2 * k / 10_000:.4g}"
        )


if __name__ == "__main__":
    main()
