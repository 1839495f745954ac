# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m bench [NAME …]`: measures the claims, all of them or those named. A claim is a line below and a module.

What follows a single name are that module's own options.
"""

from __future__ import annotations

import argparse
import importlib
import sys

CLAIMS = {  # name: (module with main(arguments) -> exit status, what it shows)
    "attribution": ("bench.attribution.__main__", "the agent knows who used how much of a GPU, better than NVML alone"),
    "calibration": (
        "bench.calibration.__main__",
        "the simulated GPU's contention is of the order that was published for real ones",
    ),
    "http": (
        "bench.latency.http",
        "the probes of the signal http cost an unrelated system call less than a microsecond",
    ),
    "enforcement": (
        "bench.enforcement.__main__",
        "online p99 stays at its target and offline work gets what is left, beside every other way of sharing",
    ),
    "convergence": (
        "bench.enforcement.convergence",
        "pictures of how the law converges; they are judged by eye",
    ),
    "deadline": (
        "bench.enforcement.deadline",
        "periodic tasks miss no deadline up to the load that is admitted, and without turns they do",
    ),
    "fleet-extender": (
        "bench.fleet.extender",
        "50 pods a second are placed on 8,000 GPUs, a filter takes 20 ms at most, and no kill gives a GPU to two pods",
    ),
    "fleet-plan": (
        "bench.fleet.plan",
        "a plan for 10,000 slots and jobs takes two seconds, is within 1 % of the optimum and beats placing pod by pod",
    ),
    "fleet-weights": (
        "bench.fleet.weights",
        "what a pair gives is predicted to .05 by the prior, and to .08 for unseen pairs of a table that is half seen",
    ),
    "fleet-analyse": (
        "bench.fleet.analyse",
        "82,247 jobs of Philly are analysed in 5 s and 200 MB, and the figures agree in every digit",
    ),
    "fleet-split": (
        "bench.fleet.split",
        "up to 4 services' SLO is split in 10 ms, within 1 % of the best, and the plan fits wherever an equal one does",
    ),
    "fleet-simulate": (
        "bench.fleet.simulate",
        "the simulator is near published runs, and BSBF reaches its goals beside preemption and first-fit sharing",
    ),
    "gputop": (
        "bench.latency.gputop",
        "the live view takes at most 3 % of a core, with 8 GPUs, 100 containers and 200 processes",
    ),
    "hostile": (
        "bench.hostile.cost",
        "beside each hostile program an online service keeps 1.1 times its p99",
    ),
    "kernels": (
        "bench.kernels.__main__",
        "everything works on the kernels that distributions ship, or is refused clearly",
    ),
    "launch": (
        "bench.latency.launch_cost",
        "at a launch the agent's program costs 250 ns more than an empty one at most",
    ),
    "pcie": (
        "bench.pcie.run",
        "copies are shared by weight to 5 %, and an online one waits for the printed bound and 1 ms at most",
    ),
    "probes": (
        "bench.latency.probes",
        "on NVIDIA's own libraries a probe costs a fifth of one at a function's first instruction",
    ),
    "reaction": ("bench.latency.reaction", "how fast the gate shuts, and how fast the loop gives offline work less"),
    "scale": (
        "bench.latency.scale",
        "1,000 containers, 10,000 short-lived processes, 50,000 kernel functions: all is counted, all is bounded",
    ),
    "soak": (
        "bench.soak.__main__",
        "in hours of containers that come and go nothing grows and attribution does not drift",
    ),
    "storm": ("bench.storm.__main__", "whatever is killed, stopped or starved of the agent, every workload runs on"),
    "watching": ("bench.latency.watching", "being watched costs at most a twentieth more than empty probes do"),
}


def main() -> int:
    """Exit code: 0 when every claim holds."""
    listing = "\n".join(f"  {name:<14} {claim}" for name, (_, claim) in CLAIMS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench", epilog=listing, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="claims to measure (default: all)")
    parsed, options = parser.parse_known_args()
    names = parsed.names or list(CLAIMS)
    if unknown := [name for name in names if name not in CLAIMS]:
        parser.error(f"no claim is called {unknown[0]!r}; there are: {', '.join(CLAIMS)}")
    if options and len(names) != 1:
        parser.error(f"{options[0]} is for one claim: name it alone")
    failed = [name for name in names if not _holds(name, options)]
    print(
        f"bench: {len(names) - len(failed)} of {len(names)} claims hold{': not ' if failed else ''}{', '.join(failed)}"
    )
    return 1 if failed else 0


def _holds(name: str, options: list[str]) -> bool:
    module, claim = CLAIMS[name]
    print(f"== {name}: {claim}", flush=True)
    return int(importlib.import_module(module).main(options)) == 0


if __name__ == "__main__":
    sys.exit(main())
