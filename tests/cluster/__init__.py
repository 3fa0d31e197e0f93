"""Octavo on a real Kubernetes cluster: `make cluster-test`; docs/kubernetes.md has what was seen."""
