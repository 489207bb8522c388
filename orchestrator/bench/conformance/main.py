"""`orchestrator conformance --worker=ADDRESS`: runs every rule against a running worker.

The worker must be a fresh one that may be trained on: the suite opens a run and closes steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from orchestrator.bench.conformance.driver import Driver, Refused
from orchestrator.bench.conformance.rules import (
    RULES,
    Broken,
    NotApplicable,
    Subject,
    settle,
)
from orchestrator.bench.synthetic import SyntheticShape
from prestage.protocol import Call, Phase
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.wire.channel import AddressError, open_channel
from prestage.wire.errors import classify
from prestage.wire.security import Role, Security, SecurityConfig, SecurityError


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one rule. `why` is empty when it holds."""

    rule: str
    verdict: str  # "ok", "BROKEN" or "n/a".
    why: str = ""


def run_suite(
    address: str,
    *,
    rows: int = 1,
    tokens_per_row: int = 16,
    connect: Callable[[str], grpc.Channel] = open_channel,
) -> list[Outcome]:
    """Run every rule. Raises `grpc.RpcError` when the worker cannot be reached."""
    driver = Driver(address=address, run_id="conformance", connect=connect)
    try:
        able = driver.stub.GetCapabilities(pb.GetCapabilitiesRequest(), timeout=10)
        multiple = able.row_multiple or 1
        driver.shape = SyntheticShape(
            rows=-(-rows // multiple) * multiple,
            tokens_per_row=tokens_per_row,
            real_length=tokens_per_row - 4,
            micro_batches=3,
            vocab_size=min(100, able.vocab_size or 100),
        )
        driver.open()
        if not driver.state().compiled:
            driver.call(Call.COMPILE)
        subject = Subject(driver=driver, able=able)
        driver.put(driver.batch(subject.step, 0))
        driver.call(Call.FWD_BWD_APPLY, subject.step, 0)  # So that there are metrics to read.
        return [_one(subject, rule.__name__, rule) for rule in RULES]
    finally:
        driver.close()


def _one(subject: Subject, name: str, rule: object) -> Outcome:
    assert callable(rule)
    text = name.replace("_", " ")
    try:
        settle(subject)
        if subject.driver.phase is not Phase.CLOSED:
            return Outcome(rule=text, verdict="BROKEN", why="abort_step did not close the step")
        rule(subject)
    except NotApplicable as error:
        return Outcome(rule=text, verdict="n/a", why=str(error))
    except Broken as error:
        return Outcome(rule=text, verdict="BROKEN", why=str(error))
    except Refused as error:
        return Outcome(rule=text, verdict="BROKEN", why=f"an expected call was refused: {error}")
    except grpc.RpcError as error:
        return Outcome(rule=text, verdict="BROKEN", why=f"transport: {classify(error)}")
    return Outcome(rule=text, verdict="ok")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator conformance", description=__doc__)
    parser.add_argument("--worker", required=True, help="unix:///path or host:port")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens_per_row", type=int, default=16)
    parser.add_argument("--tls_dir", type=Path, help="certificates: tls.crt, tls.key, ca.crt")
    parser.add_argument("--tls_server_name", default="", help="the name in the certificate")
    parser.add_argument("--token_dir", type=Path, help="tokens; the file `drive` is used")
    arguments = parser.parse_args(argv)
    try:
        security = Security(
            SecurityConfig(
                tls_dir=arguments.tls_dir,
                token_dir=arguments.token_dir,
                server_name=arguments.tls_server_name,
            )
        )
        outcomes = run_suite(
            arguments.worker,
            rows=arguments.rows,
            tokens_per_row=arguments.tokens_per_row,
            connect=lambda address: security.open_channel("--worker", address, Role.DRIVE),
        )
    except (AddressError, SecurityError) as error:
        print(f"orchestrator conformance: {error}", file=sys.stderr)
        return 2
    except grpc.RpcError as error:
        print(f"no worker answered at {arguments.worker}: {classify(error)}", file=sys.stderr)
        return 2
    except Refused as error:
        print(f"the suite cannot begin: {error}", file=sys.stderr)
        return 2
    for outcome in outcomes:
        why = f": {outcome.why}" if outcome.why else ""
        print(f"{outcome.verdict:<7}{outcome.rule}{why}")
    broken = sum(outcome.verdict == "BROKEN" for outcome in outcomes)
    print(f"\n{len(outcomes)} rules, {broken} broken")
    return 1 if broken else 0
