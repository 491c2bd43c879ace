"""Prints a plan: tables on a terminal, plain aligned text elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

from shoal.plan.plan import Plan
from shoal.plan.sheet import Sheet
from shoal.plan.sheets import sheets


def print_plan(plan: Plan, console: Console) -> None:
    """Print every sheet of ``plan``."""
    print_sheets(sheets(plan), console)


def print_sheets(shown: Iterable[Sheet], console: Console) -> None:
    """Print ``shown``; text for a file or a pipe has no frames and is never cut."""
    for sheet in shown:
        if console.is_terminal:
            console.print(_framed(sheet))
        else:
            console.file.write(f"{plain(sheet)}\n\n")


def plain(sheet: Sheet) -> str:
    """One sheet as aligned text."""
    lines = [sheet.header, *sheet.rows] if any(sheet.header) else list(sheet.rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(sheet.header))]
    text = [sheet.title]
    for line in lines:
        cells = [
            cell.rjust(width) if column in sheet.numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append(f"  {'  '.join(cells)}".rstrip())
    if sheet.note:
        text.append(f"  {sheet.note}")
    return "\n".join(text)


def _framed(sheet: Sheet) -> Table:
    table = Table(
        title=sheet.title,
        title_justify="left",
        caption=sheet.note or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=any(sheet.header),
    )
    for column, name in enumerate(sheet.header):
        table.add_column(name, justify="right" if column in sheet.numeric else "left")
    for row in sheet.rows:
        table.add_row(*row)
    return table
