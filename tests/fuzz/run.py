"""Runs the fuzzers one after the other: `run.py [--seconds 60] [attach checkpoint arguments ragged] [--input FILE]`."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILT = ROOT / "build" / "sanitized"
OUT = ROOT / "build" / "fuzz"
NAMES = ("attach", "checkpoint", "arguments", "ragged")
LIMITS = ("-timeout=20", "-rss_limit_mb=4096", "-max_len=8192", "-print_final_stats=1")
WRITE_SEEDS = """
import importlib, sys
target = importlib.import_module(sys.argv[1])
for number, seed in enumerate(target.seeds()):
    with open(f"{sys.argv[2]}/seed-{number}", "wb") as file:
        file.write(seed)
"""


def environment() -> dict[str, str]:
    """The instrumented package, and the runtimes that it needs from the start."""
    compiler = os.environ.get("CXX", "g++")

    def runtime(name: str) -> str:
        found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        return os.path.realpath(found.stdout.strip())

    preload = [str(BUILT / "libfuzzer.so"), runtime("libasan.so"), runtime("libstdc++.so")]
    return os.environ | {
        "PYTHONPATH": f"{BUILT}:{HERE}:" + os.environ.get("PYTHONPATH", ""),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": ":".join(preload),
        # Python leaks on purpose at its end, and libFuzzer comes before the address sanitizer.
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def fuzz(name: str, seconds: int, given: str | None) -> bool:
    """Returns whether the target stood it: inputs for so many seconds, or the one given."""
    corpus, seeds = OUT / name / "corpus", OUT / name / "seeds"
    for directory in (corpus, seeds):
        directory.mkdir(parents=True, exist_ok=True)
    python, target, env = sys.executable, f"fuzz_{name}", environment()
    subprocess.run([python, "-c", WRITE_SEEDS, target, str(seeds)], env=env, check=True)
    limits = [f"-max_total_time={seconds}", f"-artifact_prefix={OUT / name}/", *LIMITS]
    inputs = [str(corpus), str(seeds)] if given is None else [given]
    log = OUT / name / "log"
    with log.open("w") as out:
        command = [python, str(HERE / "harness.py"), target, *inputs, *limits]
        status = subprocess.run(command, env=env, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    text = log.read_text(errors="replace")
    runs = re.findall(r"number_of_executed_units: (\d+)", text)
    blocks = re.findall(r"cov: (\d+) ft: (\d+)", text)
    reached = f"{int(blocks[-1][0]):,} blocks, {int(blocks[-1][1]):,} features" if blocks else "nothing"
    print(f"fuzz {name}: {int(runs[-1]) if runs else 0:,} executions in {seconds} s, {reached} reached", flush=True)
    if status:
        found = re.search(r"=== Uncaught|runtime error|==\d+== ?ERROR", text)
        print(text[found.start() if found else 0 :][:6000])
        print(f"fuzz {name}: FAILED; the whole log is in {log}, the input beside it", flush=True)
    return status == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each fuzzer")
    parser.add_argument("--input", help="run this one only")
    parser.add_argument("names", nargs="*", default=NAMES, help=f"of {', '.join(NAMES)}")
    arguments = parser.parse_args()
    stood = [fuzz(name, arguments.seconds, arguments.input) for name in arguments.names]
    sys.exit(not all(stood))


if __name__ == "__main__":
    main()
