"""
Which CPUs the process may use, and what torch's libraries read when they start. It must be imported
before torch: with OMP_PROC_BIND=true torch's OpenMP pins the thread that imports it to one of
them.
"""
import os
import sys

if sys.platform == "win32":
    print("error: quartet needs Linux or macOS; on Windows, run it in WSL (wsl --install)",
          file=sys.stderr)
    sys.exit(2)

# For products of each new shape oneDNN writes a program, and keeps 1,024 of them; torch keeps 1,024
# descriptions beside them. Each takes 0.3 MiB. Texts have unequal lengths, so most shapes are never
# seen again, and a run would grow by 12 MiB an iteration. A training step uses fewer than 20.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")  # oneDNN's
os.environ.setdefault("LRU_CACHE_CAPACITY", "32")  # torch's

# the digits of an integer in a row or in what a program answers; Python reads 4,300 by itself
sys.set_int_max_str_digits(10**6)

CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count()))
