"""Checks (checks.py) of the objects that a JSON Schema describes, as `deltaproof list --schema`
prints it.

    of(schema, need, own) -> {name: check of that object}

need: by object, the fields without which there is no page. own: checks in place of those of the
schema. A verdict is one of the schema's words. Other words may be those of a later writer.
"""

from typing import Any

from read.checks import (
    MOST,
    Check,
    boolean,
    integer_from,
    list_of,
    number,
    object_of,
    one_of,
    text,
    texts,
)

Checks = dict[str, Check]


def may_be_null(kind: dict[str, Any]) -> bool:
    kinds = [x.get("type", ()) for x in kind.get("anyOf", (kind,))]
    return None in kind.get("enum", ()) or any("null" in x for x in kinds)


def of(schema: dict[str, Any], need: dict[str, tuple[str, ...]], own: Checks) -> Checks:
    checks: Checks = {}

    def object_at(name: str) -> Check:
        """Looked up when it is called: own checks may call those of the schema."""
        return lambda x, f: (own.get(name) or checks[name])(x, f)

    def value(kind: dict[str, Any], verdict: bool) -> Check:
        if "$ref" in kind:
            return object_at(kind["$ref"].rpartition("/")[2])
        if "anyOf" in kind:
            return number
        if "enum" in kind:
            return one_of(kind["enum"]) if verdict else text
        if kind["type"] == "integer":
            return integer_from(kind.get("minimum", -MOST), kind.get("maximum", MOST))
        if kind["type"] == "array":
            entry = kind["items"]
            hole = may_be_null(entry) or entry.get("type") == "array"
            return list_of(value(entry, False), hole, kind.get("maxItems"))
        of_type = {"string": text, "boolean": boolean, "object": texts}
        return of_type["string" if may_be_null(kind) else kind["type"]]

    for name, described in {schema["title"]: schema, **schema["$defs"]}.items():
        fields = {k: value(v, k == "verdict") for k, v in described["properties"].items()}
        never_null = {k for k, v in described["properties"].items() if not may_be_null(v)}
        checks[name] = object_of(fields, need.get(name, ()), frozenset(never_null))
    return checks
