"""Metrics of certificates and refused connections, alike in both programs."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prestage.wire.security import Connections
from prestage.wire.tls_files import TlsFiles


class SecurityMetrics(Collector):
    """Reads when it is asked; changes nothing. Safe from any thread."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        """`prefix`: `prestage` or `prestage_worker`."""
        self._prefix = prefix
        self._tls: TlsFiles | None = None
        self._connections: tuple[Connections, ...] = ()
        registry.register(self)

    def watch(self, tls: TlsFiles | None, *connections: Connections) -> None:
        """Where the certificate and each guard's connections are read."""
        self._tls = tls
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        tls = self._tls
        expiry = GaugeMetricFamily(
            f"{self._prefix}_certificate_expiry_timestamp_seconds",
            "Unix time at which the served certificate expires; absent without TLS.",
        )
        if tls is not None:
            expiry.add_metric((), tls.expires_at_s)
        yield expiry
        yield CounterMetricFamily(
            f"{self._prefix}_certificate_reload_failures",
            "Changes of --tls_dir that could not be used; the former certificate stays.",
            value=0 if tls is None else tls.failed_reloads,
        )
        yield CounterMetricFamily(
            f"{self._prefix}_refused_connections",
            "Connections over TLS that carried no call within 15 s: plain text, no certificate,"
            " another authority's, or silent.",
            value=sum(item.refused for item in self._connections),
        )
