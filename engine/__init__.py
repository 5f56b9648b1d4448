"""
The engine room: what makes a run fit, scale and survive. It need not be read to understand PPO.

This file notes which CPUs the process may use, and sets what torch's libraries read when they
start. It must be imported before torch: with OMP_PROC_BIND=true torch's OpenMP pins the thread that
imports it to one of them.
"""
import os
import sys

if sys.platform == "win32":
    print("error: quartet needs Linux or macOS; on Windows, run it in WSL (wsl --install)",
          file=sys.stderr)
    sys.exit(2)

# oneDNN writes a program for products of each new shape, and keeps 1,024 of them unless it is told
# otherwise. With texts of unequal lengths most are never used again, and take up to 80 MiB.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")

CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count()))
