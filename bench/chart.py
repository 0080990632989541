#!/usr/bin/env python3
"""Draws docs/speed.svg from bench/data/speed.json: Quadriga beside llama.cpp.

usage: bench/chart.py [--check]

Within a row the longer bar has full length. With --check nothing is written; exits with 1 if the picture is out of date.
"""
import html
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
DATA = os.path.join(HERE, "data", "speed.json")
PICTURE = os.path.join(os.path.dirname(HERE), "docs", "speed.svg")
WIDTH, LABELS, BARS = 860, 230, 400
BAR, ROW, HEAD, FOOT = 11, 36, 44, 14

STYLE = """text{fill:#1d2736}.small{font-size:11px;fill:#5a6880}.title{font-weight:600}.end{text-anchor:end}
    .ours{fill:#2f6f4f}.theirs{fill:#b9c3d3}.ratio{font-weight:600}
    @media (prefers-color-scheme: dark){text{fill:#e8edf5}.small{fill:#aab6c9}.ours{fill:#63b68a}.theirs{fill:#55627a}}"""


def number(value):
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:g}"


def draw(data):
    out, y = [], 34
    out.append(f'<rect class="ours" x="14" y="12" width="12" height="12" rx="2"/><text x="32" y="22">Quadriga</text>')
    out.append(f'<rect class="theirs" x="120" y="12" width="12" height="12" rx="2"/><text x="138" y="22">llama.cpp</text>')
    for group in data["groups"]:
        lower = group.get("lower_is_better", False)
        hint = "shorter is better" if lower else f"{group['unit']}, longer is better"
        out.append(f'<text class="title" x="14" y="{y + 18}">{html.escape(group["title"])}</text>')
        out.append(f'<text class="small" x="14" y="{y + 34}">{html.escape(group["source"])}; {hint}</text>')
        y += HEAD
        for row in group["rows"]:
            ours, theirs = row["quadriga"], row["llama_cpp"]
            longest = max(ours, theirs)
            out.append(f'<text class="end" x="{LABELS}" y="{y + 16}">{html.escape(row["name"])}</text>')
            for kind, value, top in (("ours", ours, y), ("theirs", theirs, y + BAR + 2)):
                length = max(2.0, BARS * value / longest)
                out.append(f'<rect class="{kind}" x="{LABELS + 12}" y="{top}" width="{length:.1f}" height="{BAR}" rx="2"/>')
                out.append(f'<text class="small" x="{LABELS + 18 + length:.1f}" y="{top + 9.5}">{number(value)}</text>')
            ratio = theirs / ours if lower else ours / theirs
            word = "× less" if lower else "×"
            out.append(f'<text class="ratio end" x="{WIDTH - 14}" y="{y + 16}">{ratio:.1f} {word}</text>')
            y += ROW
        y += FOOT
    body = "\n  ".join(out)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" font-family="system-ui, sans-serif" font-size="13">
  <title>Measured speed and accuracy of Quadriga and llama.cpp</title>
  <style>
    {STYLE}
  </style>
  {body}
</svg>
"""


def main():
    with open(DATA, encoding="utf-8") as file:
        picture = draw(json.load(file))
    if "--check" in sys.argv[1:]:
        with open(PICTURE, encoding="utf-8") as file:
            if file.read() != picture:
                sys.exit("docs/speed.svg is not what bench/chart.py draws: run it without --check")
        return
    with open(PICTURE, "w", encoding="utf-8") as file:
        file.write(picture)


main()
