"""The page docs/arena.md and its figures, made from the committed results alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.arena.figures import OTHERS, best_at, figures, save
from experiments.arena.limits import what_bounds, what_is_missing, what_lasting_load_leaves
from experiments.arena.results import Results
from experiments.arena.rows import Row, Tables, best, pick
from experiments.arena.scenarios import LOADS, NOISE, SCENARIOS
from experiments.arena.targets import FLAGSHIP, RIVALS, hardest_rival, share_of_bound, verdicts
from experiments.markdown import table
from slosched.evaluate.judge.promises import PROMISED

PAGE = Path(__file__).parents[2] / "docs" / "arena.md"
_CAPTIONS = {
    "capacity_99": "Capacity at 99 % attainment over the best of each class, with 95 % intervals",
    "goodput_2x": "Good requests at twice the load over the best of each class",
    "overload": "Attainment under overload",
    "deciles": "Attainment by prompt length, at twice the load",
}


def write(results: Results, page: Path = PAGE) -> None:
    """Write the page and its figures over the former ones."""
    tables = results.tables()
    drawn = dict(figures(tables, order_of(tables)))
    for name, figure in drawn.items():
        save(figure, page.parent / page.stem / f"{name}.svg")
    page.write_text(text_of(tables, list(drawn)), encoding="utf-8")


def text_of(tables: Tables, drawn: Sequence[str]) -> str:
    """Return the page.  Every number in it comes from `tables`."""
    order = order_of(tables)
    parts = [
        *_introduction(tables, order),
        "## Targets",
        _targets(tables),
        "## Capacity",
        *_capacity(tables, order),
        *_figure("capacity_99", drawn),
        *what_bounds(tables, order),
        *what_is_missing(tables, order),
        "## Overload",
        *_overload(tables, order),
        *_figure("goodput_2x", drawn),
        *_figure("overload", drawn),
        *what_lasting_load_leaves(tables, order),
        "## How far from the best possible",
        *_bounds(tables["bounds"], order),
        "## Attainment by prompt length",
        *_who_pays(tables["deciles"], order),
        *_figure("deciles", drawn),
        "## What a decision costs",
        *_costs(tables["cost"]),
        "## Settings",
        *_settings(tables["tuned"], order),
        "## Provenance",
        *_provenance(tables["runs"], tables["carried_over"], order),
    ]
    return "\n\n".join(parts) + "\n"


def order_of(tables: Tables) -> list[str]:
    """Return the measured scenarios in the order of the program, unknown ones last."""
    known, measured = list(SCENARIOS), [row["scenario"] for row in tables["runs"]]
    return [n for n in known if n in measured] + [n for n in measured if n not in known]


def _introduction(tables: Tables, order: Sequence[str]) -> Iterator[str]:
    yield "# The arena"
    yield (
        "<!-- Made by `python -m experiments.arena report` from experiments/arena/results: "
        "edit those, not this. -->"
    )
    yield (
        "Every policy runs on the same engine: with the same arrivals, lengths, KV cache and "
        "latency model, and no knowledge of output lengths. Each is tuned on requests that do not "
        f"judge it. The device is simulated from a measured latency model, with {NOISE:.0%} noise "
        "on every step. Policies predict with the same model, corrected online as a server does. "
        "One scenario is the base, and each other one changes one thing. How it is measured, how "
        "to run it, and what bounds the targets that are not reached: "
        "[experiments/arena](../experiments/arena/README.md)."
    )
    yield (
        "Each row is of the code that is named for it at the end. `goodput`, `slo_aware` and the "
        "six policies that joined last were tuned anew for the rows of 26 November; the others "
        "have the settings that were found with the code of 21 and 22 November. "
        "[Cells drawn at random](random_arena.md) have other devices, promises and traces."
    )
    missing = [name for name in SCENARIOS if name not in order]
    if missing:
        yield f"Not measured yet: {', '.join(missing)}."
    rows = []
    for name in order:
        (run,) = pick(tables["runs"], scenario=name)
        promise = PROMISED.get(run["promise"], run["promise"])
        knee = f"{run['knee_requests_per_s']:.3g} ({run['knee_of']})"
        rows.append([name, run["model"], run["trace"], promise, f"`{run['rule']}`", knee])
    columns = ["scenario", "device", "requests", "promise (TTFT, TPOT)", "rule", "1× load"]
    yield table(columns, rows)
    yield (
        "1× load is the best plain policy's capacity at 90 % attainment, in requests/s. Plain are "
        "`fcfs`, `sarathi`, `edf` and `sjf`. With dropping are the same four when they reject "
        "requests that are late or cannot be in time. Published are the policies of papers, with "
        f"the dropping that suits them best. Ours are `{FLAGSHIP}` and `slo_aware`."
    )


def _targets(tables: Tables) -> str:
    rows = [[v.what, v.against, v.at_least, v.found, v.said] for v in verdicts(tables)]
    columns = [f"`{FLAGSHIP}`", "against", "at least", "found, where it is least", ""]
    return table(columns, rows)


def _capacity(tables: Tables, order: Sequence[str]) -> Iterator[str]:
    capacities, ratios = tables["capacity"], tables["ratios"]
    yield (
        "The highest rate (requests/s) at which that share of the offered requests is good, with "
        "its 95 % interval, and the best of each class by name. Ratios are paired: both policies "
        "are compared on the same resampled requests."
    )
    targets = sorted({row["target"] for row in capacities}, reverse=True)
    for target in targets:
        yield f"### At {target:.0%} attainment"
        rows = []
        for name in order:
            here = pick(capacities, scenario=name, target=target)
            cells = [_one_capacity(best(pick(here, contender=FLAGSHIP), "requests_per_s"))]
            cells += [_best_capacity(pick(here, class_=group)) for group in OTHERS]
            cells += [
                _ratio(hardest_rival(ratios, name, f"capacity {target:.0%}", [group]))
                for group in RIVALS
            ]
            rows.append([name, *cells])
        columns = [f"÷ best {group}" for group in RIVALS]
        yield table(["scenario", FLAGSHIP, *(f"best {g}" for g in OTHERS), *columns], rows)
    if order and targets:
        here = pick(capacities, scenario=order[0], target=targets[0])
        here.sort(key=lambda row: -float(row["requests_per_s"]))
        yield f"All finalists of {order[0]}, at {targets[0]:.0%}:"
        rows = [[r["contender"], r["class"], _one_capacity(r), r["flags"]] for r in here]
        yield table(["contender", "class", "requests/s", "to be read with"], rows)


def _best_capacity(rows: Sequence[Row]) -> str:
    found = best(rows, "requests_per_s")
    return "–" if found is None else f"{_one_capacity(found)} {found['contender']}"


def _one_capacity(row: Row | None) -> str:
    if row is None:
        return "–"
    if not row["requests_per_s"]:
        return "0"
    return f"{row['requests_per_s']:.3g} [{row['low']:.3g}, {row['high']:.3g}]"


def _ratio(row: Row | None) -> str:
    return "–" if row is None else f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"


def _overload(tables: Tables, order: Sequence[str]) -> Iterator[str]:
    yield (
        "Good requests/s at multiples of the 1× load (in brackets the attainment), and the paired "
        f"ratio of `{FLAGSHIP}` to the best other one that may drop. The second half of a window "
        "counts, and windows are long compared with the time that a queue needs to reach its full "
        "length ([their sizes](#provenance))."
    )
    rows = []
    for name in order:
        for load in LOADS:
            found = [best_at(tables["overload"], name, load, g) for g in ("ours", *OTHERS)]
            rival = hardest_rival(tables["ratios"], name, f"goodput {load:g}x", RIVALS)
            cells = [_good(row, named=i > 0) for i, row in enumerate(found)]
            rows.append([name if load == LOADS[0] else "", f"{load:g}×", *cells, _ratio(rival)])
    columns = ["scenario", "load", FLAGSHIP, *(f"best {group}" for group in OTHERS), "÷ rival"]
    yield table(columns, rows)


def _good(row: Row | None, *, named: bool) -> str:
    if row is None:
        return "–"
    said = f"{row['good_requests_per_s']:.3g} ({row['attainment']:.0%})"
    return f"{said} {row['contender']}" if named else said


def _bounds(bounds: Sequence[Row], order: Sequence[str]) -> Iterator[str]:
    yield (
        "Good requests divided by the least of the bounds that "
        "[no scheduler can exceed](bounds.md). They are counted on a device without noise, where "
        "the bounds hold, and over all requests from an empty start. A bound knows everything in "
        "advance, and how far it lies above the best possible is unknown."
    )
    rows = []
    for name in order:
        for load in LOADS:
            mine = share_of_bound(bounds, name, load, FLAGSHIP)
            if mine is None:
                continue
            here = pick(bounds, scenario=name, load=load)
            others = [share_of_bound(bounds, name, load, r["who"]) for r in here if _is_other(r)]
            rival = best([share for share in others if share is not None], "of_bound")
            said = "–" if rival is None else f"{rival['of_bound']:.3f} {rival['who']}"
            share = [f"{mine['attainment']:.1%}", f"{mine['of_bound']:.3f}", mine["bound"]]
            rows.append([name, f"{load:g}×", *share, said])
    columns = ["scenario", "load", f"{FLAGSHIP}: attainment", "÷ bound", "which", "best other"]
    yield table(columns, rows)


def _is_other(row: Row) -> bool:
    return row["class"] in OTHERS


def _who_pays(deciles: Sequence[Row], order: Sequence[str]) -> Iterator[str]:
    yield (
        "A policy that maximizes the number of good requests can raise it by giving up long "
        f"prompts. Attainment of `{FLAGSHIP}` by tenths of the prompt lengths, shortest first:"
    )
    rows = []
    for name in order:
        for load in sorted({row["load"] for row in deciles}):
            mine = pick(deciles, scenario=name, load=load, contender=FLAGSHIP)
            shares = [f"{row['num_good'] / row['num_offered']:.2f}" for row in mine]
            if shares:
                rows.append([name, f"{load:g}×", " ".join(shares)])
    yield table(["scenario", "load", "attainment"], rows)


def _costs(cost: Sequence[Row]) -> Iterator[str]:
    if not cost:
        yield "Not measured yet: `python -m experiments.arena cost`."
        return
    made = cost[0]
    yield (
        f"256 running and 1,000 waiting requests, median of {made['rounds']} decisions, on "
        f"{made['machine']}, at {made['git_hash']}, by `{made['command']}`:"
    )
    ordered = sorted(cost, key=lambda row: float(row["median_s"]))
    yield table(["policy", "ms"], [[r["policy"], f"{r['median_s'] * 1e3:.2f}"] for r in ordered])


def _settings(tuned: Sequence[Row], order: Sequence[str]) -> Iterator[str]:
    yield (
        "Each contender was tuned by coordinate ascent for good requests/s at one rate near the "
        "knee, with the same limit on trials for all, and on other requests than those that "
        "judge. The best of each class at that rate and the best at a rate a fifth lower went on; "
        "all others were left out."
    )
    rows = []
    for name in order:
        for row in pick(tuned, scenario=name):
            limits = "" if row["limits"] == "{}" else f" {row['limits']}"
            score = f"{row['good_requests_per_s']:.3g} of {row['rate']:.3g}"
            setting = f"`{row['tuned']}`{limits}"
            rows.append([name, row["contender"], setting, score, row["num_trials"]])
    yield table(["scenario", "contender", "best setting", "good/s of offered", "trials"], rows)


def _provenance(runs: Sequence[Row], carried: Sequence[Row], order: Sequence[str]) -> Iterator[str]:
    columns = ["scale", "judged_on", "overloaded_on", "tuned_on", "bounds_on"]
    columns += ["num_replays", "seconds", "git_hash", "code_digest", "machine", "made"]
    by_name = {row["scenario"]: row for row in runs}
    yield (
        "Windows are given as number x requests. Seeds from 0 on count from the beginning of a "
        "trace, and those below 0 from its end. Made-up requests are drawn anew for each seed. The "
        "seed also sets the device's noise."
    )
    rows = [[name, *(by_name[name][column] for column in columns)] for name in order]
    yield table(["scenario", *(column.replace("_", " ") for column in columns)], rows)
    for command in dict.fromkeys(by_name[name]["command"] for name in order):
        yield f"Made by `{command}`."
    if carried:
        proof = carried[0]
        yield (
            f"The results were made by earlier code ({proof['earlier_code']}). They are taken over "
            f"as results of code {proof['code_digest']}, since {len(carried)} of them came out the "
            f"same when they were played again: `{proof['command']}`, {proof['made']}."
        )


def _figure(name: str, drawn: Sequence[str]) -> Iterator[str]:
    if name in drawn:
        yield f"![{_CAPTIONS[name]}](arena/{name}.svg)"
