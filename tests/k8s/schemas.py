"""Every object has the schema of its kind, in the oldest and the newest Kubernetes that is supported.

Kubernetes' own kinds are checked by kubernetes-validate, with unknown fields refused; custom resources by the
schemas in `crds`. A kind without a schema is a finding: nothing passes unseen.
"""

import functools
import json
from pathlib import Path

import jsonschema
import kubernetes_validate

from tests.k8s.manifests import Manifests, Object, title

OLDEST = "1.30"
NEWEST = "1.37"
CUSTOM_RESOURCES = Path(__file__).parent / "crds"

# It would read the files of schemas, of some MB, for every object.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


def check_schemas(manifests: Manifests) -> list[str]:
    """Return what does not fit its schema, the first mistake of each object."""
    findings = []
    for item in manifests.objects:
        mistake = _custom_mistake(item) if _is_custom(item) else _core_mistakes(item)
        if mistake:
            findings.append(f"{title(item)}: {mistake}")
    for item in manifests.of_kind("LeaderWorkerSet"):  # its schema leaves pods to Kubernetes
        for name in ("leaderTemplate", "workerTemplate"):
            pod = {"apiVersion": "v1", "kind": "Pod", **item["spec"]["leaderWorkerTemplate"].get(name, {})}
            if mistake := _core_mistakes(pod):
                findings.append(f"{title(item)} {name}: {mistake}")
    return findings


def _is_custom(item: Object) -> bool:
    return (CUSTOM_RESOURCES / f"{item['kind'].lower()}.json").exists()


def _custom_mistake(item: Object) -> str | None:
    error = jsonschema.exceptions.best_match(_validator(item["kind"]).iter_errors(item))
    return f"{error.json_path}: {error.message}" if error else None


@functools.cache
def _validator(kind: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((CUSTOM_RESOURCES / f"{kind.lower()}.json").read_text(encoding="utf-8"))
    return jsonschema.Draft202012Validator(schema)


def _core_mistakes(item: Object) -> str | None:
    text = json.dumps(item, sort_keys=True)
    return _core_mistake(text, OLDEST) or _core_mistake(text, NEWEST)


@functools.cache
def _core_mistake(text: str, version: str) -> str | None:
    item = json.loads(text)
    try:
        kubernetes_validate.validate(item, version, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return f"Kubernetes {version} has no {item['kind']} of {item['apiVersion']}"
    except kubernetes_validate.ValidationError as error:
        return f"in Kubernetes {version}, {'.'.join(map(str, error.path))}: {error.message}"
    return None
