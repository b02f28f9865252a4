"""A history of ``bench/nightly.py`` as one self-contained HTML page: plots of ms/token over the runs.

    python -m bench.report history.jsonl page.html

No scripts and nothing from elsewhere: the plots are SVG in the page, made for a phone first, light or dark as
the reader's system is.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from kestrel.benchmark.output import read
from kestrel.benchmark.records import Record
from kestrel.errors import KestrelError

MAX_RUNS = 60  # of a plot; older ones are left out
WIDTH, HEIGHT = 360, 230  # units of a plot
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 12, 30
FAILED = ("regression", "bits changed")

# One look for each way of running, the same in every plot: colour, dash, marker.
STYLES = {
    "l2exact": ("a", "", "circle"),
    "fast": ("b", "7 4", "square"),
    "bitexact": ("c", "2 3", "diamond"),
}
_OTHER = ("d", "9 3 2 3", "circle")

Place = Callable[[float], float]  # a value to a coordinate


@dataclass(frozen=True)
class Point:
    """One run of one series."""

    run: int  # place among the runs shown
    record: Record

    @property
    def ms(self) -> float:
        return float(self.record["ms_per_token_median"])

    @property
    def failed(self) -> bool:
        return self.record.get("verdict") in FAILED


def variant(record: Record) -> str:
    """The name of a curve."""
    extra = ("" if record["graph"] else ", eager") + ("" if record["taps"] == "off" else ", full dump")
    return f"{record['mode']}{extra}"


def style_of(name: str) -> tuple[str, str, str]:
    """Colour, dash and marker of a curve."""
    return STYLES.get(name, _OTHER)


def machine(record: Record) -> str:
    """Where a record was measured."""
    if record["gpu_info"]:
        return str(record["gpu_info"])
    threads = record["n_threads"]
    return f"{record['cpu_info']}, {threads} thread{'s' if threads != 1 else ''}, {record['isa']}"


# -- one plot ------------------------------------------------------------------------------------------------


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About ``count`` round numbers that span low to high."""
    span = max(high - low, abs(high) * 0.02, 1e-9)
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    unit = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw)
    first = math.floor(low / unit)
    last = math.ceil(high / unit)
    return [i * unit for i in range(first, max(last, first + 1) + 1)]


def _number(value: float, unit: float) -> str:
    decimals = max(0, -math.floor(math.log10(unit) + 1e-9))
    if not math.isclose(round(unit, decimals), unit):
        decimals += 1  # steps of 2.5
    return f"{value:.{decimals}f}"


def _marker(shape: str, x: float, y: float, colour: str, size: float = 4.0) -> str:
    if shape == "square":
        s = size * 0.9
        body = f'<rect x="{x - s:.1f}" y="{y - s:.1f}" width="{2 * s:.1f}" height="{2 * s:.1f}"'
    elif shape == "diamond":
        s = size * 1.25
        places = f"{x:.1f},{y - s:.1f} {x + s:.1f},{y:.1f} {x:.1f},{y + s:.1f} {x - s:.1f},{y:.1f}"
        body = f'<polygon points="{places}"'
    else:
        body = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"'
    return f'{body} class="f{colour}"/>'


def plot(curves: dict[str, list[Point]], runs: Sequence[str], title: str) -> str:
    """The curves of one test over the runs, as SVG. Whiskers: 5th and 95th percentile of the repeats."""
    points = [point for curve in curves.values() for point in curve]
    shown = sorted({p.run for p in points})
    first, last = shown[0], shown[-1]
    low = min(min(float(p.record["ms_per_token_p5"]), p.ms) for p in points)
    high = max(max(float(p.record["ms_per_token_p95"]), p.ms) for p in points)
    ticks = nice_ticks(low, high)
    bottom, top = ticks[0], ticks[-1]

    def x_of(run: int) -> float:
        share = 0.5 if last == first else (run - first) / (last - first)
        return LEFT + 8 + share * (WIDTH - LEFT - RIGHT - 16)

    def y_of(ms: float) -> float:
        return TOP + (top - ms) / (top - bottom) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick in ticks:
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = _number(tick, ticks[1] - ticks[0])
        parts.append(f'<text class="axis" x="{LEFT - 6}" y="{y + 5:.1f}" text-anchor="end">{label}</text>')
    dates = [(first, "start" if first != last else "middle"), (last, "end")][: 1 + (first != last)]
    for run, anchor in dates:
        x = {"start": LEFT, "end": WIDTH - RIGHT}.get(anchor, x_of(run))
        place = f'x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}"'
        parts.append(f'<text class="axis" {place}>{escape(runs[run][:10])}</text>')
    for name, curve in curves.items():
        parts += _curve(name, curve, runs, x_of, y_of)
    for curve in curves.values():
        parts += _rings(curve, x_of, y_of)
    return "".join([*parts, "</svg>"])


def _curve(name: str, curve: Sequence[Point], runs: Sequence[str], x_of: Place, y_of: Place) -> list[str]:
    colour, dash, shape = style_of(name)
    places = [(x_of(p.run), y_of(p.ms), p) for p in curve]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    parts = [f'<polyline class="curve s{colour}" points="{line}"{dashed}/>']
    for x, y, point in places:
        record = point.record
        ends = y_of(float(record["ms_per_token_p5"])), y_of(float(record["ms_per_token_p95"]))
        parts.append(
            f'<line class="s{colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{ends[0]:.1f}" y2="{ends[1]:.1f}"/>'
        )
        text = f"{name}, {runs[point.run]}: {point.ms:.4g} ms/token, commit {record.get('build_commit')}"
        text += f"; {record['verdict']}: {record.get('reason')}" if record.get("verdict") else ""
        parts.append(f"<g><title>{escape(text)}</title>{_marker(shape, x, y, colour)}</g>")
    return parts


def _rings(curve: Sequence[Point], x_of: Place, y_of: Place) -> list[str]:
    """Marks of failed runs, to be drawn over all curves."""
    parts = []
    for point in curve:
        x, y = x_of(point.run), y_of(point.ms)
        if point.failed:
            parts.append(f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="9"/>')
        if point.record.get("verdict") == "bits changed":
            parts.append(f'<path class="ring" d="M{x - 9:.1f} {y - 9:.1f}l18 18m0 -18l-18 18"/>')
    return parts


def legend(curves: dict[str, list[Point]]) -> str:
    """Under a plot: each curve's look, its last value, and what was said about it."""
    lines = []
    for name, curve in curves.items():
        colour, dash, shape = style_of(name)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        sample = (
            f'<svg viewBox="0 0 44 16" aria-hidden="true"><polyline class="curve s{colour}" points="2,8 42,8"'
            f"{dashed}/>{_marker(shape, 22, 8, colour)}</svg>"
        )
        last = curve[-1].record
        verdict = str(last.get("verdict", "not judged"))
        mark = f'<span class="fail">{escape(verdict)}</span>' if curve[-1].failed else escape(verdict)
        rate = f"{float(last['ts_median']):.4g} tok/s"
        text = f"{escape(name)}: <b>{curve[-1].ms:.4g}</b> ms, {rate}, {mark}"
        lines.append(f'<div class="key">{sample}<span>{text}</span></div>')
    return "".join(lines)


# -- the page ------------------------------------------------------------------------------------------------


def _groups(history: Sequence[Record], index: dict[str, int]) -> dict[str, dict[str, dict[str, list[Point]]]]:
    """Model and machine -> test -> curve -> points."""
    found: dict[str, dict[str, dict[str, list[Point]]]] = {}
    for record in history:
        run = str(record.get("run"))
        if run not in index:
            continue
        section = f"{record['model_filename']} ({record['model_type']})\n{machine(record)}"
        tests = found.setdefault(section, {})
        curves = tests.setdefault(str(record["test"]), {})
        curves.setdefault(variant(record), []).append(Point(index[run], record))
    return found


def _order(test: str) -> tuple[int, int, str]:
    """Decoding before prompts, then by depth."""
    name, _, depth = test.partition(" @ d")
    return int(not name.startswith("tg")), int(depth or 0), name


def _test_title(record: Record) -> str:
    what = (
        f"decode, {record['n_gen']} tokens" if record["n_gen"] else f"prompt of {record['n_prompt']} tokens"
    )
    return f"{what}, depth {record['n_depth']}"


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def verdict_card(last: Sequence[Record], troubles: Sequence[str], left_out: Sequence[str]) -> str:
    """What a reader wants to know first."""
    failed = [record for record in last if record.get("verdict") in FAILED]
    faster = [record for record in last if record.get("verdict") == "faster"]

    def described(record: Record) -> str:
        name = f"{record['model_filename']}, {record['device']}, {variant(record)}, {_test_title(record)}"
        return f"<b>{escape(str(record['verdict']))}</b>: {escape(name)}. {escape(str(record.get('reason')))}"

    bad = [*map(described, failed), *(f"<b>failed</b>: {escape(text)}" for text in troubles)]
    parts = []
    if bad:
        parts.append(f'<div class="card bad"><h3>{len(bad)} to look at</h3>{_list(bad)}</div>')
    else:
        new = sum(record.get("verdict") == "new" for record in last)
        text = f"{len(last)} series, no regression, no changed bits."
        text += f" {new} have too few runs to judge their times yet." if new else ""
        parts.append(f'<div class="card good"><h3>All well</h3><p>{text}</p></div>')
    if faster:
        parts.append(f'<div class="card good"><h3>Faster</h3>{_list(map(described, faster))}</div>')
    if left_out:
        parts.append(f'<div class="card"><h3>Left out here</h3>{_list(map(escape, left_out))}</div>')
    return "".join(parts)


def page(history: Sequence[Record], troubles: Sequence[str] = (), left_out: Sequence[str] = ()) -> str:
    """The whole page; ``troubles`` and ``left_out`` are lines about the last run."""
    runs = list(dict.fromkeys(str(record.get("run")) for record in history))
    shown = runs[-MAX_RUNS:]
    index = {run: place for place, run in enumerate(shown)}
    last = [record for record in history if runs and str(record.get("run")) == runs[-1]]
    body = [
        "<h1>kestrel nightly</h1>",
        f'<p class="dim">{escape(runs[-1] if runs else "no run yet")}, run {len(runs)}'
        f"{', commit ' + escape(str(last[0].get('build_commit'))) if last else ''}</p>",
        verdict_card(last, troubles, left_out),
    ]
    for section, tests in _groups(history, index).items():
        model, _, where = section.partition("\n")
        body.append(f'<h2>{escape(model)}</h2><p class="dim">{escape(where)}</p>')
        for test in sorted(tests, key=_order):
            curves = tests[test]
            title = _test_title(next(iter(curves.values()))[-1].record)
            body.append(
                f'<div class="card"><h3>{escape(title)}</h3><p class="dim">ms per token, less is better; '
                f"the axis does not begin at 0</p>{plot(curves, shown, title)}{legend(curves)}</div>"
            )
    body.append(
        '<p class="dim">Points: median of a run\'s repeats; whiskers: 5th and 95th percentile. '
        "A red ring marks a regression, a crossed one changed bits. Depths are seeded KV rows, not tokens "
        f"that ran. {_environment(last)}</p>"
    )
    css = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kestrel nightly</title><style>{css}</style></head>\n<body>{''.join(body)}</body></html>\n"
    )


def _environment(last: Sequence[Record]) -> str:
    names = ("kestrel_version", "contract", "python", "numpy", "gpu_driver", "cuda_driver", "cupy", "nvrtc")
    names += ("clock_sm_mhz", "clock_memory_mhz")
    found: dict[str, None] = {}
    for record in last:
        for name in names:
            if record.get(name) is not None:
                found[f"{name.replace('_', ' ')} {record[name]}"] = None
    return escape(", ".join(found)) + "." if found else ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("history", type=Path, help="history of bench.nightly (.jsonl)")
    parser.add_argument("html", type=Path, help="page to write")
    args = parser.parse_args(argv)
    try:
        args.html.write_text(page(read(args.history)), encoding="utf-8")
    except (KestrelError, OSError) as error:
        print(f"bench.report: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
