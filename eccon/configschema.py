"""JSON Schema of `eccon.toml`, from the structs that check it: an editor then knows the keys as well."""

import ast
import inspect
from types import ModuleType
from typing import Any

import msgspec

from eccon import config
from eccon.clashes import LAUNCHED
from eccon_proxy import settings
from eccon_proxy.settings import SECRET_FIELDS

__all__ = ["schema"]


def schema() -> dict[str, Any]:
    """Draft 2020-12. Descriptions are the fields' own."""
    _, parts = msgspec.json.schema_components(
        [config.ClusterFile, settings.Settings], ref_template="#/$defs/{name}"
    )
    for module in (config, settings):
        for name, fields in _described(module).items():
            for field, text in fields.items():
                if field in parts.get(name, {}).get("properties", {}):
                    parts[name]["properties"][field].setdefault("description", text)
    own = parts.pop("Settings")["properties"]
    allowed = {k: v for k, v in own.items() if k not in LAUNCHED and k not in SECRET_FIELDS}
    found = parts["Proxy"]["properties"]["settings"]
    found.pop("additionalProperties", None)
    found |= {"properties": allowed, "additionalProperties": False}
    top = parts.pop("ClusterFile")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "eccon.toml",
        **{k: v for k, v in top.items() if k != "title"},
        "$defs": parts,
    }


def _described(module: ModuleType) -> dict[str, dict[str, str]]:
    """The text under each field, by class and field: Python itself does not keep it."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = found.setdefault(node.name, {})
        for field, text in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                fields[field.target.id] = inspect.cleandoc(text.value.value)
    return found
