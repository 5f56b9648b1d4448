"""
The engine room: what makes a run fit, scale and survive. It need not be read to understand PPO.

This file notes which CPUs the process may use. It must be imported before torch: with
OMP_PROC_BIND=true torch's OpenMP pins the thread that imports it to one of them.
"""
import os
import sys

if sys.platform == "win32":
    print("error: quartet needs Linux or macOS; on Windows, run it in WSL (wsl --install)",
          file=sys.stderr)
    sys.exit(2)

CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count()))
