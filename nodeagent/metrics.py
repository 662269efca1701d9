"""The agent's metrics, in a registry of their own. Names and labels are what dashboards rely on."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

READ_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TIERS = ("dram", "nvme")
SOURCES = ("local", "peer")
EVICTION_REASONS = {
    "dram": ("quota", "demand", "corrupt", "forgotten"),
    "nvme": ("quota", "corrupt", "vanished", "unreadable", "foreign", "forgotten"),
}
"""Quota: ahead of need, or for a file's room. Demand: a put found no free slot. The rest: what became of the bytes."""
PUT_REFUSALS = ("busy", "conflict", "forgotten", "full", "corrupt", "refused", "other_bits")
PROMOTION_REFUSALS = (
    "nvme_reads_full",
    "promote_have",
    "promote_busy",
    "promote_conflict",
    "promote_full",
    "promote_refused",
)
WRITE_REFUSALS = (
    "endurance",
    "nvme_conflict",
    "nvme_corrupt",
    "nvme_crowded",
    "nvme_error",
    "nvme_evicted_first",
    "nvme_paused",
    "nvme_quarantined",
    "nvme_queue_full",
    "nvme_quota",
    "nvme_strange",
)

PEER_HINT_REFUSALS = (
    "absent",
    "cancelled",
    "held",
    "late",
    "left_alone",
    "no_engine",
    "no_room",
    "off",
    "put_busy",
    "put_conflict",
    "put_forgotten",
    "put_full",
    "put_have",
    "put_refused",
    "queue_full",
    "slower",
    "too_many_peers",
    "unmeasured",
)
PEER_FAILURES = ("bad_bytes", "bad_client", "fault", "refused", "server_full", "unreachable")


class AgentMetrics:
    """All series of one agent. `degraded` counts by reason whatever cost hit rate and nothing else.

    Those with labels that are known are there from the start, at 0: an event that never happened is no gap.
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.tokens_requested = Counter(
            "warmroute_tier_tokens_requested", "Tokens whose KV engines asked the host for", registry=registry
        )
        self.tokens_missed = Counter(
            "warmroute_tier_missed_tokens", "Tokens asked for that no tier of the host delivered", registry=registry
        )
        self.hit_tokens = Counter(
            "warmroute_tier_hit_tokens", "Tokens delivered, by tier and source", ["tier", "source"], registry=registry
        )
        self.bytes_used = Gauge("warmroute_tier_bytes_used", "Bytes in use", ["tier"], registry=registry)
        self.bytes_limit = Gauge("warmroute_tier_bytes_limit", "The tier's quota", ["tier"], registry=registry)
        self.read_seconds = Histogram(
            "warmroute_tier_read_seconds",
            "Seconds of a read: from dram a run of chunks by an engine, from nvme one chunk by the agent",
            ["tier"],
            registry=registry,
            buckets=READ_BUCKETS_S,
        )
        self.write_bytes = Counter("warmroute_tier_write_bytes", "Bytes stored", ["tier"], registry=registry)
        self.checksum_failures = Counter(
            "warmroute_checksum_failures", "Payloads that were not what they should be", registry=registry
        )
        self.deadline_misses = Counter(
            "warmroute_deadline_misses", "Opens that went without chunks that were being read", registry=registry
        )
        self.conflicts = Counter(
            "warmroute_put_conflicts", "Puts of other bytes under a key that is held; refused", registry=registry
        )
        self.evictions = Counter("warmroute_evictions", "Chunks evicted", ["tier", "reason"], registry=registry)
        self.admission_refused = Counter(
            "warmroute_admission_refused",
            "Chunks that a tier didn't take, by reason: from engines, into dram from nvme, or onto a drive",
            ["reason"],
            registry=registry,
        )
        self.prefetched = Counter(
            "warmroute_prefetched_chunks", "Chunks read into dram because a gateway said so", registry=registry
        )
        self.prefetches_dropped = Counter(
            "warmroute_prefetches_dropped", "Prefetches that weren't done, by reason", ["reason"], registry=registry
        )
        self.drive_up = Gauge(
            "warmroute_nvme_drive_up", "1 while a drive is used, 0 in quarantine", ["drive"], registry=registry
        )
        self._add_endurance(registry)
        self._add_peers(registry)
        self._add_announcing(registry)
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        for tier in TIERS:
            for by_tier in (self.bytes_used, self.bytes_limit, self.read_seconds, self.write_bytes):
                by_tier.labels(tier)
            for source in SOURCES:
                self.hit_tokens.labels(tier, source)
            for reason in EVICTION_REASONS[tier]:
                self.evictions.labels(tier, reason)
        for tier in ("gpu", *TIERS):
            self.announced_chunks.labels(tier)
        for reason in PUT_REFUSALS + PROMOTION_REFUSALS + WRITE_REFUSALS:
            self.admission_refused.labels(reason)

    def _add_endurance(self, registry: CollectorRegistry) -> None:
        self.write_budget_bytes = Gauge(
            "warmroute_nvme_write_budget_bytes",
            "Bytes that may be written to a drive now, by its endurance budget; +Inf for one without",
            ["drive"],
            registry=registry,
        )
        self.write_budget_day_bytes = Gauge(
            "warmroute_nvme_write_budget_day_bytes",
            "Bytes that may be written to a drive in any 24 hours: its capacity x DWPD",
            ["drive"],
            registry=registry,
        )
        self.written_today_bytes = Gauge(
            "warmroute_nvme_written_today_bytes",
            "Bytes written to a drive since midnight (UTC), headers and padding included",
            ["drive"],
            registry=registry,
        )

    def _add_peers(self, registry: CollectorRegistry) -> None:
        self.peer_bytes = Counter(
            "warmroute_peer_bytes", "Bytes of chunks from and to other hosts' agents", ["direction"], registry=registry
        )
        self.peer_fetched = Counter(
            "warmroute_peer_fetched_chunks", "Chunks brought into dram from other hosts' agents", registry=registry
        )
        self.peer_fetch_seconds = Histogram(
            "warmroute_peer_fetch_seconds",
            "Seconds to bring one chunk from another host's agent, from asking to indexing",
            registry=registry,
            buckets=READ_BUCKETS_S,
        )
        self.peer_refused = Counter(
            "warmroute_peer_hints_refused",
            "Chunks that hints named and that weren't fetched, by reason",
            ["reason"],
            registry=registry,
        )
        self.peer_failures = Counter(
            "warmroute_peer_failures",
            "Conversations with other hosts' agents that went wrong, by reason",
            ["reason"],
            registry=registry,
        )

        for reason in PEER_HINT_REFUSALS:
            self.peer_refused.labels(reason)
        for reason in PEER_FAILURES:
            self.peer_failures.labels(reason)
        for direction in ("received", "sent"):
            self.peer_bytes.labels(direction)

    def _add_announcing(self, registry: CollectorRegistry) -> None:
        self.announced_chunks = Gauge(
            "warmroute_announced_chunks", "Chunks this host's lives hold in the directory", ["tier"], registry=registry
        )
        self.announce_lag = Histogram(
            "warmroute_announce_lag_seconds",
            "Seconds from a change to the directory's acknowledgement",
            registry=registry,
            buckets=LAG_BUCKETS_S,
        )
        self.walks = Counter("warmroute_walks", "Whole inventories announced anew", ["reason"], registry=registry)
        self.directory_errors = Counter(
            "warmroute_directory_errors", "Directory calls that failed", ["op"], registry=registry
        )
        self.partitions_failing = Gauge(
            "warmroute_partitions_failing",
            "Partitions of the directory that didn't take the last batch, added up over the host and its engines",
            registry=registry,
        )
        self.hellos_refused = Counter(
            "warmroute_hellos_refused", "Engines that were not let in; the log says why", registry=registry
        )
        self.events_skipped = Counter(
            "warmroute_kv_events_skipped",
            "What of engines' KV events wasn't used, by reason: fields and types that aren't known, other media, ...",
            ["reason"],
            registry=registry,
        )
        self.degraded = Counter(
            "warmroute_degraded", "What cost hit rate and nothing else", ["reason"], registry=registry
        )
