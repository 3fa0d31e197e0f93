"""Write the schemas of the custom resources in this directory anew.

    pip install cloudcoil-models-keda==2.16.1.0 cloudcoil-models-cert-manager==1.17.1.0 \
        cloudcoil-models-prometheus-operator==0.80.1.0
    python tests/k8s/crds/extract.py

in an environment of its own. Those packages are generated from the projects' CustomResourceDefinitions. What is left
out: descriptions, titles, the status. What is added: a field that the definition does not name is refused.
"""

import importlib
import json
from pathlib import Path
from typing import Any

RESOURCES = [
    ("cloudcoil.models.keda.v1alpha1", "ScaledObject"),
    ("cloudcoil.models.cert_manager.v1", "Certificate"),
    ("cloudcoil.models.cert_manager.v1", "Issuer"),
    ("cloudcoil.models.prometheus_operator.v1", "PodMonitor"),
    ("cloudcoil.models.prometheus_operator.v1", "PrometheusRule"),
]


def strict(node: Any) -> Any:
    """Return the schema without prose and without null, with unknown fields refused."""
    if isinstance(node, list):
        return [strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "anyOf" in node:
        alternatives = [strict(item) for item in node["anyOf"] if item != {"type": "null"}]
        return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}
    result: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("properties", "$defs"):  # names of fields, not keywords
            result[key] = {name: strict(item) for name, item in value.items()}
        elif key not in ("title", "description", "default"):
            result[key] = strict(value)
    if result.get("type") == "object" and "properties" in result:
        result.setdefault("additionalProperties", False)
    return result


def without_status(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without the status and the definitions that only it needs."""
    schema["properties"].pop("status", None)
    used: set[str] = set()
    pending = [schema["properties"]]
    while pending:
        for name in json.dumps(pending.pop()).split('"#/$defs/')[1:]:
            name = name.partition('"')[0]
            if name not in used:
                used.add(name)
                pending.append(schema["$defs"][name])
    schema["$defs"] = {name: schema["$defs"][name] for name in sorted(used)}
    return schema


def main() -> None:
    """Write one file for each resource."""
    for module, kind in RESOURCES:
        model = getattr(importlib.import_module(module), kind)
        schema = without_status(strict(model.model_json_schema(by_alias=True)))
        schema["required"] = sorted({*schema.get("required", []), "apiVersion", "kind", "metadata"})
        path = Path(__file__).parent / f"{kind.lower()}.json"
        path.write_text(json.dumps(schema, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
