"""One thread for torch, set before it is loaded.

The tests' matrices are tiny, and a machine that runs several test processes (or anything else) beside each other makes
threads that wait for their fellows ten times slower than one thread alone.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
