"""
The CPUs of this process, and settings that torch's libraries read when they start. It must be
imported before torch: with OMP_PROC_BIND=true torch's OpenMP binds the importing thread to one CPU.
"""
import os
import sys

if sys.platform == "win32":
    print("error: quartet needs Linux or macOS; on Windows, run it in WSL (wsl --install)",
          file=sys.stderr)
    sys.exit(2)

# For products of each new shape oneDNN writes a program, and keeps 1,024 of them; torch keeps 1,024
# descriptions, too. Each takes 0.3 MiB. Texts have unequal lengths, so most shapes come only once,
# and a run would grow by 12 MiB an iteration. A training step uses fewer than 20.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")  # oneDNN's
os.environ.setdefault("LRU_CACHE_CAPACITY", "32")  # torch's

# the most digits of an integer in a row or in a program's answer; Python's own limit is 4,300
sys.set_int_max_str_digits(10**6)

CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count()))
