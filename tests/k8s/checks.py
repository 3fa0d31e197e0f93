"""All checks of rendered manifests: each takes a rendering and returns sentences, none if all is well."""

from collections.abc import Callable

from tests.k8s.manifests import Manifests
from tests.k8s.policies_autoscaling import check_autoscaling
from tests.k8s.policies_gateway import check_gateway
from tests.k8s.policies_network import check_network
from tests.k8s.policies_pods import check_gpus, check_images, check_pod_security, check_probes
from tests.k8s.policies_settings import check_settings
from tests.k8s.policies_updates import check_drain, check_updates
from tests.k8s.policies_wiring import (
    check_encryption,
    check_labels,
    check_names,
    check_references,
    check_selectors,
    check_services,
)
from tests.k8s.schemas import check_schemas

CHECKS: dict[str, Callable[[Manifests], list[str]]] = {
    "schemas": check_schemas,
    "selectors": check_selectors,
    "services": check_services,
    "references": check_references,
    "names": check_names,
    "encryption": check_encryption,
    "labels": check_labels,
    "autoscaling": check_autoscaling,
    "updates": check_updates,
    "probes": check_probes,
    "drain": check_drain,
    "gpus": check_gpus,
    "images": check_images,
    "pod security": check_pod_security,
    "settings": check_settings,
    "network": check_network,
    "gateway": check_gateway,
}
