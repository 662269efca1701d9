"""The agent's metrics, in a registry of their own. Names and labels are what dashboards rely on."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

READ_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class AgentMetrics:
    """All series of one agent. `degraded` counts by reason whatever cost hit rate and nothing else."""

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
            "warmroute_admission_refused", "Puts that were refused, by reason", ["reason"], registry=registry
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

    def _add_endurance(self, registry: CollectorRegistry) -> None:
        self.write_budget_bytes = Gauge(
            "warmroute_nvme_write_budget_bytes",
            "Bytes that may be written to a drive now, by its endurance budget",
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
