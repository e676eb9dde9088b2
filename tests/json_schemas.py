"""The JSON Schemas of the documents and of a run's report, as files.

``python -m tests.json_schemas FOLDER`` writes them.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import msgspec
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.schema.record import Record, write_whole
from meshwright.planner.schema.report import RunReport

DOCUMENTS: dict[str, type[Record]] = {
    "plan": Plan,
    "model_profile": ModelProfile,
    "cluster": Cluster,
    "run_report": RunReport,
}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema_files() -> dict[str, bytes]:
    """File name and content of each document's schema."""
    files = {}
    for name, cls in DOCUMENTS.items():
        content = {"$schema": DIALECT, "title": cls.__name__, **_cleaned(msgspec.json.schema(cls))}
        encoded = msgspec.json.encode(content, order="deterministic")
        files[f"{name}.json"] = msgspec.json.format(encoded, indent=1) + b"\n"
    return files


def _cleaned(part: Any) -> Any:
    """A schema with its descriptions as ``inspect.getdoc`` gives them."""
    # From Python 3.13 on the compiler takes the indentation off docstrings, before it does not.
    if isinstance(part, dict):
        return {
            key: inspect.cleandoc(value)
            if key == "description" and isinstance(value, str)
            else _cleaned(value)
            for key, value in part.items()
        }
    return [_cleaned(value) for value in part] if isinstance(part, list | tuple) else part


def main(arguments: list[str]) -> int:
    """Writes the schemas into the folder named."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        got = " ".join(arguments) or "nothing"
        raise InputError(f"name one folder that exists to write schemas into, got {got}")
    for name, content in schema_files().items():
        write_whole(Path(arguments[0]) / name, content)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
