"""``verify``: whether training under a plan equals training in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..planner.schema.errors import InputError, RunError
from ..planner.schema.plan import Plan
from ..planner.schema.record import load
from .options import Json, PlanFile, Timeout, out
from .output import check_out, deliver, note
from .render.comparisons import verification_table
from .values import whole


def verify(
    plan_file: PlanFile,
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    batch: Annotated[
        int | None, whole("Samples of a step (default: up to 4 for each rank).")
    ] = None,
    timeout: Timeout = None,
    out_: Annotated[Path | None, out("result")] = None,
    json: Json = False,
) -> None:
    """Show that training under a plan equals training in one process, on the plan's own model."""
    from .. import api

    check_out(out_)
    made = load(Plan, plan_file, "PLAN")
    found = api.verify(made, dtype=_dtype(dtype), batch=batch, timeout_s=timeout)
    for remark in found.notes:
        note(remark)
    verdict = "PASS" if found.passed else "FAIL"
    deliver(found, out_, json, verification_table(found), verdict)
    if not found.passed:
        raise RunError(f"the plan's training differs from one process's in {found.dtype}")


def _dtype(name: str) -> Literal["float64", "float32"]:
    names: dict[str, Literal["float64", "float32"]] = {"float64": "float64", "float32": "float32"}
    if name not in names:
        raise InputError(f"--dtype {name!r} is not compared: choose float64 or float32")
    return names[name]
