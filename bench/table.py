"""Print the table of docs/performance.md as this machine measures it.

    make bench                                       # all of it, into build/bench/
    make bench ARGS="--only scan linear"             # some groups of rows
    make bench-compare                               # fail where a ratio is a fifth worse than the baseline's
    python bench/table.py --help

Writes table.md (ready for the docs), results.json and time-against-length.svg.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import own
from harness import Row, regressions
from rows import GROUPS, Bench, Sizes, measure

BASELINES = Path(__file__).with_name("baselines")


# ---- writing ----------------------------------------------------------------------------------


def main_table(rows: Sequence[Row]) -> str:
    lines = [
        "| what | against, in the same run | must | aim | measured, Euler | with exact ZOH | reached |",
        "|---|---|---|---|---|---|---|",
    ]
    notes = []
    for row in rows:
        sign = "≥" if row.higher_is_better else "≤"
        targets = [f"{sign} {row.form.format(row.must)}", row.form.format(row.aim)]
        if "no target" in row.against:
            targets = ["", ""]
        worst = row.worst
        if worst is None:
            measured = ["not measured", "", ""]
            notes.append(f"* {row.what}, against {row.against}: not measured: {row.missing}")
        else:
            several = f" at {worst.label}" if len(row.cells) > 1 else ""
            zoh = "" if worst.zoh is None else row.form.format(worst.zoh)
            verdict = row.verdict if targets[0] else ""
            measured = [row.form.format(worst.ratio) + several, zoh, verdict]
        lines.append("| " + " | ".join([row.what, row.against, *targets, *measured]) + " |")
    return "\n".join([*lines, "", *notes]).rstrip() + "\n"


def cells_table(rows: Sequence[Row]) -> str:
    """Every shape of the rows that have more than one, Euler and ZOH."""
    lines = ["| what | against | at | Euler | ZOH |", "|---|---|---|---|---|"]
    what = ""
    for row in rows:
        what = what if row.what == "same" else row.what
        for cell in row.cells if len(row.cells) > 1 else ():
            zoh = "" if cell.zoh is None else row.form.format(cell.zoh)
            lines.append(f"| {what} | {row.against} | {cell.label} | {row.form.format(cell.ratio)} | {zoh} |")
    return "\n".join(lines) + "\n"


def rates_table(bench: Bench) -> str:
    """The scan's rates beside the machine's limits."""
    copy = bench.limits[f"copy_gbs_{bench.threads}"]
    lines = [
        "| scan forward + backward | ms | G state updates/s | least traffic, GB/s | of the copy's |",
        "|---|---|---|---|---|",
    ]
    for one in bench.absolute:
        if "state_updates" not in one:
            continue
        for name in ("Euler", "ZOH"):
            seconds = one["medians"][name]
            traffic = one["bytes"] / seconds / 1e9 if "bytes" in one else None
            cells = [
                f"{one['what'].removeprefix('scan ')} {name}", f"{seconds * 1e3:.3g}",
                f"{one['state_updates'] / seconds / 1e9:.2f}",
                "" if traffic is None else f"{traffic:.1f}",
                "" if traffic is None else f"{traffic / copy:.0%}",
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def milliseconds_table(bench: Bench) -> str:
    lines = ["| what | rounds | medians, ms (spread) |", "|---|---|---|"]
    for one in bench.absolute:
        if "rounds" in one:
            cells = ", ".join(
                f"{name} {seconds * 1e3:.4g} ({one['spreads'][name]:.0%})"
                for name, seconds in one["medians"].items()
            )
            lines.append(f"| {one['what']} | {one['rounds']} | {cells} |")
        elif "bytes" in one and "libraries" in one:
            top, before = one["bytes"] / 1e9, one["libraries"] / 1e9
            lines.append(f"| {one['what']} | 1 | {top:.2f} GB, {before:.2f} before the model |")
    return "\n".join(lines) + "\n"


def markdown(bench: Bench, rows: Sequence[Row], where: dict[str, str], command: str, picture: str) -> str:
    limits = ", ".join(
        f"{name.split('_')[0]} {value:.0f} {'GFLOP/s' if 'gflops' in name else 'GB/s'} on "
        f"{name.rsplit('_', 1)[1]} thread{'s' if not name.endswith('_1') else ''}"
        for name, value in bench.limits.items()
    )
    parts = [
        f"Measured with `{command}` on {where['processor']} ({where['system']}, Python {where['python']}, "
        f"{where['backend']}), {time.strftime('%Y-%m-%d')}. The machine itself reaches {limits}.\n",
        main_table(rows),
    ]
    if bench.sizes.quick:
        parts.insert(0, "**BENCH_QUICK: tiny sizes, one round. These numbers mean nothing.**\n")
    if any(len(row.cells) > 1 for row in rows):
        parts += ["Each shape:\n", cells_table(rows)]
    if any("state_updates" in one for one in bench.absolute):
        parts += ["Rates:\n", rates_table(bench)]
    parts += ["Medians:\n", milliseconds_table(bench)]
    if bench.checked:
        errors = ", ".join(f"{name} {error:.0e}" for name, error in bench.checked.items())
        parts.append(
            f"Largest relative error of the peers against this scan, output and gradients: {errors}.\n"
        )
    if picture:
        parts.append(f"![Time against L]({picture})\n")
    return "\n".join(parts)


def results(bench: Bench, rows: Sequence[Row], where: dict[str, str]) -> dict:
    ratios: dict[str, dict] = {}
    for row in rows:
        ratios |= row.ratios()
    missing = {row.key: row.missing for row in rows if not row.cells}
    return {
        "machine": where, "limits": bench.limits, "quick": bench.sizes.quick, "ratios": ratios,
        "missing": missing, "absolute": bench.absolute,
    }  # fmt: skip


def baseline_of(found: dict) -> dict:
    """What of the results is kept: ratios, and where they hold."""
    kept = {
        name: {**value, "ratio": float(f"{value['ratio']:.4g}")} for name, value in found["ratios"].items()
    }
    return {"machine": found["machine"], "ratios": kept}


# ---- the command ------------------------------------------------------------------------------


def read_baseline(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        sys.exit(
            f"there is no baseline for this machine, {path}: make one on the code to compare with, by "
            "make bench ARGS=--save-baseline"
        )


def compare(found: dict, baseline: dict, path: Path, *, partial: bool = False) -> int:
    worse, absent = regressions(found["ratios"], baseline["ratios"])
    compared = len(baseline["ratios"]) - len(absent)
    print(f"\n{compared} ratios compared with {path}")
    if absent and not partial:
        print("not measured this time: " + ", ".join(absent))
    for line in worse:
        print(f"WORSE {line}")
    if not compared:
        print("nothing was compared")
    return 1 if worse or not compared else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS, help="groups of rows to measure (default: all)")
    parser.add_argument("--threads", type=int, help="threads of every candidate (default: all cores)")
    parser.add_argument(
        "--out", type=Path, default=Path("build/bench"), help="folder to write to (default: %(default)s)"
    )
    parser.add_argument("--no-picture", action="store_true", help="leave out the picture of time against L")
    parser.add_argument(
        "--with-compile", action="store_true", help="torch.compile too, which takes minutes to compile"
    )
    parser.add_argument(
        "--save-baseline", action="store_true", help="keep the ratios as this machine's baseline"
    )
    parser.add_argument(
        "--compare", nargs="?", type=Path, const=Path(), metavar="FILE",
        help="fail where a ratio is a fifth worse than in FILE (default: this machine's baseline)",
    )  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    start = time.perf_counter()
    backend = own.default_backend(options.threads)
    where = own.machine(backend)
    baseline_path = BASELINES / f"{where['name']}.json"
    baseline = None
    if options.compare is not None:  # before minutes of measuring
        if options.compare != Path():
            baseline_path = options.compare
        baseline = read_baseline(baseline_path)
    sizes = Sizes.from_environment()
    if sizes.quick and options.save_baseline:
        sys.exit("BENCH_QUICK measures nothing: not kept as a baseline")

    bench = Bench(sizes, backend, with_compile=options.with_compile, say=lambda line: print(line, flush=True))
    bench.limits = own.limits(backend.threads, quick=sizes.quick)
    options.out.mkdir(parents=True, exist_ok=True)
    command = " ".join(["make bench"] + ([f'ARGS="{" ".join(arguments)}"'] if arguments else []))

    def write(rows: Sequence[Row], picture: str = "") -> dict:
        found = results(bench, rows, where)
        text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
        (options.out / "results.json").write_text(text, encoding="utf-8")
        text = markdown(bench, rows, where, command, picture)
        (options.out / "table.md").write_text(text, encoding="utf-8")
        return found

    rows = measure(bench, options.only, after=write)  # so that a run that is stopped leaves what it has
    picture = ""
    if not options.no_picture and not options.only:
        from picture import draw, time_against_length

        bench.say("picture: time against L")
        picture = "time-against-length.svg"
        caption = f"Selective scan, B 1, D {24 if sizes.quick else 512}, N 16, {backend.threads} threads"
        draw(time_against_length(bench), options.out / picture, caption)
    found = write(rows, picture)
    seconds = time.perf_counter() - start
    print(f"\n{main_table(rows)}\n{seconds:.0f} s; table.md and results.json are in {options.out}/")
    if options.save_baseline:
        path = BASELINES / f"{where['name']}.json"
        kept = baseline_of(found)
        if path.exists() and options.only:  # some groups again: the rest stays
            kept["ratios"] = read_baseline(path)["ratios"] | kept["ratios"]
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"kept as {path}")
    if baseline is not None:
        return compare(found, baseline, baseline_path, partial=bool(options.only))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
