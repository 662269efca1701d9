"""What several workers say of the fleet, as one."""

from typing import Any

from warmroute.gateway_workers.merged_fleet import merged_fleet


def said(own: float, others: float, **more: Any) -> dict[str, Any]:
    row = {"inflight_requests": own, "booked_seconds": own / 10}
    row |= {f"others_{name}": value for name, value in (("inflight_requests", others), ("booked_seconds", others / 10))}
    fleet = {"engines": [{"engine": "e", "state": "ready", **row}], "lookup_pauses": 1, "other_gateways": []}
    return {**fleet, "directory": "ok", "lookups": "ok", "reports": "ok", **more}


def test_work_is_added_and_siblings_are_no_others() -> None:
    gateways = [{"gateway": "here:1/1"}, {"gateway": "here:1/2"}, {"gateway": "there:1"}]
    merged = merged_fleet([said(3, 6, other_gateways=gateways), said(2, 7)], frozenset({"here:1/1", "here:1/2"}))
    (row,) = merged["engines"]
    assert (row["inflight_requests"], row["others_inflight_requests"]) == (5, 4)
    assert (row["booked_seconds"], row["others_booked_seconds"]) == (0.5, 0.4)
    assert (merged["other_gateways"], merged["lookup_pauses"]) == ([{"gateway": "there:1"}], 2)


def test_what_is_wrong_with_one_worker_is_said() -> None:
    merged = merged_fleet([said(0, 0), said(0, 0, lookups="paused")], frozenset())
    assert (merged["lookups"], merged["directory"]) == ("paused", "ok")
