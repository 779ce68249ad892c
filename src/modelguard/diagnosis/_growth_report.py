"""A growth report as text, and as a single HTML page with an inline figure that opens offline."""

from __future__ import annotations

import html
from collections.abc import Iterator

from modelguard._units import format_bytes
from modelguard.diagnosis._growth import GrowthReport, Measured

__all__ = ["as_html", "as_text"]

_WIDTH, _HEIGHT, _MARGIN = 720, 260, 60

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:48rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b;"
    "background:#fff}table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.4rem .6rem;"
    "border-bottom:1px solid #ddd;vertical-align:top}td:first-child{white-space:nowrap}.bar{background:#2563a8;"
    "height:.7rem}svg{width:100%;height:auto}svg text{font-size:12px;fill:#444}"
)


def as_text(report: GrowthReport) -> Iterator[str]:
    """Write a report as lines of text."""
    measured = report.measured
    yield f"Diagnosed: {report.subject}"
    yield f"Verdict: {verdict(report)}"
    for cause in report.causes:
        yield ""
        yield f"{cause.share:.0%} {cause.name}"
        yield f"  seen  {_printable(cause.seen)}"
        yield f"  fix   {cause.fix}"
    if report.causes:
        yield ""
        yield f"{report.unexplained:.0%} is unexplained."
    if measured.libraries:
        yield f"Loaded: {', '.join(measured.libraries)}."
    for sentence in report.unknown:
        yield f"Note: {_printable(sentence)}"


def verdict(report: GrowthReport) -> str:
    """The verdict with its figures, in a sentence."""
    measured = report.measured
    calls = measured.calls[-1] if measured.calls else 0
    if report.verdict == "undecided":
        return f"undecided after {calls:,} calls"
    moved = f"{format_bytes(max(0, measured.growth))} in {calls:,} calls"
    if report.verdict == "steady":
        return f"memory does not grow with the calls ({moved})"
    return f"memory grows with the calls: {moved}, {measured.per_call * 1000 / 1e6:.2f} MB per 1,000 calls"


def as_html(report: GrowthReport) -> str:
    """Write a report as one page without any other file."""
    rows = "".join(
        f"<tr><td>{html.escape(cause.name)}</td><td>{cause.share:.0%}"
        f'<div class="bar" style="width:{cause.share * 100:.0f}%"></div></td>'
        f"<td>{html.escape(_printable(cause.seen))}</td><td>{html.escape(cause.fix)}</td></tr>"
        for cause in report.causes
    )
    table = f"<table><tr><th>cause</th><th>share</th><th>seen</th><th>fix</th></tr>{rows}</table>" if rows else ""
    rest = f"<p>{report.unexplained:.0%} is unexplained.</p>" if rows else ""
    notes = "".join(f"<p>Note: {html.escape(_printable(sentence))}</p>" for sentence in report.unknown)
    subject = html.escape(report.subject)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{subject}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{subject}</h1><p>{html.escape(verdict(report))}.</p>"
        f"{_figure(report.measured)}{table}{rest}{notes}</body></html>\n"
    )


def _figure(measured: Measured) -> str:
    """Private memory over calls."""
    if len(measured.private) < 2 or measured.calls[-1] <= 0:  # noqa: PLR2004 - a line has two ends
        return ""
    low, high = min(measured.private), max(measured.private)
    across, up = (_WIDTH - 2 * _MARGIN) / measured.calls[-1], (_HEIGHT - 2 * _MARGIN) / max(1, high - low)
    points = " ".join(
        f"{_MARGIN + calls * across:.1f},{_HEIGHT - _MARGIN - (private - low) * up:.1f}"
        for calls, private in zip(measured.calls, measured.private, strict=True)
    )
    bottom, right = _HEIGHT - _MARGIN, _WIDTH - _MARGIN
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="private memory over calls">'
        f'<path d="M{_MARGIN} {_MARGIN}V{bottom}H{right}" fill="none" stroke="#999"/>'
        f'<polyline points="{points}" fill="none" stroke="#2563a8" stroke-width="2"/>'
        f'<text x="{_MARGIN}" y="{_MARGIN - 8}">{format_bytes(high)} private memory</text>'
        f'<text x="{_MARGIN}" y="{bottom + 20}">from {format_bytes(low)}</text>'
        f'<text x="{right}" y="{bottom + 20}" text-anchor="end">{measured.calls[-1]:,} calls</text></svg>'
    )


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
