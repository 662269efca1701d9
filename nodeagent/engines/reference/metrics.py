"""The engine's metrics, under vLLM's names for what it has, so that dashboards and routers read both alike."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_FINISH_REASONS = ("stop", "length", "abort")
_SOURCES = ("device", "host")
_WRITE_OUTCOMES = ("stored", "already", "refused", "dropped")


class EngineMetrics:
    """All series of one engine, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        labels = {"engine": "0", "model_name": model_name}

        def counter(name: str, text: str, *extra: str) -> Counter:
            return Counter(f"vllm:{name}", text, (*labels, *extra), registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"vllm:{name}", text, tuple(labels), registry=self.registry).labels(**labels)

        def seconds(name: str, text: str) -> Histogram:
            series = Histogram(f"vllm:{name}", text, tuple(labels), registry=self.registry, buckets=_SECONDS)
            return series.labels(**labels)

        self.running = gauge("num_requests_running", "Requests being computed.")
        self.waiting = gauge("num_requests_waiting", "Requests waiting for a place.")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of the gpu tier that is in use; 1 is all of it.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that were admitted.").labels(**labels)
        self.generation_tokens = counter("generation_tokens", "Generated tokens.").labels(**labels)
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the engine's own cache.")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the engine's own cache.")
        self.external_queries = counter("external_prefix_cache_queries", "Prompt tokens looked up in the host's tiers.")
        self.external_hits = counter("external_prefix_cache_hits", "Prompt tokens loaded from the host's tiers.")
        self.prefix_queries, self.prefix_hits, self.external_queries, self.external_hits = (
            each.labels(**labels)
            for each in (self.prefix_queries, self.prefix_hits, self.external_queries, self.external_hits)
        )
        by_source = counter("prompt_tokens_cached_by_source", "Cached prompt tokens by tier: device, host.", "source")
        self.cached_by_source = {each: by_source.labels(**labels, source=each) for each in _SOURCES}
        succeeded = counter("request_success", "Finished requests by reason.", "finished_reason")
        self.finished = {each: succeeded.labels(**labels, finished_reason=each) for each in _FINISH_REASONS}
        self.first_token_s = seconds("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self.between_tokens_s = seconds("inter_token_latency_seconds", "From one token to the next.")
        self.request_s = seconds("e2e_request_latency_seconds", "From a request's arrival to its end.")
        self.prefill_s = seconds("request_prefill_time_seconds", "From a request's admission to its first token.")
        tokens_loaded = Counter(
            "warmroute_engine_loaded_tokens",
            "Prompt tokens loaded instead of computed, by tier.",
            ("model", "tier"),
            registry=self.registry,
        )
        self.loaded = {tier: tokens_loaded.labels(model=model_name, tier=tier) for tier in ("gpu", "dram", "nvme")}
        writes = Counter(
            "warmroute_engine_chunk_writes",
            "Chunks handed to the host's tiers, by outcome.",
            ("model", "outcome"),
            registry=self.registry,
        )
        self.writes = {each: writes.labels(model=model_name, outcome=each) for each in _WRITE_OUTCOMES}

    def count_prompt(self, prompt_tokens: int, loaded_tokens: dict[str, int]) -> None:
        """A prompt is complete: so many tokens, of which so many came from each tier."""
        in_gpu = loaded_tokens.get("gpu", 0)
        elsewhere = sum(loaded_tokens.values()) - in_gpu
        self.prompt_tokens.inc(prompt_tokens)
        self.prefix_queries.inc(prompt_tokens)
        self.prefix_hits.inc(in_gpu)
        self.external_queries.inc(prompt_tokens - in_gpu)
        self.external_hits.inc(elsewhere)
        self.cached_by_source["device"].inc(in_gpu)
        self.cached_by_source["host"].inc(elsewhere)
        for tier, tokens in loaded_tokens.items():
            self.loaded[tier].inc(tokens)

    def count_write(self, outcome: str) -> None:
        """A chunk's way to the host's tiers ended."""
        self.writes[outcome].inc()

    def text(self) -> bytes:
        """The exposition, in Prometheus' text format."""
        return generate_latest(self.registry)
