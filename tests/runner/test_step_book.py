"""What the book says of a step that was trained again, or by an earlier process."""

from __future__ import annotations

from orchestrator.calls import Done, Send
from orchestrator.ports import Answer, StepFacts
from orchestrator.steps import StepBook
from prestage.protocol import Call

ANSWER = Answer(event=Done())


def send(index: int) -> Send:
    return Send(call=Call.FWD_BWD, step=3, index=index, digest="d")


def test_a_step_that_is_trained_again_counts_its_micro_batches_once() -> None:
    book = StepBook()
    for index, seconds in ((0, 9.0), (1, 9.0), (0, 1.0), (1, 2.0), (2, 3.0)):
        book.called(send(index), ANSWER, seconds)
    assert book.get(3).dispatch_seconds == (1.0, 2.0, 3.0)


def test_a_call_that_is_sent_again_counts_once() -> None:
    book = StepBook()
    for index, seconds in ((0, 1.0), (1, 30.0), (1, 2.0)):
        book.called(send(index), ANSWER, seconds)
    assert book.get(3).dispatch_seconds == (1.0, 2.0)


def test_the_idle_of_a_step_that_an_earlier_process_trained_makes_no_record() -> None:
    book = StepBook()
    facts = StepFacts(step=2, train_step=-1, applied=True, boundary_idle_seconds=0.5)
    book.measured(facts)
    assert book.records() == ()
    book.called(Send(call=Call.FWD_BWD, step=2, index=0, digest="d"), ANSWER, 1.0)
    book.measured(facts)
    assert book.get(2).boundary_idle_seconds == 0.5
