"""What slices say of engines: who may serve, under which name and address; what is strange is left out."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.hardware import Hardware
from gateway.config import EngineConfig, KubernetesConfig
from gateway.discovery.endpoint_slices import Endpoint, SliceTable
from gateway.discovery.engine_sources import EngineSources
from tests.gateway.discovery.samples import SERVICE, endpoint, endpoint_slice


def read(*slices: Any, port: str | int | None = None) -> dict[str, str]:
    """Names and places."""
    table = SliceTable(port)
    table.replace(slices)
    return {each.name: each.place for each in table.endpoints()}


def test_a_ready_pod_is_an_engine_of_its_name() -> None:
    assert read(endpoint_slice("s", endpoint("a", "10.0.0.1"), endpoint("b", "10.0.0.2"))) == {
        "a": "10.0.0.1:8000",
        "b": "10.0.0.2:8000",
    }


@pytest.mark.parametrize(
    ("conditions", "serves"),
    [
        ({}, True),
        ({"ready": None, "serving": None, "terminating": None}, True),
        ({"ready": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        ({"ready": True, "terminating": True}, False),
    ],
)
def test_a_pod_that_is_not_ready_or_ends_gets_nothing(conditions: dict[str, bool | None], serves: bool) -> None:
    assert bool(read(endpoint_slice("s", endpoint("a", "10.0.0.1", **conditions)))) == serves


def test_a_pod_is_there_once_however_many_slices_tell_of_it() -> None:
    twice = endpoint("a", "10.0.0.1")
    assert read(endpoint_slice("s", twice), endpoint_slice("t", twice)) == {"a": "10.0.0.1:8000"}


def test_what_a_list_leaves_out_is_gone_and_a_slice_is_replaced_whole() -> None:
    table = SliceTable()
    table.replace([endpoint_slice("s", endpoint("a", "10.0.0.1")), endpoint_slice("t", endpoint("b", "10.0.0.2"))])
    table.replace([endpoint_slice("t", endpoint("b", "10.0.0.2"))])
    assert [each.name for each in table.endpoints()] == ["b"]
    table.put(endpoint_slice("t", endpoint("c", "10.0.0.3")))
    assert [each.name for each in table.endpoints()] == ["c"]
    table.remove(endpoint_slice("t"))
    assert table.endpoints() == ()


@pytest.mark.parametrize(
    ("port", "place"), [(None, "10.0.0.1:9"), ("http", "10.0.0.1:8000"), (8000, "10.0.0.1:8000"), ("grpc", None)]
)
def test_the_port_is_the_named_or_numbered_one_or_else_the_first(port: str | int | None, place: str | None) -> None:
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "metrics", "port": 9, "protocol": "TCP"},
        {"name": "http", "port": 8000},
    ]
    found = read(endpoint_slice("s", endpoint("a", "10.0.0.1"), ports=ports), port=port)
    assert found.get("a") == place


def test_an_address_of_version_6_stands_in_brackets_and_a_nameless_endpoint_has_its_place_as_name() -> None:
    nameless = {"addresses": ["fd00::1"], "conditions": {"ready": True}}
    assert read(endpoint_slice("s", nameless, addressType="IPv6")) == {"[fd00::1]:8000": "[fd00::1]:8000"}


@pytest.mark.parametrize("address", ["::gg", "a]b", "a:b", "1[2", "10.0.0.1\x00", "ü", "fe80::1%eth0", "", "host.name"])
def test_what_is_no_address_costs_its_own_endpoint_only(address: str) -> None:
    table = SliceTable()
    table.put(endpoint_slice("s", endpoint("strange", address), endpoint("a", "10.0.0.1")))
    assert [each.name for each in table.endpoints()] == ["a"]
    assert table.strange == 1


def test_two_pods_that_swapped_their_addresses_keep_their_names() -> None:
    before = read(endpoint_slice("s", endpoint("a", "10.0.0.1"), endpoint("b", "10.0.0.2")))
    after = read(endpoint_slice("s", endpoint("a", "10.0.0.2"), endpoint("b", "10.0.0.1")))
    assert (before["a"], after["a"]) == ("10.0.0.1:8000", "10.0.0.2:8000")


def test_a_pod_made_again_is_another_endpoint_though_all_else_is_the_same() -> None:
    table = SliceTable()
    table.put(endpoint_slice("s", endpoint("a", "10.0.0.1", uid="1")))
    first = table.endpoints()
    table.put(endpoint_slice("s", endpoint("a", "10.0.0.1", uid="2")))
    assert table.endpoints() != first


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["metadata", "name", "endpoints", "addresses", "conditions", "ready", "ports", "port", "targetRef"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(st.lists(JSON, max_size=4))
def test_no_slice_is_too_strange_to_be_read(slices: list[Any]) -> None:
    table = SliceTable()
    table.replace([*slices, endpoint_slice("good", endpoint("a", "10.0.0.1"))])
    assert Endpoint("a", "uid-a", "10.0.0.1", 8000) in table.endpoints()
    for each in slices:
        table.remove(each)
    assert all(each.port > 0 and each.name for each in table.endpoints())


def sources(*static: EngineConfig) -> tuple[EngineSources, list[tuple[EngineConfig, ...]]]:
    told: list[tuple[EngineConfig, ...]] = []
    return EngineSources(static, Hardware(), lambda engines, _: told.append(engines)), told


def test_configured_engines_keep_their_names_and_places_and_each_engine_is_there_once() -> None:
    own = EngineConfig(url="http://10.0.0.1:8000", name="mine")
    joined, told = sources(own)
    service = KubernetesConfig(service=SERVICE, models=("m",))
    joined.discovered(0, service, [Endpoint("a", "", "10.0.0.1", 8000), Endpoint("mine", "", "10.0.0.2", 8000)])
    joined.discovered(1, service, [Endpoint("b", "", "10.0.0.2", 8000), Endpoint("c", "", "10.0.0.3", 8000)])
    assert [(each.engine, each.url, each.models) for each in told[-1]] == [
        ("mine", "http://10.0.0.1:8000", ()),
        ("10.0.0.2:8000", "http://10.0.0.2:8000", ("m",)),
        ("c", "http://10.0.0.3:8000", ("m",)),
    ]
    joined.configure((), Hardware())
    assert [each.engine for each in told[-1]] == ["a", "mine", "c"]


def test_what_is_discovered_anew_replaces_what_was() -> None:
    joined, told = sources()
    service = KubernetesConfig(service=SERVICE, scheme="https")
    joined.discovered(0, service, [Endpoint("a", "", "10.0.0.1", 8000)])
    joined.discovered(0, service, [Endpoint("a", "", "10.0.0.9", 8000)])
    assert [(each.engine, each.url) for each in told[-1]] == [("a", "https://10.0.0.9:8000")]
