"""Write the schemas of the Gateway API in this directory anew.

    npm pack @kubernetes-models/gateway-api@2.0.0 && tar xzf kubernetes-models-gateway-api-2.0.0.tgz
    python tests/k8s/crds/extract_gateway_api.py package

The package has one TypeScript class for each Go type of the project. It does not tell patterns of strings. What is left
out: descriptions, the status. What is added: a field that the class does not name is refused.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

KINDS = ("HTTPRoute", "GRPCRoute", "BackendTLSPolicy")
PLAIN = {"string": "string", "number": "integer", "boolean": "boolean"}
FIELD = re.compile(r'^    "([^"]+)"(\??): (\{.*?^    \}|[^;]+);', re.MULTILINE | re.DOTALL)


def schema_of(types: Path, name: str) -> dict[str, Any]:
    """Return the schema of a type of the package, with those of its fields."""
    text = re.sub(r"/\*\*.*?\*/", "", (types / f"{name}.d.ts").read_text(encoding="utf-8"), flags=re.DOTALL)
    alias = re.search(rf"^export type I{name} = (.+);$", text, re.MULTILINE)
    if alias:
        return _value(types, alias[1])
    declared = re.search(rf"^export declare class {name} .*?^}}", text, re.MULTILINE | re.DOTALL)
    assert declared is not None, name
    fields = [match.groups() for match in FIELD.finditer(declared[0]) if match[1] != "status"]
    return {
        "additionalProperties": False,
        "properties": {field: _value(types, value) for field, _, value in fields},
        "required": sorted(field for field, optional, _ in fields if not optional),
        "type": "object",
    }


def _value(types: Path, value: str) -> dict[str, Any]:
    if value in PLAIN:
        return {"type": PLAIN[value]}
    if value.startswith("Array<"):
        return {"type": "array", "items": _value(types, value[len("Array<") : -1])}
    if value.startswith("{"):  # a map
        return {"type": "object", "additionalProperties": _value(types, value.rpartition(": ")[2].split(";")[0])}
    if value[0] in '"0123456789':
        return {"enum": json.loads(f"[{value.replace(' | ', ', ')}]")}
    if value.startswith("IIoK8sApimachinery"):
        return {"type": "object"}
    return schema_of(types, value.removeprefix("IIoK8sSigsGatewayApiApisV1"))


def main() -> None:
    """Write one file for each kind."""
    types = Path(sys.argv[1]) / "gateway.networking.k8s.io/v1"
    for kind in KINDS:
        schema = schema_of(types, kind)
        schema["required"] = sorted({*schema["required"], "metadata"})
        path = Path(__file__).parent / f"{kind.lower()}.json"
        path.write_text(json.dumps(schema, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
