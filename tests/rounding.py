"""Run the test suite under several rounding regimes: a result that only one processor gives is no result.

    python -m tests.rounding [REGIME ...] [-- PYTEST ARGUMENTS]

Each regime is a set of environment variables that change the order in which floating-point numbers are added: the
vector unit that PyTorch uses, the code path of MKL, the number of threads, and the seed of every test. Without names
all regimes run, one after another. Exits with 1 if a test fails under any of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
REGIMES: dict[str, dict[str, str]] = {
    "default": {**ONE_THREAD, "ATEN_CPU_CAPABILITY": "default"},
    "avx2": {**ONE_THREAD, "ATEN_CPU_CAPABILITY": "avx2"},
    "avx512": {**ONE_THREAD, "ATEN_CPU_CAPABILITY": "avx512"},
    "mkl_compatible": {**ONE_THREAD, "MKL_CBWR": "COMPATIBLE"},
    "mkl_avx2": {**ONE_THREAD, "MKL_CBWR": "AVX2"},
    "mkl_sse4": {**ONE_THREAD, "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "two_threads": {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "LAPWING_TEST_THREADS": "2"},
    "seed1": {**ONE_THREAD, "LAPWING_TEST_SEED": "1"},
    "seed2": {**ONE_THREAD, "LAPWING_TEST_SEED": "2"},
}


def main(arguments: list[str]) -> int:
    """Run pytest once for each regime and print which passed."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    names, extra = arguments[:cut] or list(REGIMES), arguments[cut + 1 :]
    unknown = sorted(set(names) - set(REGIMES))
    if unknown:
        print(f"unknown regimes: {', '.join(unknown)}; expected some of {', '.join(REGIMES)}.", file=sys.stderr)
        return 2
    failed = []
    for name in names:
        print(f"== {name}: {' '.join(f'{key}={value}' for key, value in REGIMES[name].items())}", flush=True)
        workers = ["-n", "1" if name == "two_threads" else "2"]
        start = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=line", *workers, *extra]
        code = subprocess.run(command, env={**os.environ, **REGIMES[name]}, check=False).returncode
        print(f"== {name}: {'passed' if code == 0 else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True)
        failed += [name] if code else []
    print(f"{len(names) - len(failed)} passed, {len(failed)} failed" + (f": {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
