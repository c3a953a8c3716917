"""The command line of the soak; the Makefile shows how it is called."""

from __future__ import annotations

import argparse
import logging
import sys

from soak import crowd, many_bodies


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--bodies", type=int, help="send so many fuzzed bodies to a torch engine instead"
    )
    parser.add_argument("--seconds", type=float, default=60, help="how long, at most")
    parser.add_argument(
        "--health-ms", type=float, default=100, help="limit for /health, but for waits for a core"
    )
    options = parser.parse_args()
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # that servers end connections is no news
    if options.bodies is None:
        return crowd.play(options.seconds, options.seed, options.health_ms / 1000)
    return many_bodies.play(options.bodies, options.seconds, options.seed, options.health_ms / 1000)


if __name__ == "__main__":
    sys.exit(main())
