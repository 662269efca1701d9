"""Several processes' metrics as one, against plain sums."""

from collections import Counter as Count

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from warmroute.gateway_workers.merged_metrics import MergedMetrics

MODELS = ("a", 'b"\\', "c\n")


class Process:
    """One life of a worker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("warmroute_requests_total", "Requests.", ["model"], registry=self.registry)
        self.seconds = Histogram("warmroute_s", "Seconds.", buckets=(1, 2), registry=self.registry)
        self.open = Gauge("warmroute_inflight_requests", "Open.", ["engine"], registry=self.registry)
        self.others = Gauge("warmroute_others_inflight_requests", "Others'.", ["engine"], registry=self.registry)
        self.flops = Gauge("warmroute_engine_flops", "FLOP/s.", ["engine"], registry=self.registry)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


def read(merged: MergedMetrics) -> dict[tuple[str, str], float]:
    """Each sample by its name and the value of its one label, if it has one."""
    families = text_string_to_metric_families(merged.text().decode())
    samples = [sample for family in families for sample in family.samples]
    return {(each.name, next(iter(each.labels.values()), "")): each.value for each in samples}


events = st.lists(
    st.one_of(
        st.tuples(st.just("count"), st.integers(0, 2), st.sampled_from(MODELS), st.integers(1, 5)),
        st.tuples(st.just("read"), st.integers(0, 2)),
        st.tuples(st.just("die"), st.integers(0, 2)),
    ),
    max_size=40,
)


@given(events)
def test_counters_are_what_was_read_of_every_life_and_never_go_back(happened: list[tuple[str, int, str, int]]) -> None:
    merged, lives = MergedMetrics(), [Process() for _ in range(3)]
    said: list[Count[str]] = [Count() for _ in lives]
    known: list[Count[str]] = [Count() for _ in lives]
    buried: Count[str] = Count()
    before: dict[str, float] = {}
    for kind, worker, *more in happened:
        if kind == "count":
            model, amount = more
            lives[worker].requests.labels(model).inc(int(amount))
            said[worker][str(model)] += int(amount)
        elif kind == "read":
            merged.take(worker, lives[worker].text())
            known[worker] = Count(said[worker])
        else:
            merged.bury(worker)
            buried += known[worker]
            lives[worker], said[worker], known[worker] = Process(), Count(), Count()
        now = {label: value for (name, label), value in read(merged).items() if name == "warmroute_requests_total"}
        assert now == dict(sum(known, buried))
        assert all(now.get(model, 0) >= value for model, value in before.items())
        before = now


def test_histograms_add_up_bucket_by_bucket() -> None:
    merged = MergedMetrics()
    for worker, seconds in enumerate((0.5, 1.5, 9.0)):
        process = Process()
        process.seconds.observe(seconds)
        merged.take(worker, process.text())
    merged.bury(1)
    seen = read(merged)
    assert [seen["warmroute_s_bucket", bound] for bound in ("1.0", "2.0", "+Inf")] == [1, 2, 3]
    assert (seen["warmroute_s_sum", ""], seen["warmroute_s_count", ""]) == (11.0, 3)


def test_gauges_are_of_the_processes_that_live_and_siblings_are_no_others() -> None:
    merged = MergedMetrics()
    for worker, (own, others) in enumerate(((3, 9), (2, 10), (7, 5))):
        process = Process()  # each counts its siblings among the others: 12 in all, none of other gateways
        process.open.labels("e").set(own)
        process.others.labels("e").set(others)
        process.flops.labels("e").set(1e12)
        merged.take(worker, process.text())
    seen = read(merged)
    assert seen["warmroute_inflight_requests", "e"] == 12
    assert seen["warmroute_others_inflight_requests", "e"] == 0
    assert seen["warmroute_engine_flops", "e"] == 1e12
    merged.bury(2)
    assert read(merged)["warmroute_inflight_requests", "e"] == 5
    for worker in (0, 1):
        merged.bury(worker)
    assert ("warmroute_inflight_requests", "e") not in read(merged)
