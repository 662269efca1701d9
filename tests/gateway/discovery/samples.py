"""EndpointSlices as an API server has them."""

from typing import Any

SERVICE = "vllm"


def endpoint(pod: str, address: str, uid: str = "", **conditions: bool | None) -> dict[str, Any]:
    """An endpoint; without conditions it is ready."""
    return {
        "addresses": [address],
        "conditions": {"ready": True, "serving": True, "terminating": False} | conditions,
        "targetRef": {"kind": "Pod", "name": pod, "uid": uid or f"uid-{pod}", "namespace": "llm"},
    }


def endpoint_slice(name: str, *endpoints: dict[str, Any], ports: Any = None, **other: Any) -> dict[str, Any]:
    """A slice with these endpoints."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "llm", "labels": {"kubernetes.io/service-name": SERVICE}},
        "addressType": "IPv4",
        "endpoints": list(endpoints),
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}] if ports is None else ports,
        **other,
    }
