"""The parts of the page about what keeps a policy from doing better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.arena.ceilings import EVEN_STREAM, LASTING, ON_TIME
from experiments.arena.oracle import OVERLOAD, ROOM
from experiments.arena.rows import Tables, among, best, pick
from experiments.arena.targets import FLAGSHIP, RIVALS, asked_of
from experiments.markdown import table
from slosched.evaluate.capacity import TARGETS

_STRICT = max(TARGETS)
_SHARE = "attainment"


def what_bounds(tables: Tables, order: Sequence[str]) -> Iterator[str]:
    """Yield the section on ceilings; nothing if none was computed."""
    rows = []
    for name in order:
        known = {
            row["bound"]: row["requests_per_s"]
            for row in pick(tables["ceilings"], scenario=name)
            if row["bound"] == EVEN_STREAM or row["target"] == _STRICT
        }
        here = pick(tables["capacity"], scenario=name, target=_STRICT)
        mine = best(pick(here, contender=FLAGSHIP), "requests_per_s")
        if not known or mine is None:
            continue
        rival = best(pick(here, class_=RIVALS[0]), "requests_per_s")
        found, least = mine["requests_per_s"], known[ON_TIME]
        most = "–" if rival is None else f"{least / rival['requests_per_s']:.2f}"
        asked = "–" if rival is None else f"{asked_of(name) * rival['requests_per_s']:.3g}"
        rates = [f"{known[bound]:.3g}" for bound in (ON_TIME, LASTING, EVEN_STREAM)]
        rows.append([name, f"{found:.3g}", asked, *rates, f"{found / least:.2f}", most])
    if not rows:
        return
    yield "### What bounds it"
    yield (
        f"Requests/s at {_STRICT:.0%} attainment that no schedule exceeds without noise, even if "
        "it knows everything in advance. L1 and L2 are for the requests that judge. L5 is for the "
        "same requests repeated without end: a capacity above it would not last "
        "([bounds](bounds.md)). An even stream is no bound. All its requests are like the mean, "
        "none comes in a burst, and its steps hold a token of each decode as seldom as the SLOs "
        "allow. *Asked* is the target's multiple of the best with dropping. Where it lies near "
        "the even stream or above it, only bursts that leave the device idle at other times could "
        "make room for it. The last column is the ratio of what L1 and L2 leave possible to the "
        "best with dropping."
    )
    columns = ["scenario", FLAGSHIP, "asked", ON_TIME, LASTING, EVEN_STREAM]
    yield table([*columns, f"{FLAGSHIP} ÷ {ON_TIME}", "most ÷ dropping"], rows)


def what_lasting_load_leaves(tables: Tables, order: Sequence[str]) -> Iterator[str]:
    """Yield the section on L5 under overload; nothing if it was not solved."""
    rows = []
    for name in order:
        for row in pick(tables["lasting"], scenario=name):
            load, most = row["load"], row["num_good"] / row["num_offered"]
            here = pick(tables["overload"], scenario=name, load=load)
            mine = best(pick(here, contender=FLAGSHIP), _SHARE)
            rival = best(among(here, "class", RIVALS), _SHARE)
            if mine is None or rival is None:
                continue
            rows.append(
                [
                    name,
                    f"{load:g}×",
                    f"{most:.1%}",
                    *(f"{one[_SHARE]:.1%} ({one[_SHARE] / most:.2f})" for one in (mine, rival)),
                    rival["contender"],
                ]
            )
    if not rows:
        return
    yield "### What lasting load leaves possible"
    yield (
        "Attainment that no schedule exceeds, without noise and knowing everything, if the windows "
        "of overload were repeated without end (L5), and in brackets the share of it that was "
        "reached. It is no bound for a window that ends, as decodes go on there after the last "
        "arrival. But overload is judged while requests arrive, while L1 and L2 let all decodes "
        "go on."
    )
    columns = ["scenario", "load", LASTING, FLAGSHIP, "best other that may drop", ""]
    yield table(columns, rows)


def what_is_missing(tables: Tables, order: Sequence[str]) -> Iterator[str]:
    """Yield the section on known lengths and more memory; nothing if it was not played."""
    rows = []
    for name in order:
        for row in pick(tables["oracle"], scenario=name):
            gains = [f"{100 * (row[who] - row['blind']):+.1f}" for who in ("told", "roomy")]
            rows.append([name, f"{row['at']} ({row['rate']:.3g}/s)", f"{row['blind']:.1%}", *gains])
    if not rows:
        return
    yield "### What lengths and memory would be worth"
    yield (
        f"Attainment of `{FLAGSHIP}` at the capacity that was asked for (the target's multiple of "
        f"the best with dropping) and at {OVERLOAD:g}× load. *lengths* is the difference in points "
        "if it knows the output length of every request: among prompts that compete, it then gives "
        "up those that take most of the device, decodes included. *memory* is the difference if "
        f"the KV cache is {ROOM} times as large and no length is known. This is no bound, since "
        "the policy uses the lengths in one way only."
    )
    yield table(["scenario", "at", "as it is", "lengths", "memory"], rows)
