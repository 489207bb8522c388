"""What a scrape of a live run says."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest

from orchestrator.ingest.metrics import LiveMetrics, LiveReading, QueueAge

READING = LiveReading(
    accepted_tokens=700,
    dropped_tokens={"stale": 30, "malformed": 0},
    queue_depth=2,
    formed_groups=9,
    queue_bytes=10,
    queue_budget_bytes=100,
    incomplete_groups=3,
    producers=4,
    producer_wait_seconds=1.5,
    journal_lag_seconds=0.25,
    journal_bytes=5000,
    journal_budget_bytes=9000,
    commit_bounds=(0.001, 0.01),
    commit_buckets=(3, 4),
    commits=8,
    commit_seconds=0.5,
    policy_lag_updates=2,
)


def scraped(metrics: LiveMetrics) -> str:
    registry = CollectorRegistry()
    registry.register(metrics)
    return generate_latest(registry).decode()


def test_without_a_live_run_there_are_names_and_no_values() -> None:
    lines = scraped(LiveMetrics()).splitlines()
    assert "# TYPE prestage_queue_depth gauge" in lines
    assert [line for line in lines if not line.startswith("#")] == []


def test_readings_are_told_as_they_are() -> None:
    metrics = LiveMetrics()
    metrics.watch(lambda: READING)
    lines = scraped(metrics).splitlines()
    for line in (
        "prestage_accepted_tokens_total 700.0",
        'prestage_dropped_tokens_total{reason="stale"} 30.0',
        "prestage_queue_depth 2.0",
        "prestage_queue_bytes 10.0",
        "prestage_queue_budget_bytes 100.0",
        "prestage_incomplete_groups 3.0",
        "prestage_producers 4.0",
        "prestage_producer_wait_seconds_total 1.5",
        "prestage_journal_lag_seconds 0.25",
        "prestage_journal_bytes 5000.0",
        "prestage_journal_budget_bytes 9000.0",
        'prestage_journal_commit_seconds_bucket{le="0.001"} 3.0',
        'prestage_journal_commit_seconds_bucket{le="0.01"} 7.0',
        'prestage_journal_commit_seconds_bucket{le="+Inf"} 8.0',
        "prestage_journal_commit_seconds_count 8.0",
        "prestage_journal_commit_seconds_sum 0.5",
        "prestage_policy_lag_updates 2.0",
    ):
        assert line in lines, line


def test_there_is_no_lag_before_a_step_is_trained() -> None:
    metrics = LiveMetrics()
    metrics.watch(lambda: replace(READING, policy_lag_updates=None))
    assert "\nprestage_policy_lag_updates " not in scraped(metrics)


def test_the_age_of_the_queue_is_that_of_its_oldest_group() -> None:
    now = [100.0]
    age = QueueAge(clock=lambda: now[0])

    def look(at: float, formed: int, waiting: int) -> float:
        now[0] = at
        return age.look(formed, waiting)

    assert look(100, formed=0, waiting=0) == 0
    assert look(110, formed=4, waiting=4) == 0  # They came since the last look.
    assert look(120, formed=4, waiting=4) == 10
    assert look(130, formed=6, waiting=6) == 20  # Two more behind them.
    assert look(140, formed=6, waiting=2) == 10  # The first four are gone.
    assert look(150, formed=6, waiting=0) == 0
    assert look(160, formed=7, waiting=1) == 0
    assert look(190, formed=7, waiting=1) == 30
