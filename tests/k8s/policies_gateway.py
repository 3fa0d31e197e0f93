"""What comes through a Gateway arrives whole, at pods that know the tenant by a token, over a connection with TLS."""

from collections.abc import Iterator

from tests.k8s.manifests import Manifests, Object, PodTemplate, environment, title

ROUTES = {"HTTPRoute": "openai", "GRPCRoute": "grpc"}


def check_gateway(manifests: Manifests) -> list[str]:
    """Routes change and cut nothing, lead to pods that ask for tokens, and have names of their own."""
    findings = []
    names: list[str] = []
    for route in manifests.of_kind(*ROUTES):
        findings += [f"{title(route)}: {mistake}" for mistake in _route_mistakes(manifests, route)]
        names += route["spec"].get("hostnames", ["any"])
    findings += [
        f"{name}: is the name of two routes" for name in sorted({name for name in names if names.count(name) > 1})
    ]
    for pool in manifests.of_kind("InferencePool"):
        for pod in manifests.selected(pool["spec"]["selector"]):
            if pod.port("metrics") != 9090:
                findings.append(f"{title(pool)}: the picker finds no metrics of {pod.owner}")
    return findings


def _route_mistakes(manifests: Manifests, route: Object) -> Iterator[str]:
    for rule in route["spec"]["rules"]:
        if rule.get("filters"):
            yield "a filter changes what a client sent"
        if route["kind"] == "HTTPRoute" and rule.get("timeouts", {}).get("request") != "0s":
            yield "a long answer is cut"
        for backend in rule["backendRefs"]:
            kind, name = backend.get("kind", "Service"), backend["name"]
            pods, port = _backend(manifests, kind, name)
            if not pods or backend.get("port", port) != port:
                yield f"{kind}/{name} has no pods at port {backend.get('port')}"
            for pod in pods:
                if pod.port(ROUTES[route["kind"]]) != port:
                    yield f"{pod.owner} serves something else at {port}"
                if not any("TOKENS_FILE" in variable for variable in environment(pod.containers[0])):
                    yield f"to {pod.owner} everybody is one tenant"
                yield from _tls_mistakes(manifests, kind, name, pod)


def _backend(manifests: Manifests, kind: str, name: str) -> tuple[list[PodTemplate], int]:
    """Return the pods behind a Service or an InferencePool, and its port."""
    item = manifests.find(kind, name)
    if item is None:
        return [], 0
    if kind == "InferencePool":
        return manifests.selected(item["spec"]["selector"]), item["spec"]["targetPorts"][0]["number"]
    return manifests.selected({"matchLabels": item["spec"]["selector"]}), item["spec"]["ports"][0]["port"]


def _tls_mistakes(manifests: Manifests, kind: str, name: str, pod: PodTemplate) -> Iterator[str]:
    certificate = manifests.named("Certificate", f"octavo-{pod.component}-tls")
    policies = [
        item["spec"]["validation"]
        for item in manifests.of_kind("BackendTLSPolicy")
        if (kind, name) in [(target["kind"], target["name"]) for target in item["spec"]["targetRefs"]]
    ]
    if bool(certificate) != bool(policies):
        yield f"TLS to {kind}/{name} is {'on' if certificate else 'off'}, and the Gateway does not know"
    elif certificate and any(item["hostname"] not in certificate["spec"]["dnsNames"] for item in policies):
        yield f"expects {policies[0]['hostname']} of {pod.owner}, whose certificate lacks it"
